"""Checkpoints come back as they were, or say why not."""

from __future__ import annotations

import math
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from sparsedp.errors import DataError, ModelError, SparseDPError
from sparsedp.optimizers.factory import optimizer_state, restore_optimizer, restore_scheduler
from sparsedp.parameters import ParameterLayout
from sparsedp.runs.checkpoint import Checkpoint, checkpoint_bytes, describe_layout, pack, read_checkpoint
from sparsedp.runs.run import load_weights

STATE: dict[str, Any] = {
    "numbers": [0, -1, 0.1, 1e-300, True, None, "text", math.inf, -math.inf],
    "tuples": ((1, 2), (), [(3,)]),
    "keys": {0: "whole", 1: {"$tensor": "not one"}, "$odd": 2},
    "counter": Counter({3: 1, 7: 2}),
    "tensors": {
        "float": torch.tensor([1.5, math.nan, math.inf]),
        "scalar": torch.tensor(3.0),
        "whole": torch.arange(3),
        "flags": torch.tensor([True, False]),
        "half": torch.tensor([[1.0, 2.0]], dtype=torch.bfloat16),
        "empty": torch.empty(0, 4),
        "channels": torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
    },
}


def assert_same(one: Any, other: Any) -> None:
    assert type(one) is type(other)
    if isinstance(one, torch.Tensor):
        torch.testing.assert_close(one, other, rtol=0, atol=0, equal_nan=True)
    elif isinstance(one, dict):
        assert_same(list(one.items()), list(other.items()))
    elif isinstance(one, (list, tuple)):
        for a, b in zip(one, other, strict=True):
            assert_same(a, b)
    else:
        assert one == other


def write_model(path: Path, model: nn.Module, **more: Any) -> None:
    identity = {"layout": describe_layout(ParameterLayout.of(model))}
    state = {"model": model.state_dict(), "controller": {"tensors": {}}, **more}
    path.write_bytes(checkpoint_bytes(Checkpoint(3, identity, state)))


def test_nested_state_survives_a_round_trip_to_the_bit(tmp_path: Path) -> None:
    path = tmp_path / "checkpoint.safetensors"
    path.write_bytes(checkpoint_bytes(Checkpoint(7, {"plan": "abc"}, STATE)))
    back = read_checkpoint(path)
    assert back.step == 7
    assert back.identity == {"plan": "abc"}
    assert_same(dict(back.state), STATE)
    assert [file.name for file in tmp_path.iterdir()] == [path.name]


def test_what_is_not_plain_data_is_refused_by_name() -> None:
    with pytest.raises(SparseDPError, match=r"optimizer/hook: it holds a function"):
        pack({"hook": lambda: None}, {}, "optimizer")
    with pytest.raises(SparseDPError, match="keys must be"):
        pack({1.5: 0}, {}, "state")


def test_a_missing_file_another_version_any_flipped_byte_or_lost_tail_is_noticed(tmp_path: Path) -> None:
    path = tmp_path / "checkpoint.safetensors"
    with pytest.raises(DataError, match="missing"):
        read_checkpoint(path)
    write_model(path, nn.Linear(3, 2))
    content = path.read_bytes()
    path.write_bytes(content.replace(b'version\\": 2', b'version\\": 9'))
    with pytest.raises(DataError, match="format version 9, this sparsedp reads 2"):
        read_checkpoint(path)
    for place in range(0, len(content), 7):
        damaged = bytearray(content)
        damaged[place] ^= 0x11
        path.write_bytes(damaged)
        with pytest.raises(DataError, match=r"damaged|version|not a sparsedp"):
            read_checkpoint(path)
    for length in (0, 5, len(content) // 2, len(content) - 1):
        path.write_bytes(content[:length])
        with pytest.raises(DataError, match="damaged"):
            read_checkpoint(path)


def test_weights_load_into_the_same_architecture_only(tmp_path: Path) -> None:
    path = tmp_path / "checkpoint.safetensors"
    trained = nn.Linear(3, 2)
    write_model(path, trained)
    fresh = nn.Linear(3, 2)
    load_weights(tmp_path, fresh)
    assert torch.equal(fresh.weight, trained.weight)
    with pytest.raises(ModelError, match="another model"):
        load_weights(path, nn.Linear(4, 2))
    with pytest.raises(ModelError, match="another model"):
        load_weights(path, nn.Linear(3, 2, bias=False))
    write_model(path, trained, average={"weights": {"weight": torch.ones(2, 3), "bias": torch.zeros(2)}})
    load_weights(path, fresh)
    assert torch.equal(fresh.weight, torch.ones(2, 3))


def test_another_optimizer_or_scheduler_is_refused() -> None:
    model = nn.Linear(3, 2)
    saved = optimizer_state(torch.optim.SGD(model.parameters(), lr=0.1))
    with pytest.raises(SparseDPError, match="SGD and got Adam"):
        restore_optimizer(torch.optim.Adam(model.parameters()), saved)
    with pytest.raises(SparseDPError, match="other parameter groups"):
        restore_optimizer(torch.optim.SGD([model.weight], lr=0.1), saved)
    scheduler = torch.optim.lr_scheduler.StepLR(torch.optim.SGD(model.parameters(), lr=0.1), 1)
    with pytest.raises(SparseDPError, match="no scheduler in its checkpoint"):
        restore_scheduler(scheduler, None)
