"""`fit`: good defaults, clear refusals, a run directory with nothing private in it."""

from __future__ import annotations

import json
import logging
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors import safe_open
from torch import nn
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset

from flat_settings import placed
from runs import FEATURES, ROWS, by_method, loss_fn, network, rows, weights
from sparsedp import PrivateNormalisation, RunMetadata, fit
from sparsedp.callbacks import deferred_interrupt
from sparsedp.errors import DataError, PrivacyError, PrivacyWarning, SparseDPError
from sparsedp.methods import list_methods
from sparsedp.methods.plan_config import default_batch_size, default_delta
from sparsedp.privacy.ledger import Ledger
from sparsedp.privacy.plan import Plan
from sparsedp.results import Event, Result, StepReport
from sparsedp.runs.run import load_weights
from sparsedp.training.planning import spec_for

pytestmark = pytest.mark.usefixtures("checked_once")

QUICK: dict[str, Any] = {
    "epsilon": 8.0, "delta": 1e-3, "epochs": 5, "batch_size": 20, "accountant": "rdp", "seed": 0, "progress": False,
}  # fmt: skip


def quick_fit(**changed: Any) -> Result:
    arguments = {"eval_dataset": rows(7, 30), "method": "tp-topk", **QUICK, **changed}
    data, loss = arguments.pop("data", rows(1)), arguments.pop("loss", loss_fn)
    return fit(network(), data, loss, **placed(arguments))


@pytest.mark.parametrize("method", by_method(method.name for method in list_methods()))
def test_every_private_method_keeps_to_its_epsilon_and_says_so_in_the_record(
    method: str, tmp_path: Path
) -> None:
    result = quick_fit(method=method, run_dir=tmp_path / "run")
    record = json.loads((tmp_path / "run" / "record.json").read_text())
    ledger = Ledger.read(tmp_path / "run" / "ledger.jsonl")
    assert record["status"] == "finished"
    assert record["method"] == method
    assert record["epsilon_spent"] == ledger.spent(1e-3, "rdp") == result.ledger.epsilon
    assert 0.99 * 8 < record["epsilon_spent"] <= 8.0
    assert record["target_epsilon"] == 8.0
    assert (result.ledger.head, result.ledger.entries) == (ledger.head, ledger.length)
    before = {"head": ledger.heads[-2], "length": ledger.length - 1}  # the last line binds the record
    assert record["ledger"] == before
    assert record["test_accuracy"] == result.metrics["accuracy"] == result.history[-1].metrics["accuracy"]
    assert (record["d"], record["k"]) == (result.d, result.k)
    assert result.k == result.support.size <= result.d == 39
    assert record["plan"] == Plan.from_json((tmp_path / "run" / "plan.json").read_text()).fingerprint


def test_a_seeded_run_is_marked_as_not_publishable(tmp_path: Path) -> None:
    for seed in (3, None):
        result = quick_fit(method="dp-sgd", epochs=1, seed=seed, run_dir=tmp_path / str(seed))
        record = json.loads((tmp_path / str(seed) / "record.json").read_text())
        assert record["publishable"] == result.publishable == (seed is None)


def test_a_model_with_signal_learns() -> None:
    result = quick_fit(epsilon=50.0, epochs=30, lr=0.5)
    assert result.metrics["accuracy"] > 0.8


def test_the_defaults_follow_from_the_number_of_units(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger="sparsedp"):
        result = fit(network(), rows(1), loss_fn, seed=0, progress=False, accountant="rdp")
    assert "delta was not given: it is 1e-05, safe for 60 units (row)" in caplog.text
    assert result.delta == 1e-5
    assert result.epsilon <= 3.0
    assert result.method == "dp-sgd"
    assert result.plan.total_steps == 20 * 2
    assert result.plan.expected_batch_size(result.plan.phases[0]) == 32
    assert {phase.clip_norm for phase in result.plan.phases} == {1.0}


