"""Running a grid: what has no record yet, in a few worker processes, resumable after any kind of stop.

A worker has a process group of its own, so that Ctrl-C on the terminal reaches the parent alone, which then asks for
a stop between two steps. When the parent dies it dies too.
"""

from __future__ import annotations

import fcntl
import multiprocessing
import os
import shutil
import signal
import sys
import threading
import traceback
import warnings
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import dataclass, field
from multiprocessing import connection, parent_process, resource_tracker
from pathlib import Path
from typing import Any, NamedTuple

import torch

from sparsedp.distributed import require_one_process
from sparsedp.errors import DataError, SparseDPError
from sparsedp_experiments.runs.grid import GridRun
from sparsedp_experiments.runs.results import Record, Results, append_row, make_file, make_record

_TICK_SECONDS = 0.25
_INTERRUPT = {signal.SIGINT}


def begin(folder: Path) -> None:
    """What a worker does first. It takes interrupts only while it trains; what it writes goes to a file."""
    os.setpgrp()
    threading.Thread(target=_die_with_parent, daemon=True).start()
    os.environ["OMP_NUM_THREADS"] = "1"
    torch.set_num_threads(1)
    log = os.open(folder / f"worker-{os.getpid()}.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
        os.dup2(log, stream.fileno())
    os.close(log)


def _die_with_parent() -> None:
    parent = parent_process()
    if parent is not None:
        connection.wait([parent.sentinel])
        os._exit(1)


class Done(NamedTuple):
    """What a run gave: its record, the noise of each phase, and what it warned of."""

    record: dict[str, Any]
    noise: dict[str, float]
    warnings: tuple[str, ...]


def train(settings: dict[str, Any], folder: str) -> Done | None:
    """A run in its folder, where an unfinished one goes on; None if it was interrupted, and can go on."""
    from sparsedp.runs.directory import holds_run
    from sparsedp.runs.run import Run
    from sparsedp_experiments.runs.ablations import train_ablation
    from sparsedp_experiments.runs.execute import execute
    from sparsedp_experiments.runs.settings import ABLATIONS, Settings

    found, path = Settings.from_json(settings), Path(folder)
    try:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _INTERRUPT)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            if found.method in ABLATIONS:
                record = train_ablation(found)
                noise = record["noise"]
            else:
                result = execute(found, out=path, resume=holds_run(path))
                record = dict(Run.open(path).record)
                noise = {phase.name: phase.noise_multiplier for phase in result.plan.phases}
        return Done(record, noise, tuple(sorted({str(one.message) for one in caught})))
    except KeyboardInterrupt:
        return None
    finally:
        signal.pthread_sigmask(signal.SIG_BLOCK, _INTERRUPT)


def prepare(settings: dict[str, Any]) -> None:
    """Load the data of a run, so that what can be cached on disk is."""
    from sparsedp_experiments.runs.execute import load_data
    from sparsedp_experiments.runs.settings import Settings

    load_data(Settings.from_json(settings))


@dataclass(frozen=True, slots=True)
class Workplace:
    """Where an experiment's runs live while they run, and after if they are kept, and what runs them."""

    results: Results
    runs: Path
    keep_runs: bool
    workers: int  # processes at a time, of one thread each


@dataclass(slots=True)
class Status:
    """How far an experiment is, by place in it: records of what is done, why a run failed, and what is at work."""

    total: int
    records: dict[int, Record] = field(default_factory=dict)
    failures: dict[int, str] = field(default_factory=dict)
    at_work: tuple[int, ...] = ()
    warnings: set[str] = field(default_factory=set)

    @property
    def left(self) -> int:
        return self.total - len(self.records) - len(self.failures)


Watch = Callable[[Status], None]
"""Called several times a second, and when a run is done or has failed."""


