"""Worker processes: they die with a message and are replaced."""

import os
import signal
import time
from multiprocessing import Pipe

import pytest
import torch

from sparsedp_experiments.runs.pool import Done, Failed, Job, Pool, Progress, work
from sparsedp_experiments.runs.settings import Settings

TINY = {"dataset": "digits", "subset": 60, "epochs": 1, "batch_size": 20, "seed": 0}


def outcome(pool: Pool) -> tuple[int, object]:
    while True:
        for task, message in pool.messages(1.0):
            if not isinstance(message, Progress):
                return task, message


@pytest.mark.nightly
def test_a_killed_worker_is_reported_and_replaced(tmp_path):
    settings = Settings.from_json(TINY).resolved().to_json()
    pool = Pool(1, tmp_path)
    try:
        pool.start(7, Job(settings, str(tmp_path / "never")))
        assert (pool.busy, pool.has_room) == ((7,), False)
        os.kill(pool._workers[0].process.pid, signal.SIGKILL)
        task, message = outcome(pool)
        assert task == 7
        assert isinstance(message, Failed)
        assert "signal 9" in message.message
        assert pool.has_room

        pool.start(8, Job({**settings, "method": "nonsense"}, str(tmp_path / "never")))
        task, message = outcome(pool)
        assert isinstance(message, Failed)
        assert "nonsense" in message.message

        pool.start(9, Job(settings, str(tmp_path / "run")))
        task, message = outcome(pool)
        assert task == 9
        assert isinstance(message, Done)
        assert message.record["status"] == "finished"
        assert set(message.noise) == {"warm-up", "main"}
        processes = [worker.process for worker in pool._workers]
    finally:
        pool.close()
    deadline = time.monotonic() + 10
    while any(process.is_alive() for process in processes) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not any(process.is_alive() for process in processes)


def test_a_worker_interrupted_while_it_starts_ends_by_itself_without_a_traceback(tmp_path, capfd):
    pool = Pool(1, tmp_path)
    try:
        pool.start(1, Job(Settings.from_json(TINY).resolved().to_json(), str(tmp_path / "never")))
        process = pool._workers[0].process
        pool.interrupt()
        assert (pool.busy, process.exitcode) == ((), 0)
    finally:
        pool.close()
    assert capfd.readouterr().err == ""
    assert "".join(log.read_text() for log in tmp_path.glob("*.log")) == ""


@pytest.mark.parametrize("threads", [1, 3])
def test_a_worker_has_the_threads_it_is_given(threads, tmp_path, monkeypatch):
    seen = []
    monkeypatch.setattr(torch, "set_num_threads", seen.append)
    for name in ("setpgrp", "dup2"):
        monkeypatch.setattr(os, name, lambda *_: None)
    monkeypatch.setenv("OMP_NUM_THREADS", "before")
    ours, theirs = Pipe()
    ours.send(Job(Settings.from_json(TINY).resolved().to_json(), "", prepare=True))
    ours.send(None)
    before = signal.getsignal(signal.SIGINT)
    work(theirs, str(tmp_path / "log"), threads)
    signal.signal(signal.SIGINT, before)
    assert isinstance(ours.recv(), Done)
    assert (seen, os.environ["OMP_NUM_THREADS"]) == ([threads], str(threads))