@pytest.mark.parametrize("units", [1, 10, 1437, 10_000, 10_001, 60_000, 71_518, 10**9])
def test_the_default_delta_is_a_power_of_ten_well_below_one_over_n(units: int) -> None:
    delta = default_delta(units)
    assert delta <= 1e-5
    assert delta * units <= 0.1 * (1 + 1e-12)
    assert delta == 1e-5 or delta * units > 0.01 * (1 - 1e-12)
    assert float(f"{delta:.0e}") == delta
    assert 1 <= default_batch_size(units) <= units


X, Y = rows(1).tensors


class Endless(IterableDataset[Any]):
    """Rows without numbers."""

    def __iter__(self) -> Any:
        return iter(rows(1))


REFUSED: dict[str, tuple[dict[str, Any], type[SparseDPError], str]] = {
    "batch too large": ({"batch_size": ROWS + 1}, PrivacyError, "at most the number of units"),
    "no epochs": ({"epochs": 0}, SparseDPError, "epochs: got 0"),
    "no batch": ({"batch_size": 0}, SparseDPError, "batch_size: got 0"),
    "no budget": ({"epsilon": 0.0}, SparseDPError, "epsilon"),
    "unknown method": ({"method": "magic"}, SparseDPError, "expected one of"),
    "unknown accountant": ({"accountant": "magic"}, SparseDPError, "accountant"),
    "unit without ids": ({"unit_name": "patient"}, PrivacyError, "give unit_ids="),
    "ids that do not fit": ({"unit_ids": [0, 1]}, DataError, "2 ids for 60 rows"),
    "a ratio of words": ({"active_ratio": "half"}, SparseDPError, "active_ratio"),
    "a ratio of nothing": ({"active_ratio": 0.001}, SparseDPError, "active_ratio"),
    "two rates": ({"lr": 0.1, "optimizer": torch.optim.SGD}, SparseDPError, "default optimizer"),
    "empty evaluation": ({"eval_dataset": rows(1, 0)}, DataError, "eval_dataset is empty"),
    "empty data": ({"data": rows(1, 0)}, DataError, "dataset is empty"),
    "a rate in words": ({"lr": "0.1"}, SparseDPError, "lr: got '0.1', expected a number"),
    "a rate below zero": ({"lr": -1.0}, SparseDPError, "lr: got -1.0, expected a number"),
    "a number for an optimizer": ({"optimizer": 3}, SparseDPError, r"optimizer: got int, expected a torch\.optim"),
    "an unknown optimizer": ({"optimizer": "adamm"}, SparseDPError, "expected one of .*adam.*adamw"),
    "a loss in words": ({"loss": "mse"}, SparseDPError, "criterion: got 'mse', expected a criterion"),
    "a class": ({"loss": nn.CrossEntropyLoss}, SparseDPError, r"expected an instance: CrossEntropyLoss\(\)"),
    "a loss that averages": ({"loss": lambda out, y: loss_fn(out, y).mean()}, SparseDPError, 'reduction="none"'),
    "NaN": ({"data": (torch.full((60, FEATURES), torch.nan), Y)}, DataError, "train on noise alone"),
    "too short": ({"data": (X[:10], Y[:10]), "batch_size": 10, "epochs": 1}, SparseDPError, "1 steps in all.*dp-sgd"),
    "no numbered rows": ({"data": Endless()}, DataError, "IterableDataset Endless, expected rows that can be drawn"),
    "a loader of them": ({"data": DataLoader(Endless(), batch_size=4)}, DataError, "IterableDataset"),
    "one array": ({"data": X}, DataError, r"expected two arrays, \(X, y\)"),
    "three arrays": ({"data": (X, Y, Y)}, DataError, r"got tuple, expected two arrays, \(X, y\)"),
    "other lengths": ({"data": (X[:4], Y[:5])}, DataError, "as many targets as rows"),
    "names": ({"data": (np.array([["a"]]), np.array([1]))}, DataError, "encode names"),
    "no held-out data": ({"eval_dataset": object()}, DataError, "eval_dataset: got object"),
    "columns that are not there": (
        {"normalise": PrivateNormalisation(centre=False, columns=(FEATURES,))}, PrivacyError,
        f"columns: got {FEATURES}, expected numbers below {FEATURES}",
    ),
    "inputs without channels": (
        {"normalise": PrivateNormalisation(), "data": TensorDataset(torch.zeros(ROWS, 4).long(), Y)}, DataError,
        "normalise: got inputs",
    ),
    "scores that nobody ranks by": ({"public_scores": {"head": 1.0}}, SparseDPError, "does not rank by them"),
    "a cap without a ledger": ({"total_epsilon": 9.0, "run_dir": None}, PrivacyError, "give run_dir"),
}  # fmt: skip