class Pool:
    """Workers, replaced when one dies, and stopped between two steps.

    Processes are spawned, not forked: torch's threads do not survive a fork.
    """

    def __init__(self, place: Workplace) -> None:
        self._place = place
        self._executor = self._start()
        self._at_work: dict[Future[Any], tuple[int, ProcessPoolExecutor]] = {}

    def _start(self) -> ProcessPoolExecutor:
        return ProcessPoolExecutor(
            self._place.workers, multiprocessing.get_context("spawn"), begin, (self._place.runs,)
        )

    def outcomes(
        self, jobs: dict[int, tuple[Any, ...]], tell: Callable[[tuple[int, ...]], None]
    ) -> Iterator[Any]:
        """The number of each job with what it gave or raised, as they end; in order, at most `workers` at a time."""
        waiting = list(jobs.items())
        while waiting or self._at_work:
            while waiting and len(self._at_work) < self._place.workers:
                number, job = waiting.pop(0)
                with _interrupts_held_back():
                    self._at_work[self._executor.submit(*job)] = number, self._executor
            tell(tuple(number for number, _ in self._at_work.values()))
            for future in wait(self._at_work, _TICK_SECONDS, FIRST_COMPLETED).done:
                number, executor = self._at_work.pop(future)
                error = future.exception()
                if isinstance(error, BrokenProcessPool):
                    if executor is self._executor:
                        self._executor = self._start()
                    error = SparseDPError(
                        f"a worker process died (out of memory?); its log is in {self._place.runs}, and the same "
                        "command runs what was at work again"
                    )
                yield number, error or future.result()

    def close(self) -> None:
        """Ask every worker to stop after the step it is at, and wait."""
        if self._at_work:
            for child in multiprocessing.active_children():
                if child.pid is not None:
                    os.kill(child.pid, signal.SIGINT)
        self._executor.shutdown(wait=True, cancel_futures=True)
        for log in self._place.runs.glob("worker-*.log"):
            if not log.stat().st_size:
                log.unlink()


@contextmanager
def _interrupts_held_back() -> Iterator[None]:
    """For a process to start with Ctrl-C held back: `train` lets it through."""
    resource_tracker.ensure_running()  # started later, it would let interrupts through again
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _INTERRUPT)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def run_all(experiment: str, runs: Sequence[GridRun], place: Workplace, watch: Watch) -> Status:
    """Do every run that has no record yet, in order, several at a time."""
    require_one_process("a comparison")
    status = Status(len(runs))

    def tidy(run: GridRun) -> None:
        if not place.keep_runs:
            shutil.rmtree(place.runs / run.name, ignore_errors=True)

    with alone_in(place.runs):
        make_file(place.results.path)
        for number, run in enumerate(runs):
            record = place.results.find(run)
            if record is not None:
                status.records[number] = record
                tidy(run)
        pool = Pool(place)

        def tell(at_work: tuple[int, ...]) -> None:
            status.at_work = at_work
            watch(status)

        try:
            left = {n: run.settings.to_json() for n, run in enumerate(runs) if n not in status.records}
            # Every data set once before two workers do the same work: what takes long is then cached on disk.
            first = {(runs[n].settings.dataset, runs[n].settings.data_options): n for n in reversed(left)}
            for number, outcome in pool.outcomes(
                {n: (prepare, left[n]) for n in sorted(first.values())}, tell
            ):
                if outcome is not None:
                    name = runs[number].settings.dataset
                    raise DataError(f"{name}: {_reason(outcome).removeprefix(f'{name}: ')}") from outcome
            jobs: dict[int, tuple[Any, ...]] = {
                n: (train, left[n], str(place.runs / runs[n].name)) for n in left
            }
            for number, outcome in pool.outcomes(jobs, tell):
                if outcome is None:
                    raise KeyboardInterrupt
                if isinstance(outcome, Done):
                    record = make_record(experiment, runs[number], outcome.record, outcome.noise)
                    append_row(place.results.path, record)
                    tidy(runs[number])
                    status.records[number] = record
                    status.warnings.update(outcome.warnings)
                else:
                    status.failures[number] = _reason(outcome)
                watch(status)
        finally:
            pool.close()
    return status


def _reason(error: BaseException) -> str:
    """Of a failure: what the user can mend, or where the code went wrong."""
    return str(error) if isinstance(error, SparseDPError) else "".join(traceback.format_exception(error))


@contextmanager
def alone_in(folder: Path) -> Iterator[None]:
    """Be the only one at work in a folder."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = (folder / ".lock").open("w")
    except OSError as error:
        raise SparseDPError(f"cannot write to {folder} ({error}); give another folder") from error
    with lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise SparseDPError(
                f"another process is at work in {folder}; wait for it, or give another folder"
            ) from error
        for log in folder.glob("worker-*.log"):
            log.unlink(missing_ok=True)
        yield
