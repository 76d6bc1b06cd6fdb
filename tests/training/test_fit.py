"""`fit`: good defaults, clear refusals, a run directory with nothing private in it."""

from __future__ import annotations

import json
import logging
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from torch import nn
from torch.utils.data import Dataset

from every_day import by_method
from flat_settings import placed
from runs import CLASSES, FEATURES, ROWS, loss_fn, network, rows, weights
from sparsedp import PerExampleLoss, RunMetadata, fit
from sparsedp.callbacks import deferred_interrupt
from sparsedp.errors import DataError, PrivacyError, PrivacyWarning, SparseDPError
from sparsedp.methods import get_method, list_methods
from sparsedp.methods.plan_config import default_batch_size, default_delta
from sparsedp.privacy.accounting import accountant
from sparsedp.privacy.calibration import NominalSplit
from sparsedp.privacy.ledger import Ledger
from sparsedp.privacy.plan import Plan
from sparsedp.results import Event, Result, StepReport
from sparsedp.runs.run import load_weights

pytestmark = pytest.mark.usefixtures("checked_once")

QUICK: dict[str, Any] = {
    "epsilon": 8.0, "delta": 1e-3, "epochs": 5, "batch_size": 20, "accountant": "rdp", "seed": 0, "progress": False,
}  # fmt: skip


def quick_fit(**changed: Any) -> Result:
    arguments = {"eval_dataset": rows(7, 30), "method": "tp-topk", **QUICK, **changed}
    data = arguments.pop("data", rows(1))
    return fit(network(), data, loss_fn, **placed(arguments))


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
    "empty data": ({"data": rows(1, 0)}, DataError, "train_dataset is empty"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_mistakes_are_refused_before_anything_is_written(what: str, tmp_path: Path) -> None:
    changed, error, words = REFUSED[what]
    with pytest.raises(error, match=words):
        quick_fit(run_dir=tmp_path / "run", **changed)
    assert list(tmp_path.iterdir()) == []


def test_a_loss_that_averages_is_taken_apart_or_refused_with_the_remedy(tmp_path: Path) -> None:
    ways = (loss_fn, nn.CrossEntropyLoss(), nn.functional.cross_entropy)
    kept = [weights(fit(network(), rows(1), loss, **QUICK).model) for loss in ways]
    assert torch.equal(kept[0], kept[1])
    assert torch.equal(kept[0], kept[2])
    with pytest.raises(SparseDPError, match='reduction="none"'):
        fit(
            network(), rows(1), lambda output, y: loss_fn(output, y).mean(), run_dir=tmp_path / "run", **QUICK
        )
    assert list(tmp_path.iterdir()) == []


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


def test_an_empty_folder_and_missing_parents_will_do(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    quick_fit(run_dir=tmp_path / "empty", epochs=2)
    quick_fit(run_dir=tmp_path / "a" / "b" / "run", epochs=2)
    assert sorted(path.name for path in (tmp_path / "a" / "b").iterdir()) == ["run"]


def test_a_folder_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(SparseDPError, match="cannot write a run"):
        quick_fit(run_dir=tmp_path / "file" / "run")


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


def test_general_losses_nominal_splits_and_options_pass_through() -> None:
    result = fit(
        nn.Linear(FEATURES, CLASSES),
        rows(1),
        PerExampleLoss(lambda model, batch: loss_fn(model(batch[0]), batch[1])),
        method=get_method(
            "tp-topk", split=NominalSplit(0.3), ranking="coherent", active_ratio=0.5, warmup_fraction=0.4
        ),
        max_grad_norm=(1.0, 0.5),
        **QUICK,
    )
    first, second = result.plan.phases
    assert (first.steps, second.steps) == (6, 9)
    assert (first.clip_norm, second.clip_norm) == (1.0, 0.5)
    assert first.noise_multiplier > second.noise_multiplier
    alone = accountant("rdp").epsilon(result.plan.events(6), 1e-3)
    assert alone == pytest.approx(2.4, rel=0.01)
    assert result.k == 9
