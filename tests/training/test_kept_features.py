"""Kept features: the same run with the cache as without it, computed once, gone on with after a kill, never stale."""

from __future__ import annotations

import copy
import json

import pytest
import torch
from torch import nn
from torch.utils.data import Dataset, TensorDataset

import sparsedp
from sparsedp.core.errors import ModelError, SparseDPError
from sparsedp.training import kept_features
from sparsedp.training.kept_features import keep_features


def network():
    torch.manual_seed(7)
    body = nn.Sequential(nn.Conv2d(1, 4, 3, padding=1), nn.ReLU(), nn.AvgPool2d(2), nn.Flatten())
    return nn.Sequential(body.requires_grad_(False), nn.Linear(64, 3))


def records(rows=700, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return TensorDataset(
        torch.rand(rows, 1, 8, 8, generator=generator), torch.randint(0, 3, (rows,), generator=generator)
    )


def run(model, out, **settings):
    return sparsedp.fit(
        model,
        records(),
        nn.CrossEntropyLoss(reduction="none"),
        method="tp-topk",
        epsilon=4.0,
        delta=1e-3,
        accountant="rdp",
        epochs=2,
        batch_size=128,
        lr=0.5,
        seed=3,
        eval_dataset=records(100, seed=1),
        out=out,
        progress=False,
        **settings,
    )


def test_training_with_kept_features_gives_the_bits_of_training_without(tmp_path):
    plain, cached = network(), network()
    without = run(plain, tmp_path / "plain")
    kept = run(cached, tmp_path / "cached", cache_features=tmp_path / "features")
    assert kept.model is cached
    for (name, expected), found in zip(plain.state_dict().items(), cached.state_dict().values(), strict=True):
        assert torch.equal(expected, found), name
    assert kept.metrics == without.metrics
    assert torch.equal(kept.support.indices, without.support.indices)


def test_a_run_with_kept_features_loads_into_the_whole_model_and_names_its_frozen_part(tmp_path):
    result = run(network(), tmp_path / "run", cache_features=tmp_path / "features")
    again = network()
    sparsedp.load_weights(tmp_path / "run", again)
    assert all(torch.equal(a, b) for a, b in zip(again.parameters(), result.model.parameters(), strict=True))
    schema = json.loads((tmp_path / "run" / "record.json").read_text())["schema"]
    assert len(schema["frozen_part"]) == 64


def test_features_are_computed_once_and_gone_on_with_after_a_kill(tmp_path):
    calls = []

    class Counted(nn.Flatten):
        def forward(self, x):
            calls.append(len(x))
            if sum(calls) > 2 * kept_features.BLOCK and len(calls) < 4:
                raise KeyboardInterrupt
            return super().forward(x)

    body = Counted()
    with pytest.raises(KeyboardInterrupt):
        keep_features(body, records(), None, tmp_path, "")
    done = len(calls)
    found = keep_features(body, records(), None, tmp_path, "")
    assert torch.equal(found.features, records().tensors[0].flatten(1))
    assert done == 3  # one row for the shape, one whole block, one that was killed
    assert calls[done:] == [1, 256, 188]
    assert torch.equal(keep_features(body, records(), None, tmp_path, "").features, found.features)
    assert calls[-1] == 1, "nothing but the shape was asked again"


def test_a_damaged_block_is_made_again(tmp_path):
    body = nn.Flatten()
    keep_features(body, records(), None, tmp_path, "")
    (file,) = tmp_path.glob("*/features.npy")
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    assert torch.equal(
        keep_features(body, records(), None, tmp_path, "").features, records().tensors[0].flatten(1)
    )


def test_other_weights_and_other_records_are_other_features(tmp_path):
    body = network()[0]
    first = keep_features(body, records(), None, tmp_path, "").features.clone()
    moved = copy.deepcopy(body)
    with torch.no_grad():
        moved[0].bias.add_(1.0)
    assert not torch.equal(keep_features(moved, records(), None, tmp_path, "").features, first)
    assert not torch.equal(keep_features(body, records(seed=5), None, tmp_path, "").features, first)
    assert len(list(tmp_path.iterdir())) == 3


class Flipped(Dataset):
    def __len__(self):
        return 64

    def __getitem__(self, index):
        x = torch.arange(4.0) + index
        return (x.flip(0) if torch.rand(()) < 0.5 else x), torch.tensor(0)


def test_augmented_records_have_no_features_to_keep(tmp_path):
    with pytest.raises(SparseDPError, match="augmentation"):
        keep_features(nn.Identity(), Flipped(), None, tmp_path, "")
    assert not list(tmp_path.iterdir())


def test_a_model_without_a_frozen_first_part_is_told_or_trained_as_it_is(tmp_path):
    trained = nn.Sequential(nn.Flatten(), nn.Linear(64, 3))
    with pytest.raises(ModelError, match="freeze them"):
        run(trained, tmp_path / "a", cache_features=tmp_path / "features")
    with pytest.raises(ModelError, match=r"expected an nn.Sequential"):
        run(nn.Bilinear(2, 2, 3), tmp_path / "b", cache_features=tmp_path / "features")
    assert run(trained, tmp_path / "c", cache_features="auto").model is trained
