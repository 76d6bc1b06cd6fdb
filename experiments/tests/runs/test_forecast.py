"""How long an experiment will take: from records of the same kind, and from timed steps."""

import time
from types import SimpleNamespace

import pytest
import torch
from torch.utils.data import TensorDataset

from sparsedp_experiments.cli.sweep import in_words
from sparsedp_experiments.runs import forecast as module
from sparsedp_experiments.runs.forecast import Forecast, forecast, timed
from sparsedp_experiments.runs.grid import GridRun
from sparsedp_experiments.runs.settings import Settings

SMALL = {"dataset": "digits", "epochs": 2, "batch_size": 50, "subset": 300, "accountant": "rdp"}


def runs(*changes):
    return [
        GridRun({"n": str(n)}, n, Settings.from_json({**SMALL, "seed": n, **change}))
        for n, change in enumerate(changes)
    ]


def test_what_has_records_of_its_kind_takes_as_long_as_they_did(monkeypatch):
    monkeypatch.setattr(module, "timed", lambda settings: 100.0)
    all_runs = runs({}, {"lr": 3.0}, {"epsilon": 1.0}, {"batch_size": 60}, {"batch_size": 60, "epsilon": 1.0})
    found = forecast(all_runs, {0: {"seconds": 10.0}, 1: {"seconds": 20.0}})
    assert (found.runs, found.measured, found.recorded) == (3, 1, 1)
    assert found.seconds == (15.0, 100.0, 100.0)


@pytest.mark.parametrize(
    ("seconds", "workers", "expected"),
    [
        ((15, 100, 100), 1, 215),
        ((15, 100, 100), 2, 115),
        ((60, 30), 8, 60),
        ((10, 10, 90), 2, 100),
        ((), 2, 0),
    ],
)
def test_runs_go_to_workers_as_they_get_free(seconds, workers, expected):
    found = Forecast(seconds, measured=0, recorded=1)
    assert found.hours(workers) == pytest.approx(expected / 3600)


@pytest.mark.parametrize(
    ("measured", "recorded", "words"),
    [
        (1, 0, "1 kind of runs timed by a few steps."),
        (2, 0, "2 kinds of runs timed by a few steps."),
        (1, 3, "1 kind of runs timed by a few steps, the others by their records."),
        (0, 2, "All by their records."),
    ],
)
def test_what_was_timed_is_told(measured, recorded, words):
    told = in_words(Forecast((3600.0, 3600.0), measured, recorded), 4)
    assert told == f"2 left: about 1.0 hours with 2 at a time on a machine that does nothing else. {words}"


def test_nothing_left_takes_no_time():
    assert forecast(runs({}), {0: {"seconds": 3.0}}).seconds == ()


def test_timed_steps_are_multiplied_by_how_many_there_will_be(monkeypatch):
    """Every step made to last 20 ms at least."""
    real = time.perf_counter
    slow = module._Watch.__call__

    def slower(self, event):
        time.sleep(0.02)
        slow(self, event)

    monkeypatch.setattr(module._Watch, "__call__", slower)
    (run,) = runs({"epochs": 40})
    began = real()
    seconds = timed(run.settings)
    taken = real() - began
    steps = 40 * 300 / 50
    assert seconds > 0.02 * steps
    assert taken < seconds


@pytest.mark.parametrize(("unit", "expected"), [(None, 3), ("row", 6)])
def test_people_are_counted_not_their_rows(monkeypatch, unit, expected):
    people = TensorDataset(torch.zeros(6, 2))
    people.units = torch.tensor([4, 4, 1, 1, 1, 9])
    monkeypatch.setattr(module, "load_data", lambda settings: SimpleNamespace(train=people))
    settings = Settings.from_json(SMALL if unit is None else {**SMALL, "unit": unit})
    assert module._units(settings) == expected