@pytest.mark.parametrize("what", REFUSED)
def test_mistakes_are_refused_before_anything_is_written(what: str, tmp_path: Path) -> None:
    changed, error, words = REFUSED[what]
    with pytest.raises(error, match=words):
        quick_fit(**{"run_dir": tmp_path / "run", **changed})
    assert list(tmp_path.iterdir()) == []


def test_a_loss_that_averages_is_taken_apart() -> None:
    ways = (loss_fn, nn.CrossEntropyLoss(), nn.functional.cross_entropy)
    kept = [weights(fit(network(), rows(1), loss, **QUICK).model) for loss in ways]
    assert torch.equal(kept[0], kept[1])
    assert torch.equal(kept[0], kept[2])


@pytest.mark.parametrize("there", ["run", "file", "folder"])
def test_nothing_is_ever_overwritten(there: str, tmp_path: Path) -> None:
    out = tmp_path / "run"
    if there == "run":
        quick_fit(run_dir=out, epochs=2)
    elif there == "file":
        out.write_text("mine")
    else:
        out.mkdir()
        (out / "mine").write_text("mine")
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    with pytest.raises(SparseDPError, match="never overwritten"):
        quick_fit(run_dir=out)
    assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == before


def all_keys(value: Any) -> Iterator[str]:
    if isinstance(value, dict):
        for key, inner in value.items():
            yield str(key)
            yield from all_keys(inner)
    elif isinstance(value, list):
        for inner in value:
            yield from all_keys(inner)


def test_nothing_in_the_run_directory_is_named_after_private_quantities(tmp_path: Path) -> None:
    run = tmp_path / "run"
    quick_fit(run_dir=run, metadata=RunMetadata(dataset="made up", variant="test"))
    assert sorted(path.name for path in run.iterdir()) == [
        "checkpoint.safetensors", "ledger.jsonl", "metrics.jsonl", "plan.json", "record.json",
    ]  # fmt: skip
    with safe_open(run / "checkpoint.safetensors", "pt") as file:
        document = json.loads(file.metadata()["checkpoint"])["document"]
        tensors = list(file.keys())
    keys = set(all_keys(document)) | {name.rsplit("/", 1)[-1] for name in tensors}
    for name in ("plan.json", "record.json"):
        keys |= set(all_keys(json.loads((run / name).read_text())))
    for name in ("metrics.jsonl", "ledger.jsonl"):
        for line in (run / name).read_text().splitlines():
            keys |= set(all_keys(json.loads(line)))
    words = (
        "train_",
        "loss_",
        "clipped",
        "finite",
        "realis",
        "realiz",
        "sampled",
        "gradient",
        "example",
        "batch_",
    )
    named = {key for key in keys if any(word in key.lower() for word in words)}
    assert named == {"batch_size"}  # the expected one, which is public
    groups = {name.split("/")[0] for name in tensors}
    assert groups == {"model", "optimizer", "controller", "journal"}


def test_the_weights_of_a_run_can_be_loaded_again(tmp_path: Path) -> None:
    result = quick_fit(run_dir=tmp_path / "run", ema_decay=0.8)
    fresh = network(5)
    load_weights(tmp_path / "run", fresh)
    assert torch.equal(weights(fresh), weights(result.model))
    assert not result.model.training


def interrupt_at(step: int, times: int = 1) -> Any:
    def callback(event: Event) -> None:
        if isinstance(event, StepReport) and event.step == step:
            for _ in range(times):
                signal.raise_signal(signal.SIGINT)

    return callback


