"""Running an experiment: what is not done yet, one process per core, resumable after any kind of stop."""

from __future__ import annotations

import fcntl
import os
import shutil
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from sparsedp.distributed import require_one_process
from sparsedp.errors import DataError, SparseDPError
from sparsedp_experiments.runs.grid import GridRun
from sparsedp_experiments.runs.pool import Pool
from sparsedp_experiments.runs.results import Results, make_file, make_record
from sparsedp_experiments.runs.worker import Done, Failed, Job, Progress, Stopped

_TICK_SECONDS = 0.25


@dataclass(frozen=True, slots=True)
class Workplace:
    """Where an experiment's runs live while they run, and after if they are kept, and what runs them.

    Attributes:
        workers: processes at a time.
        threads: of each of them.
    """

    results: Results
    runs: Path
    keep_runs: bool
    workers: int
    threads: int = 1

    def folder(self, run: GridRun) -> Path:
        """A run's directory."""
        return self.runs / run.name


@dataclass(slots=True)
class Status:
    """How far an experiment is; changes while it runs.

    Attributes:
        total: all runs.
        records: of the runs that are done, by place in the experiment.
        failures: why a run could not be done.
        at_work: epoch of each run at work.
        warnings: what runs warned of.
        started: when this process began.
        new: runs done by this process, with their seconds.
    """

    total: int
    records: dict[int, Mapping[str, Any]] = field(default_factory=dict)
    failures: dict[int, str] = field(default_factory=dict)
    at_work: dict[int, int] = field(default_factory=dict)
    warnings: set[str] = field(default_factory=set)
    preparing: str | None = None
    started: float = field(default_factory=time.monotonic)
    new: dict[int, float] = field(default_factory=dict)

    @property
    def left(self) -> int:
        """Runs not done and not failed."""
        return self.total - len(self.records) - len(self.failures)


Watch = Callable[[Status, int | None], None]
"""Called several times a second, and with a run's place when that run is done or has failed."""


def run_all(experiment: str, runs: Sequence[GridRun], place: Workplace, watch: Watch) -> Status:
    """Do every run that has no record yet, in order, several at a time.

    Raises:
        KeyboardInterrupt: Ctrl-C; runs at work were stopped with a checkpoint and go on next time.
        DataError: the data of a run cannot be loaded.
        SparseDPError: another process is at work here, or a folder cannot be written.
    """
    require_one_process("a comparison")
    status = Status(len(runs))
    make_file(place.results.path)
    with alone_in(place.runs):
        for number, run in enumerate(runs):
            record = place.results.find(run)
            if record is not None:
                status.records[number] = record
                _tidy(place, run)
        pool = Pool(min(place.workers, max(1, status.left)), place.runs, place.threads)
        try:
            _prepare(runs, place, pool, status, watch)
            _run(experiment, runs, place, pool, status, watch)
        except KeyboardInterrupt:
            pool.interrupt()
            raise
        finally:
            pool.close()
    return status


def _prepare(runs: Sequence[GridRun], place: Workplace, pool: Pool, status: Status, watch: Watch) -> None:
    """Load every data set once before two workers do the same work: what takes long is then cached on disk."""
    first_use: dict[tuple[Any, ...], int] = {}
    for number, run in enumerate(runs):
        if number not in status.records:
            first_use.setdefault((run.settings.dataset, run.settings.data_options), number)
    waiting = list(first_use.values())
    while waiting or pool.busy:
        while waiting and pool.has_room:
            number = waiting.pop(0)
            pool.start(number, Job(runs[number].settings.to_json(), "", prepare=True))
        status.preparing = ", ".join(sorted({runs[number].settings.dataset for number in pool.busy}))
        watch(status, None)
        for number, message in pool.messages(_TICK_SECONDS):
            if isinstance(message, Failed):
                name = runs[number].settings.dataset
                raise DataError(f"{name}: {message.message.removeprefix(f'{name}: ')}")
            if isinstance(message, Stopped):
                raise KeyboardInterrupt
    status.preparing = None


def _run(
    experiment: str, runs: Sequence[GridRun], place: Workplace, pool: Pool, status: Status, watch: Watch
) -> None:
    waiting = [number for number in range(len(runs)) if number not in status.records]
    began: dict[int, float] = {}
    while waiting or pool.busy:
        while waiting and pool.has_room:
            number = waiting.pop(0)
            job = Job(runs[number].settings.to_json(), str(place.folder(runs[number])))
            pool.start(number, job)
            began[number], status.at_work[number] = time.monotonic(), 0
        watch(status, None)
        for number, message in pool.messages(_TICK_SECONDS):
            if isinstance(message, Progress):
                status.at_work[number] = message.epoch
                continue
            status.at_work.pop(number, None)
            if isinstance(message, Stopped):
                raise KeyboardInterrupt
            if isinstance(message, Done):
                record = make_record(experiment, runs[number], message.record, message.noise)
                place.results.keep(record)
                _tidy(place, runs[number])
                status.records[number] = record
                status.new[number] = time.monotonic() - began[number]
                status.warnings.update(message.warnings)
            else:
                status.failures[number] = message.message
            watch(status, number)


def _tidy(place: Workplace, run: GridRun) -> None:
    """Remove the folder of a run that has its record, unless it is to be kept."""
    if not place.keep_runs and place.folder(run).is_dir():
        shutil.rmtree(place.folder(run))


@contextmanager
def alone_in(folder: Path) -> Iterator[None]:
    """Be the only one at work in a folder.

    Raises:
        SparseDPError: somebody else is, or the folder cannot be written.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        file = os.open(folder / ".lock", os.O_RDWR | os.O_CREAT, 0o644)
    except OSError as error:
        raise SparseDPError(f"cannot write to {folder} ({error}); give another folder") from error
    with _locked(file, folder):
        for log in folder.glob("worker-*.log"):
            log.unlink(missing_ok=True)
        yield


@contextmanager
def _locked(file: int, folder: Path) -> Iterator[None]:
    """Hold an open file's lock, then close it."""
    try:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise SparseDPError(
                f"another process is at work in {folder}; wait for it, or give another folder"
            ) from error
        yield
    finally:
        os.close(file)
