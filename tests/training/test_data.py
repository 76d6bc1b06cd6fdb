"""What a new user gives: taken for what it is, or told in words; and features of a frozen body."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    IterableDataset,
    SequentialSampler,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
)

import sparsedp
from runs import FEATURES, loss_fn, network, rows, weights
from sparsedp import DataError, ModelError, PerExampleLoss, SparseDPError, Trainer, extract_features, fit
from sparsedp.errors import PrivacyError
from sparsedp.methods import build_plan
from sparsedp_experiments.models import freeze_batch_norm

ASKED = {
    "method": "dp-sgd",
    "epsilon": 8.0,
    "delta": 1e-3,
    "epochs": 1,
    "accountant": "rdp",
    "seed": 0,
    "lr": 0.1,
}


def trained(data, model=None, loss=loss_fn, **more):
    return fit(network() if model is None else model, data, loss, **{**ASKED, "batch_size": 20, **more})


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


class Endless(IterableDataset):
    """Rows without numbers."""

    def __iter__(self):
        return iter(rows(1))


def test_what_is_no_table_of_rows_is_told():
    with pytest.raises(DataError, match="IterableDataset Endless, expected rows that can be drawn by number"):
        trained(Endless())
    with pytest.raises(DataError, match="IterableDataset"):
        trained(DataLoader(Endless(), batch_size=4))
    with pytest.raises(DataError, match=r"one array, expected \(X, y\)"):
        trained(rows(1).tensors[0])
    with pytest.raises(DataError, match="as many targets as rows"):
        trained((torch.zeros(4, FEATURES), torch.zeros(5)))
    with pytest.raises(DataError, match=r"tuple of 3 arrays, expected two, \(X, y\)"):
        trained((*rows(1).tensors, torch.zeros(60)))
    with pytest.raises(DataError, match="encode names"):
        trained((np.array([["a"]]), np.array([1])))
    with pytest.raises(DataError, match="eval_dataset: got object"):
        trained(rows(1), eval_dataset=object())


PICKING = {
    "some rows": {"batch_size": 20, "sampler": SubsetRandomSampler(range(30))},
    "some more often": {"batch_size": 20, "sampler": WeightedRandomSampler([1.0, 2.0] * 30, 60)},
    "the first rows": {"batch_size": 20, "sampler": SequentialSampler(range(30))},
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


def five_times(items):
    return 5 * torch.stack([x for x, _ in items]), torch.stack([y for _, y in items])


def test_a_loader_of_held_out_rows_makes_its_own_batches():
    x, y = rows(7).tensors
    wanted = trained(rows(1), eval_dataset=(5 * x, y)).metrics
    assert trained(rows(1), eval_dataset=DataLoader(rows(7), collate_fn=five_times)).metrics == wanted
    train = DataLoader(rows(1), batch_size=20, collate_fn=five_times)
    as_the_training_rows = trained(train, eval_dataset=rows(7)).metrics
    as_they_are = trained(train, eval_dataset=DataLoader(rows(7))).metrics
    assert as_the_training_rows == trained(train, eval_dataset=DataLoader(TensorDataset(5 * x, y))).metrics
    assert as_they_are != as_the_training_rows


@pytest.mark.parametrize(
    ("units", "words"),
    [
        ([None] * 60, "60 ids are missing"),
        (np.array([1.0, np.nan] * 30), "30 ids are missing"),
        (torch.tensor([1.0, torch.nan] * 30), "30 ids are missing"),
        (np.array(["a", "nan", ""] * 20), "40 ids are missing"),
        (np.array(["2020-01-01", "NaT"] * 30, dtype="datetime64[D]"), "30 ids are missing"),
        (np.array(["a", 1] * 30, dtype=object), "mixed types"),
    ],
)
def test_units_that_name_nobody_are_told(units, words):
    with pytest.raises(DataError, match=f"unit_ids: .*{words}"):
        trained(rows(1), unit_ids=units, unit_name="patient")


def test_an_optimizer_may_be_a_name():
    named = trained(rows(1), optimizer="adam", lr=0.01)
    made = trained(rows(1), optimizer=lambda p: torch.optim.Adam(p, lr=0.01), lr=None)
    assert torch.equal(weights(named.model), weights(made.model))
    with pytest.raises(SparseDPError, match=r"expected one of .*adam.*adamw"):
        trained(rows(1), optimizer="adamm")


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"lr": "0.1"}, "lr: got '0.1', expected a number"),
        ({"lr": -1.0}, "lr: got -1.0, expected a number"),
        ({"optimizer": 3, "lr": None}, r"optimizer: got int, expected a torch\.optim"),
        ({"loss": "mse"}, "criterion: got 'mse', expected a criterion"),
    ],
)
def test_what_is_no_rate_optimizer_or_loss_is_told(wrong, words, tmp_path):
    with pytest.raises(SparseDPError, match=words):
        trained(rows(1), run_dir=tmp_path / "run", **wrong)
    assert not (tmp_path / "run").exists()


def test_a_class_is_no_loss():
    with pytest.raises(SparseDPError, match=r"expected an instance: CrossEntropyLoss\(\)"):
        trained(rows(1), loss=nn.CrossEntropyLoss)


def test_features_that_are_all_nan_are_refused():
    with pytest.raises(DataError, match="train on noise alone"):
        trained((torch.full((60, FEATURES), torch.nan), torch.zeros(60, dtype=torch.long)))


def test_a_run_too_short_for_a_warmup_says_so():
    x, y = rows(1).tensors
    with pytest.raises(SparseDPError, match=r"got 1 steps in all, expected more.*dp-sgd"):
        trained((x[:10], y[:10]), method="tp-topk", batch_size=10)


def normed(*, frozen: bool) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(FEATURES, 4), nn.BatchNorm1d(4), nn.Linear(4, 3)).train(not frozen)


def by_trainer(model):
    plan = build_plan(
        "dp-sgd",
        units=60,
        batch_size=20,
        epochs=1,
        epsilon=8.0,
        delta=1e-3,
        max_grad_norm=1.0,
        accountant="rdp",
    )
    trainer = Trainer(
        model, rows(1), loss_fn, plan=plan, seed=0, optimizer=lambda p: torch.optim.SGD(p, lr=0.1)
    )
    for batch in trainer:
        trainer.step(batch)
    return trainer.finish()


@pytest.mark.parametrize("door", [lambda model: trained(rows(1), model), by_trainer], ids=["fit", "Trainer"])
def test_both_doors_take_frozen_batch_norm_and_refuse_live(door):
    model = normed(frozen=True)
    before = model[1].running_mean.clone()
    assert door(model).complete
    assert torch.equal(model[1].running_mean, before)
    with pytest.raises(ModelError, match=r"freeze_batch_norm\(model\).*GroupNorm"):
        door(normed(frozen=False))
    assert door(freeze_batch_norm(normed(frozen=False))).complete


def test_fit_leaves_modes_as_they_are():
    seen = []
    model = network(dropout=0.5)
    model[2].eval()
    trained(rows(1), model, callbacks=[lambda _: seen.append([m.training for m in model.modules()])])
    assert seen[0] == [True, True, True, False, True]


class Named(Dataset):
    """Rows in dictionaries."""

    def __len__(self):
        return 60

    def __getitem__(self, i):
        x, y = rows(1)[i]
        return {"x": x, "labels": y}


def test_losses_of_their_own_form_have_an_accuracy_too():
    loss = PerExampleLoss(
        lambda model, batch: F.cross_entropy(model(batch["x"]), batch["labels"], reduction="none")
    )
    named = trained(Named(), loss=loss, evaluate=None, eval_dataset=HeldOut(Named()))
    plain = trained(rows(1), eval_dataset=HeldOut(rows(1)))
    assert named.metrics["accuracy"] == plain.metrics["accuracy"]


class HeldOut(Dataset):
    """Other rows: those of another draw, in the form of the first."""

    def __init__(self, like: Dataset) -> None:
        self._named = isinstance(like, Named)

    def __len__(self):
        return 30

    def __getitem__(self, i):
        x, y = rows(7, 30)[i]
        return {"x": x, "labels": y} if self._named else (x, y)


def test_resuming_with_other_rows_is_told_in_words(tmp_path):
    trained(rows(1), run_dir=tmp_path / "run")
    x, y = rows(1).tensors
    with pytest.raises(SparseDPError, match="units was 60 and is 50") as told:
        trained(TensorDataset(x[:50], y[:50]), run_dir=tmp_path / "run", resume=True)
    assert "{" not in str(told.value)


GENERATOR = torch.Generator().manual_seed(3)

PICTURES = TensorDataset(torch.randn(40, 3, 6, 6, generator=GENERATOR), torch.arange(40) % 2)


def body() -> nn.Sequential:
    torch.manual_seed(1)
    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Dropout(0.5), nn.Flatten())


class Centred(nn.Module):
    def forward(self, x):
        return x.flatten(1) - x.flatten(1).mean(0)


class Draws(nn.Module):
    def forward(self, x):
        return x.flatten(1) * torch.rand(len(x), 1)


class Remembers(nn.Module):
    """In a plain attribute: what came before moves what comes next."""

    def __init__(self):
        super().__init__()
        self.seen = 0.0

    def forward(self, x):
        self.seen = self.seen + float(x.sum())
        return x.flatten(1) + self.seen


class Texts(Dataset):
    """Rows of whole numbers."""

    def __len__(self):
        return 5

    def __getitem__(self, index):
        return torch.tensor([index, 6, 0]), torch.tensor(index)


def test_features_are_what_the_body_gives_in_evaluation_mode_in_the_order_of_the_rows():
    network = body()
    features, targets = extract_features(network, PICTURES, batch_size=7).tensors
    assert network.training
    with torch.no_grad():
        expected = torch.cat([network.eval()(x[None]) for x, _ in PICTURES])
    torch.testing.assert_close(features, expected)
    assert torch.equal(targets, PICTURES.tensors[1])
    assert not features.requires_grad


def test_a_head_on_features_is_that_on_pictures_to_rounding():
    def trained(model, rows):
        torch.manual_seed(0)
        head = nn.Linear(64, 2)
        whole = head if model is None else nn.Sequential(model.eval().requires_grad_(False), head)
        sparsedp.fit(
            whole, rows, nn.CrossEntropyLoss(reduction="none"), method="dp-sgd", epsilon=8.0, delta=1e-3,
            accountant="rdp", epochs=2, batch_size=16, lr=1.0, seed=0, progress=False,
        )  # fmt: skip
        return head.weight.detach()

    expected = trained(body(), PICTURES)
    found = trained(None, extract_features(body(), PICTURES))
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-5 * float(expected.abs().max()))


def test_rows_of_whole_numbers_are_looked_up():
    table = nn.EmbeddingBag(7, 4, mode="sum")
    features, _ = extract_features(table, Texts()).tensors
    torch.testing.assert_close(features[2], table.weight[[2, 6, 0]].sum(0).detach())


@pytest.mark.parametrize(
    "part", [Centred(), Draws(), Remembers(), nn.BatchNorm2d(3, track_running_stats=False)]
)
def test_a_body_that_is_no_function_of_a_row_is_refused(part):
    with pytest.raises(ModelError, match="a fixed function of each row"):
        extract_features(part, PICTURES)


def test_a_collate_that_mixes_rows_is_refused():
    def mixed(items):
        inputs = torch.stack([x for x, _ in items])
        return inputs - inputs.mean(0), torch.stack([y for _, y in items])

    with pytest.raises(PrivacyError, match="other rows are in the batch"):
        extract_features(body(), PICTURES, collate_fn=mixed)


def test_what_is_no_pair_of_tensors_is_refused():
    with pytest.raises(DataError, match=r"expected \(input, target\)"):
        extract_features(body(), TensorDataset(PICTURES.tensors[0]))
    with pytest.raises(DataError, match="without rows"):
        extract_features(body(), TensorDataset(torch.zeros(0, 3, 6, 6), torch.zeros(0)))
    with pytest.raises(ModelError, match="one entry a row"):
        extract_features(nn.Flatten(0), PICTURES)
