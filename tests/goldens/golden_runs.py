"""Small seeded runs of every method, and the SHA-256 of what they gave: weights, supports, ledger, metrics."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import sparsedp
from sparsedp.methods.adafest import Contributions

FILE = Path(__file__).with_name("goldens.json")
MODELS = ("linear", "cnn")
BY_ROWS = ("adafest", "fest", "given")
"""Methods that also run on a table of rows: on the other models some of them have nothing to choose."""
_ROWS, _HELD_OUT, _STOP_AFTER = 192, 64, 5


def arithmetic() -> str:
    """The digest of a few sums whose last bits depend on processor and libraries."""
    generator = torch.Generator().manual_seed(0)
    x, w = torch.rand(32, 3, 11, 11, generator=generator), torch.rand(7, 3, 3, 3, generator=generator)
    convolved = torch.nn.functional.conv2d(x, w)
    flat = convolved.flatten(1)
    parts = (convolved, flat @ flat.T, flat.sum(0), flat.softmax(1).log(), flat.double().cos())
    return _digest([torch.__version__, np.__version__, *(_bytes(part) for part in parts)])


def digests(method: str, model: str, out: Path, *, interrupted: bool = False) -> dict[str, str]:
    """What a run of `method` gave, by quantity; `interrupted` stops it on the way and resumes it."""
    if interrupted:
        try:
            _fit(method, model, out, _stop)
        except _StopError:
            result, _ = _fit(method, model, out, resume=True)
            return _content(result, None, out)
        raise AssertionError(f"{method}: the run ended before it was stopped")
    return _content(*_fit(method, model, out), out)


def cases() -> list[tuple[str, str]]:
    """Every method on every model, and some on the table."""
    every = [(method.name, model) for method in sparsedp.all_methods() for model in MODELS]
    return [*every, *((method, "table") for method in BY_ROWS)]


class _StopError(Exception):
    pass


def _stop(event: object) -> None:
    if isinstance(event, sparsedp.StepReport) and event.step == _STOP_AFTER:
        raise _StopError


def _fit(
    method: str, model: str, out: Path, watch: Any = None, resume: bool = False
) -> tuple[sparsedp.Result, list[Tensor]]:
    supports: list[Tensor] = []

    def note(event: object) -> None:
        if isinstance(event, sparsedp.StepReport):
            supports.append(event.released.support.indices.clone())

    torch.manual_seed(3)
    network = _MODELS[model]()
    train, test = _digits()
    protection: dict[str, Any] = {"epsilon": 2.0, "delta": 1e-3, "accountant": "rdp"}
    rows: dict[str, Any] = {"ranking": Contributions(1.0, 0.3)} if method == "adafest" else {}
    rows = {"active_ratio": 0.3} if method == "given" else rows
    without: dict[str, dict[str, Any]] = {"noisy-sgd": {"noise_std": 0.05}, "clipped-sgd": {}}
    result = sparsedp.fit(
        network,
        train,
        nn.CrossEntropyLoss(reduction="none"),
        method=method,
        **without.get(method, protection),
        options=sparsedp.MethodOptions(**rows) if rows and model == "table" else None,
        epochs=3,
        batch_size=48,
        lr=0.5,
        eval_dataset=test,
        out=out,
        resume=resume,
        seed=7,
        callbacks=(note,) if watch is None else (note, watch),
        progress=False,
    )
    return result, supports


def _linear() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 10))


def _cnn() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 6, 3, padding=1),
        nn.GroupNorm(2, 6),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(6, 8, 3),
        nn.Tanh(),
        nn.Flatten(),
        nn.Linear(32, 10),
    )


class _Table(nn.Module):
    """A row for every grey level of every pixel; their mean, and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.rows = nn.Embedding(64 * 17, 4)
        self.out = nn.Linear(4, 10)

    def forward(self, pictures: Tensor) -> Tensor:
        levels = (pictures.flatten(1) * 16).round().long()
        return self.out(self.rows(levels + 17 * torch.arange(64)).mean(1))


_MODELS = {"linear": _linear, "cnn": _cnn, "table": _Table}


def _digits() -> tuple[TensorDataset, TensorDataset]:
    pictures, labels = load_digits(return_X_y=True)
    x = torch.tensor(pictures, dtype=torch.float32).reshape(-1, 1, 8, 8) / 16
    y = torch.tensor(labels, dtype=torch.int64)
    end = _ROWS + _HELD_OUT
    return TensorDataset(x[:_ROWS], y[:_ROWS]), TensorDataset(x[_ROWS:end], y[_ROWS:end])


def _content(result: sparsedp.Result, supports: list[Tensor] | None, out: Path) -> dict[str, str]:
    """One digest a quantity. The supports of single steps are seen by a run that was not interrupted alone."""
    weights = {name: _bytes(value) for name, value in sorted(result.model.state_dict().items())}
    metrics = [
        [e.epoch, e.step, e.phase, e.epsilon, e.active, e.learning_rate, dict(e.metrics)]
        for e in result.history
    ]
    spans = [[span.step, span.active, dict(span.by_parameter)] for span in result.supports]
    found = {
        "weights": _digest(weights),
        "support": _digest([_bytes(result.support.indices), spans]),
        "ledger": _digest(_charges(out)),
        "metrics": _digest([metrics, dict(result.metrics)]),
    }
    if supports is not None:
        found["supports by step"] = _digest([_bytes(support) for support in supports])
    return found


def _charges(out: Path) -> list[list[object]]:
    """What every step cost: the ledger's content, however it is cut into blocks."""
    lines = [json.loads(line) for line in (out / "ledger.jsonl").read_text().splitlines()]
    blocks = [line for line in lines if line["kind"] == "block"]
    return [
        [block["phase"], step, block["sampling_rate"], block["noise_multiplier"]]
        for block in blocks
        for step in range(block["first_step"], block["first_step"] + block["steps"])
    ]


def _bytes(tensor: Tensor) -> str:
    plain = tensor.detach().cpu().contiguous()
    return f"{plain.dtype} {list(plain.shape)} {plain.numpy().tobytes().hex()}"


def _digest(value: Mapping[str, Any] | list[Any]) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True, allow_nan=False).encode()).hexdigest()
