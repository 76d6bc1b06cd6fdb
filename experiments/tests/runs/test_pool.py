"""Worker processes: one that dies is reported and replaced; an interrupt ends them without a traceback."""

import multiprocessing
import os
import signal
from dataclasses import replace

import pytest

from sparsedp_experiments.runs import pool
from sparsedp_experiments.runs.grid import parse_experiment
from sparsedp_experiments.runs.pool import Workplace, run_all, train
from sparsedp_experiments.runs.results import Results


def small(tmp_path, methods):
    base = {"dataset": "digits", "subset": 60, "epochs": 1, "batch_size": 20}
    runs = parse_experiment({"base": base, "grid": {"method": methods}}, "small").runs()
    return runs, Workplace(Results(tmp_path / "small.jsonl", "small"), tmp_path / "runs", True, 1)


def train_but_die_of_dp_sgd(settings, folder):
    if settings["method"] == "dp-sgd":
        os.kill(os.getpid(), signal.SIGKILL)
    return train(settings, folder)


@pytest.mark.nightly
def test_a_killed_worker_is_reported_and_replaced_and_a_run_that_cannot_be_done_is_told(
    tmp_path, monkeypatch
):
    runs, place = small(tmp_path, ["dp-sgd", "tp-topk", "tp-rand"])
    runs = (*runs[:2], replace(runs[2], settings=replace(runs[2].settings, method="nonsense")))
    monkeypatch.setattr(pool, "train", train_but_die_of_dp_sgd)
    status = run_all("small", runs, place, lambda _: None)
    assert set(status.records) == {1}
    assert "a worker process died" in status.failures[0]
    assert "nonsense" in status.failures[2]
    assert not multiprocessing.active_children()
    monkeypatch.undo()
    status = run_all("small", runs[:2], place, lambda _: None)
    assert (set(status.records), status.left) == ({0, 1}, 0)
    assert status.records[1]["noise"].keys() == {"warm-up", "main"}


def test_workers_interrupted_while_they_start_end_without_a_traceback(tmp_path, capfd):
    runs, place = small(tmp_path, ["dp-sgd"])

    def interrupt(_):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run_all("small", runs, place, interrupt)
    assert not multiprocessing.active_children()
    assert capfd.readouterr().err == ""
    assert not list(place.runs.glob("*.log"))