def test_ctrl_c_stops_after_the_step_and_leaves_a_run_to_resume(tmp_path: Path) -> None:
    whole = quick_fit(run_dir=tmp_path / "whole", epochs=70)
    with pytest.raises(KeyboardInterrupt):
        quick_fit(run_dir=tmp_path / "cut", epochs=70, callbacks=[interrupt_at(100)])
    record = json.loads((tmp_path / "cut" / "record.json").read_text())
    assert record["status"] == "stopped"
    assert record["steps_charged"] == 101
    assert record["epsilon_spent"] < record["epsilon"] <= 8.0
    result = quick_fit(run_dir=tmp_path / "cut", epochs=70, resume=True)
    assert torch.equal(weights(result.model), weights(whole.model))
    assert result.history == whole.history


def test_a_second_ctrl_c_acts_at_once_and_the_run_can_still_be_resumed(tmp_path: Path) -> None:
    whole = quick_fit()
    with pytest.raises(KeyboardInterrupt):
        quick_fit(run_dir=tmp_path / "cut", callbacks=[interrupt_at(6, times=2)])
    assert torch.equal(weights(quick_fit(run_dir=tmp_path / "cut", resume=True).model), weights(whole.model))


def test_ctrl_c_works_as_before_once_training_is_over() -> None:
    quick_fit(epochs=2)
    with deferred_interrupt() as asked:
        signal.raise_signal(signal.SIGINT)
        assert asked()
    with pytest.raises(KeyboardInterrupt):
        signal.raise_signal(signal.SIGINT)


def test_training_works_outside_the_main_thread() -> None:
    found: list[Result] = []
    thread = threading.Thread(target=lambda: found.append(quick_fit(epochs=2)))
    thread.start()
    thread.join()
    assert found[0].complete


def test_resuming_with_another_request_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt):
        quick_fit(run_dir=tmp_path / "run", callbacks=[interrupt_at(3)])
    for changed, words in (
        ({"epsilon": 9.0}, "epsilon was 8.0 and is 9.0"),
        ({"epochs": 6}, "epochs was 5 and is 6"),
        ({"delta": 1e-4}, "delta was 0.001 and is 0.0001"),
        ({"data": rows(1, 61)}, "units was 60 and is 61"),
        ({"method": "dp-sgd"}, "method was .*tp-topk.* and is .*dp-sgd"),
        ({"active_ratio": 0.5}, "active_ratio was 0.2 and is 0.5"),
        ({"accountant": "pld"}, 'accountant was "rdp" and is "pld"'),
        ({"normalise": PrivateNormalisation()}, "normalise was null"),
    ):
        with pytest.raises(PrivacyError, match=words):
            quick_fit(run_dir=tmp_path / "run", resume=True, **changed)


class Patients(Dataset[tuple[torch.Tensor, torch.Tensor]]):
    """Knows whose rows it holds."""

    def __init__(self) -> None:
        self.units = torch.arange(ROWS) // 2
        self.inputs, self.targets = rows(1).tensors

    def __len__(self) -> int:
        return ROWS

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        return self.inputs[index], self.targets[index]


def test_patients_are_protected_when_named_and_missed_when_not(tmp_path: Path) -> None:
    data = Patients()
    result = quick_fit(
        data=data, unit_ids=data.units, unit_name="patient", batch_size=10, run_dir=tmp_path / "run"
    )
    assert result.unit == "patient"
    assert result.plan.units == 30
    assert Ledger.read(tmp_path / "run" / "ledger.jsonl").unit == "patient"
    with pytest.warns(PrivacyWarning, match="protect people"):
        quick_fit(data=data, epochs=2)


@pytest.mark.parametrize("method", ["auto", "fest"])
def test_a_large_delta_is_warned_of_once(method: str) -> None:
    with pytest.warns(PrivacyWarning, match="not below 1/N") as found:
        spec_for(network(), method, units=ROWS, unit_name="row", delta=0.1).plan()
    assert len(found) == 1
