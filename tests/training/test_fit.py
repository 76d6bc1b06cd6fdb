"""`fit`: good defaults, clear refusals, a run directory with nothing private in it."""

from __future__ import annotations

import json
import logging
import re
import signal
import threading
from typing import Any

import numpy as np
import pytest
import torch
from safetensors import safe_open
from torch.utils.data import IterableDataset, TensorDataset

from runs import FEATURES, ROWS, by_method, loss_fn, network, placed, rows, weights
from sparsedp import PrivateNormalisation, RunMetadata, fit
from sparsedp.callbacks import deferred_interrupt
from sparsedp.errors import DataError, PrivacyError, PrivacyWarning, SparseDPError
from sparsedp.methods import list_methods
from sparsedp.methods.plan_config import default_batch_size, default_delta
from sparsedp.privacy.ledger import Ledger
from sparsedp.results import Result, StepReport
from sparsedp.runs.run import load_weights
from sparsedp.runs.verify import verify

pytestmark = pytest.mark.usefixtures("checked_once")

QUICK: dict[str, Any] = {
    "epsilon": 8.0, "delta": 1e-3, "epochs": 5, "batch_size": 20, "accountant": "rdp", "seed": 0, "progress": False,
}  # fmt: skip


def quick_fit(**changed) -> Result:
    arguments = {"eval_dataset": rows(7, 30), "method": "tp-topk", **QUICK, **changed}
    data, loss = arguments.pop("data", rows(1)), arguments.pop("loss", loss_fn)
    return fit(network(), data, loss, **placed(arguments))


@pytest.mark.parametrize("method", by_method(method.name for method in list_methods()))
def test_every_private_method_keeps_to_its_epsilon_and_says_so_in_the_record(method, tmp_path):
    result = quick_fit(method=method, run_dir=tmp_path / "run")
    record = json.loads((tmp_path / "run" / "record.json").read_text())
    assert verify(tmp_path / "run", independent=False).passed
    assert (record["status"], record["method"], record["target_epsilon"]) == ("finished", method, 8.0)
    assert 0.99 * 8 < record["epsilon_spent"] == result.ledger.epsilon <= 8.0
    assert record["test_accuracy"] == result.metrics["accuracy"] == result.history[-1].metrics["accuracy"]
    assert (record["d"], record["k"]) == (result.d, result.k)
    assert result.k == result.support.size <= result.d == 39


def test_a_seeded_run_is_marked_as_not_publishable(tmp_path):
    for seed in (3, None):
        result = quick_fit(method="dp-sgd", epochs=1, seed=seed, run_dir=tmp_path / str(seed))
        record = json.loads((tmp_path / str(seed) / "record.json").read_text())
        assert record["publishable"] == result.publishable == (seed is None)


def test_the_defaults_follow_from_the_number_of_units(caplog):
    with caplog.at_level(logging.INFO, logger="sparsedp"):
        result = fit(network(), rows(1), loss_fn, seed=0, progress=False, accountant="rdp")
    assert "delta was not given: it is 1e-05, safe for 60 units (row)" in caplog.text
    assert (result.delta, result.method, result.plan.total_steps) == (1e-5, "dp-sgd", 20 * 2)
    assert result.epsilon <= 3.0


@pytest.mark.parametrize("units", [1, 10, 1437, 10_000, 10_001, 60_000, 71_518, 10**9])
def test_the_default_delta_is_a_power_of_ten_well_below_one_over_n(units):
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
    "unknown method": ({"method": "magic"}, SparseDPError, "expected one of"),
    "ids that do not fit": ({"unit_ids": [0, 1]}, DataError, "2 ids for 60 rows"),
    "two rates": ({"lr": 0.1, "optimizer": torch.optim.SGD}, SparseDPError, "default optimizer"),
    "a rule and an optimizer": ({"lr": lambda plan: 0.1, "optimizer": "adam"}, SparseDPError, "default optimizer"),
    "empty data": ({"data": rows(1, 0)}, DataError, "dataset is empty"),
    "a loss that averages": ({"loss": lambda out, y: loss_fn(out, y).mean()}, SparseDPError, 'reduction="none"'),
    "NaN": ({"data": (torch.full((60, FEATURES), torch.nan), Y)}, DataError, "train on noise alone"),
    "too short": ({"data": (X[:10], Y[:10]), "batch_size": 10, "epochs": 1}, SparseDPError, "1 steps in all.*dp-sgd"),
    "no numbered rows": ({"data": Endless()}, DataError, "IterableDataset Endless, expected rows that can be drawn"),
    "names": ({"data": (np.array([["a"]]), np.array([1]))}, DataError, "encode names"),
    "inputs without channels": (
        {"normalise": PrivateNormalisation(), "data": TensorDataset(torch.zeros(ROWS, 4).long(), Y)}, DataError,
        "normalise: got inputs",
    ),
    "an optimizer that is none": ({"optimizer": lambda p: "sgd", "lr": None}, SparseDPError, "optimizer"),
    "scores that nobody ranks by": ({"public_scores": {"head": 1.0}}, SparseDPError, "does not rank by them"),
    "a cap without a ledger": ({"total_epsilon": 9.0, "run_dir": None}, PrivacyError, "give run_dir"),
}  # fmt: skip


