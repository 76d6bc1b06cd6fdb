"""A worker process: takes jobs from its parent one by one, and reports back.

It has a process group of its own, so that Ctrl-C on the terminal reaches the parent alone, which then asks for a stop
between two steps. When the parent dies it dies too, and gives its ledgers free.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
import warnings
from dataclasses import dataclass
from multiprocessing import connection, parent_process
from pathlib import Path
from typing import Any

from sparsedp.errors import SparseDPError
from sparsedp.grad_sample.buffers import keep_freed_memory

_TELL_EVERY_SECONDS = 0.2


@dataclass(frozen=True, slots=True)
class Job:
    """A run to do. With `prepare`, only load its data, so that what can be cached on disk is.

    Attributes:
        settings: as JSON.
        folder: the run directory; an unfinished run there is continued.
        prepare: load the data and nothing else.
    """

    settings: dict[str, Any]
    folder: str
    prepare: bool = False


@dataclass(frozen=True, slots=True)
class Progress:
    """How far the job is: the epoch it is in, from 1."""

    epoch: int


@dataclass(frozen=True, slots=True)
class Done:
    """The job is finished: the run's record and the noise of each phase; both empty for a preparation."""

    record: dict[str, Any]
    noise: dict[str, float]
    warnings: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Failed:
    """The job cannot be done: what the user can fix. Anything else kills the worker; its log has the traceback."""

    message: str


@dataclass(frozen=True, slots=True)
class Stopped:
    """The job was interrupted and can be continued."""


Message = Progress | Done | Failed | Stopped


def work(pipe: connection.Connection, log: str, threads: int) -> None:
    """The life of a worker: jobs until None comes, or until it is told to stop."""
    os.setpgrp()
    signal.signal(signal.SIGINT, signal.default_int_handler)
    threading.Thread(target=_die_with_parent, daemon=True).start()
    os.environ["OMP_NUM_THREADS"] = str(threads)
    keep_freed_memory()
    _write_to(log)
    try:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
        while (job := pipe.recv()) is not None:
            pipe.send(_outcome(job, pipe, threads))
    except (KeyboardInterrupt, EOFError, BrokenPipeError):
        return


def _outcome(job: Job, pipe: connection.Connection, threads: int) -> Message:
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            record, noise = _perform(job, pipe, threads)
        return Done(record, noise, tuple(sorted({str(one.message) for one in caught})))
    except KeyboardInterrupt:
        return Stopped()
    except SparseDPError as error:
        return Failed(str(error))


def _perform(job: Job, pipe: connection.Connection, threads: int) -> tuple[dict[str, Any], dict[str, float]]:
    import torch

    from sparsedp.runs.directory import holds_run
    from sparsedp.runs.run import Run
    from sparsedp_experiments.runs.datasets import load_data
    from sparsedp_experiments.runs.execute import execute
    from sparsedp_experiments.runs.settings import Settings

    torch.set_num_threads(threads)
    settings = Settings.from_json(job.settings)
    if job.prepare:
        load_data(settings)
        return {}, {}
    folder = Path(job.folder)
    teller = _Teller(pipe)
    result = execute(settings, out=folder, resume=holds_run(folder), callbacks=[teller])
    record = dict(Run.open(folder).record)
    noise = {phase.name: phase.noise_multiplier or phase.noise_std or 0.0 for phase in result.plan.phases}
    return record, noise


class _Teller:
    """A callback that tells the parent now and then how far a run is."""

    def __init__(self, pipe: connection.Connection) -> None:
        self._pipe, self._last = pipe, 0.0

    def __call__(self, event: Any) -> None:
        now = time.monotonic()
        if now - self._last >= _TELL_EVERY_SECONDS:
            self._last = now
            self._pipe.send(Progress(event.epoch))


def _write_to(log: str) -> None:
    """Standard output and error to a file: the terminal belongs to the parent."""
    file = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    sys.stdout.flush()
    sys.stderr.flush()
    os.dup2(file, 1)
    os.dup2(file, 2)
    os.close(file)


def _die_with_parent() -> None:
    parent = parent_process()
    if parent is not None:
        connection.wait([parent.sentinel])
        os._exit(1)
