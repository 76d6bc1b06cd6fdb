"""What a new user gives: taken for what it is, or told in words; and features of a frozen body."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
)

import sparsedp
from runs import FEATURES, loss_fn, network, rows, weights
from sparsedp import DataError, ModelError, PerExampleLoss, extract_features, fit
from sparsedp.errors import PrivacyError

BUDGET = {"epsilon": 8.0, "delta": 1e-3, "epochs": 1, "accountant": "rdp"}
ASKED = {"method": "dp-sgd", "seed": 0, "lr": 0.1, "batch_size": 20, **BUDGET}


def trained(data, model=None, loss=loss_fn, **more):
    return fit(network() if model is None else model, data, loss, **{**ASKED, **more})


@pytest.mark.parametrize("form", ["loader", "tensors", "arrays", "list", "narrow"])
def test_rows_are_taken_in_any_form(form):
    x, y = rows(1).tensors
    given = {
        "loader": DataLoader(rows(1), batch_size=20, shuffle=True),
        "tensors": (x, y),
        "arrays": (x.double().numpy(), y.numpy()),
        "list": [x, y],
        "narrow": (x.numpy(), y.numpy().astype(np.int32)),
    }[form]
    found = trained(given, batch_size=None if form == "loader" else 20, eval_dataset=(rows(7).tensors))
    wanted = trained(rows(1), eval_dataset=rows(7))
    assert torch.equal(weights(found.model), weights(wanted.model))
    assert found.metrics == wanted.metrics


PICKING = {
    "some rows": {"batch_size": 20, "sampler": SubsetRandomSampler(range(30))},
    "some more often": {"batch_size": 20, "sampler": WeightedRandomSampler([1.0, 2.0] * 30, 60)},
    "whole batches": {"batch_sampler": BatchSampler(SubsetRandomSampler(range(30)), 20, drop_last=False)},
    "no batches": {"batch_size": None},
}


@pytest.mark.parametrize("how", PICKING)
def test_a_loader_that_picks_rows_is_refused_for_training_and_for_evaluation(how, tmp_path):
    words = r"Subset\(dataset, indices\)"
    with pytest.raises(DataError, match=f"train_dataset: got .*{words}"):
        trained(DataLoader(rows(1), **PICKING[how]), run_dir=tmp_path / "run")
    with pytest.raises(DataError, match=f"eval_dataset: got .*{words}"):
        trained(rows(1), eval_dataset=DataLoader(rows(7), **PICKING[how]), run_dir=tmp_path / "run")
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("units", "words"),
    [
        ([None] * 60, "60 ids are missing"),
        (np.array([1.0, np.nan] * 30), "30 ids are missing"),
        (np.array(["a", "nan", ""] * 20), "40 ids are missing"),
        (np.array(["2020-01-01", "NaT"] * 30, dtype="datetime64[D]"), "30 ids are missing"),
        (np.array(["a", 1] * 30, dtype=object), "mixed types"),
    ],
)
def test_units_that_name_nobody_are_told(units, words):
    with pytest.raises(DataError, match=f"unit_ids: .*{words}"):
        trained(rows(1), unit_ids=units)


def normed(*, frozen: bool) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(FEATURES, 4), nn.BatchNorm1d(4), nn.Linear(4, 3)).train(not frozen)


GENERATOR = torch.Generator().manual_seed(3)

PICTURES = TensorDataset(torch.randn(40, 3, 6, 6, generator=GENERATOR), torch.arange(40) % 2)


def body() -> nn.Sequential:
    torch.manual_seed(1)
    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Dropout(0.5), nn.Flatten())


def test_features_are_what_the_body_gives_in_evaluation_mode_in_the_order_of_the_rows():
    network = body()
    features, targets = extract_features(network, PICTURES, batch_size=7).tensors
    assert network.training
    with torch.no_grad():
        expected = torch.cat([network.eval()(x[None]) for x, _ in PICTURES])
    torch.testing.assert_close(features, expected)
    assert torch.equal(targets, PICTURES.tensors[1])
    assert not features.requires_grad
    table, numbers = nn.EmbeddingBag(7, 4, mode="sum"), torch.tensor([[0, 6, 0], [1, 6, 0], [2, 6, 0]])
    features, _ = extract_features(table, TensorDataset(numbers, torch.arange(3))).tensors
    torch.testing.assert_close(features[2], table.weight[[2, 6, 0]].sum(0).detach())


class Impure(nn.Module):
    """Features of a row that are not its own: of the batch, of chance, or of what came before."""

    def __init__(self, how):
        super().__init__()
        self.how, self.seen = how, 0.0

    def forward(self, x):
        x = x.flatten(1)
        self.seen = self.seen + float(x.sum())
        return x + {"the batch": x.mean(0), "chance": torch.rand(len(x), 1), "before": self.seen}[self.how]


@pytest.mark.parametrize("how", ["the batch", "chance", "before"])
def test_a_body_that_is_no_function_of_a_row_is_refused(how):
    with pytest.raises(ModelError, match="a fixed function of each row"):
        extract_features(Impure(how), PICTURES)


def test_a_collate_that_mixes_rows_is_refused():
    def mixed(items):
        inputs = torch.stack([x for x, _ in items])
        return inputs - inputs.mean(0), torch.stack([y for _, y in items])

    with pytest.raises(PrivacyError, match="other rows are in the batch"):
        extract_features(body(), PICTURES, collate_fn=mixed)


def test_frozen_batch_norm_is_taken_and_live_is_refused():
    model = normed(frozen=True)
    before = model[1].running_mean.clone()
    assert trained(rows(1), model).complete
    assert torch.equal(model[1].running_mean, before)
    with pytest.raises(ModelError, match=r"freeze_batch_norm\(model\).*GroupNorm"):
        trained(rows(1), normed(frozen=False))
    assert trained(rows(1), sparsedp.freeze_batch_norm(normed(frozen=False))).complete


def test_rows_in_dictionaries_and_an_optimizer_by_name_are_taken():
    def named(seed):
        return [{"x": x, "labels": y} for x, y in rows(seed)]

    loss = PerExampleLoss(lambda model, batch: loss_fn(model(batch["x"]), batch["labels"]))
    found = trained(named(1), loss=loss, eval_dataset=named(7), optimizer="adam", lr=0.01)
    adam = trained(rows(1), optimizer=lambda p: torch.optim.Adam(p, lr=0.01), lr=None, eval_dataset=rows(7))
    assert torch.equal(weights(found.model), weights(adam.model))
    assert found.metrics["accuracy"] == adam.metrics["accuracy"]