@pytest.mark.parametrize("what", REFUSED)
def test_mistakes_are_refused_before_anything_is_written(what, tmp_path):
    changed, error, words = REFUSED[what]
    with pytest.raises(error, match=words):
        quick_fit(**{"run_dir": tmp_path / "run", **changed})
    assert list(tmp_path.iterdir()) == []


def test_nothing_is_ever_overwritten(tmp_path):
    quick_fit(run_dir=tmp_path / "run", epochs=2)
    (tmp_path / "file").write_text("mine")
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "mine").write_text("mine")
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    for there in ("run", "file", "folder"):
        with pytest.raises(SparseDPError, match="never overwritten"):
            quick_fit(run_dir=tmp_path / there)
    assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == before


def test_nothing_in_the_run_directory_is_named_after_private_quantities(tmp_path):
    run = tmp_path / "run"
    quick_fit(run_dir=run, metadata=RunMetadata(dataset="made up", variant="test"))
    assert sorted(path.name for path in run.iterdir()) == [
        "checkpoint.safetensors", "ledger.jsonl", "metrics.jsonl", "plan.json", "record.json",
    ]  # fmt: skip
    with safe_open(run / "checkpoint.safetensors", "pt") as file:
        texts, tensors = [file.metadata()["checkpoint"]], list(file.keys())
    texts += [path.read_text() for path in run.iterdir() if path.suffix != ".safetensors"]
    keys = {name.rsplit("/", 1)[-1] for name in tensors}
    for text in texts:
        keys |= set(re.findall(r'"([^"]*)":', text.replace('\\"', '"')))
    words = "train_ loss_ clipped finite realis realiz sampled gradient example batch_".split()  # noqa: SIM905
    named = {key for key in keys if any(word in key.lower() for word in words)}
    assert named == {"batch_size"}  # the expected one, which is public
    assert {name.split("/")[0] for name in tensors} == {"model", "optimizer", "controller", "journal"}


def interrupt_at(step, times=1):
    def callback(event):
        if isinstance(event, StepReport) and event.step == step:
            for _ in range(times):
                signal.raise_signal(signal.SIGINT)

    return callback


@pytest.mark.parametrize("times", [1, 2])
def test_ctrl_c_stops_after_the_step_or_at_once_and_leaves_a_run_to_resume(times, tmp_path):
    whole, cut = quick_fit(), tmp_path / "cut"
    with pytest.raises(KeyboardInterrupt):
        quick_fit(run_dir=cut, callbacks=[interrupt_at(6, times)])
    record = json.loads((cut / "record.json").read_text())
    if times == 1:
        assert (record["status"], record["steps_charged"]) == ("stopped", 7)
        assert record["epsilon_spent"] < record["epsilon"] <= 8.0
    result, fresh = quick_fit(run_dir=cut, resume=True), network(5)
    assert torch.equal(weights(result.model), weights(whole.model))
    assert result.history == whole.history
    load_weights(cut, fresh)
    assert torch.equal(weights(fresh), weights(result.model))
    assert not result.model.training


def test_ctrl_c_works_as_before_once_training_is_over_and_training_in_any_thread():
    found = []
    thread = threading.Thread(target=lambda: found.append(quick_fit(epochs=2)))
    thread.start()
    thread.join()
    assert found[0].complete
    quick_fit(epochs=2)
    with deferred_interrupt() as asked:
        signal.raise_signal(signal.SIGINT)
        assert asked()
    with pytest.raises(KeyboardInterrupt):
        signal.raise_signal(signal.SIGINT)


def test_resuming_with_another_request_is_refused_by_name(tmp_path):
    with pytest.raises(KeyboardInterrupt):
        quick_fit(run_dir=tmp_path / "run", callbacks=[interrupt_at(3)])
    for changed, words in (
        ({"epsilon": 9.0}, "epsilon was 8.0 and is 9.0"),
        ({"data": rows(1, 61)}, "units was 60 and is 61"),
        ({"method": "dp-sgd"}, "method was .*tp-topk.* and is .*dp-sgd"),
        ({"accountant": "pld"}, 'accountant was "rdp" and is "pld"'),
        ({"normalise": PrivateNormalisation()}, "normalise was null"),
    ):
        with pytest.raises(PrivacyError, match=words):
            quick_fit(run_dir=tmp_path / "run", resume=True, **changed)


def test_patients_are_protected_when_named_and_missed_when_not(tmp_path):
    """Of a data set that knows whose rows it holds."""
    data = TensorDataset(X, Y)
    data.units = torch.arange(ROWS) // 2
    how = {"unit_ids": data.units, "unit_name": "patient", "batch_size": 10, "run_dir": tmp_path / "run"}
    result = quick_fit(data=data, **how)
    assert (result.unit, result.plan.units) == ("patient", 30)
    assert Ledger.read(tmp_path / "run" / "ledger.jsonl").unit == "patient"
    with pytest.warns(PrivacyWarning, match="protect people"):
        quick_fit(data=data, epochs=2)
