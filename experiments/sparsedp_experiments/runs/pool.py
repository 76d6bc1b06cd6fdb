"""Running a grid: what has no record yet, in a few worker processes, resumable after any kind of stop.

A worker takes jobs from its parent one by one. It has a process group of its own, so that Ctrl-C on the terminal
reaches the parent alone, which then asks for a stop between two steps. When the parent dies it dies too.
"""

from __future__ import annotations

import fcntl
import multiprocessing
import os
import shutil
import signal
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from multiprocessing import connection, parent_process, resource_tracker
from multiprocessing.context import SpawnProcess
from pathlib import Path
from typing import Any, final

from sparsedp.distributed import require_one_process
from sparsedp.errors import DataError, SparseDPError
from sparsedp.grad_sample.buffers import keep_freed_memory
from sparsedp_experiments.runs.grid import GridRun
from sparsedp_experiments.runs.results import Results, make_file, make_record

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
    from sparsedp_experiments.runs.execute import execute, load_data
    from sparsedp_experiments.runs.settings import ABLATIONS, Settings

    torch.set_num_threads(threads)
    settings = Settings.from_json(job.settings)
    if job.prepare:
        load_data(settings)
        return {}, {}
    if settings.method in ABLATIONS:
        from sparsedp_experiments.runs.ablations import train_ablation

        found = train_ablation(settings)
        return found, found["noise"]
    folder = Path(job.folder)
    teller = _Teller(pipe)
    result = execute(settings, out=folder, resume=holds_run(folder), callbacks=[teller])
    record = dict(Run.open(folder).record)
    noise = {phase.name: phase.noise_multiplier for phase in result.plan.phases}
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


_PATIENCE_SECONDS = 60.0
_LOG_TAIL = 4000


@dataclass(slots=True)
class _Worker:
    """A process, our end of its pipe, the file it writes to, and what it is at."""

    process: SpawnProcess
    pipe: connection.Connection
    log: Path
    task: int | None = None


@final
class Pool:
    """Starts workers as jobs come, replaces those that die, and stops them between two steps.

    A job is known by a number of the caller's. Processes are spawned, not forked: torch's threads do not survive a
    fork.
    """

    def __init__(self, size: int, logs: Path, threads: int = 1) -> None:
        self._size, self._logs, self._threads = size, logs, threads
        self._workers: list[_Worker] = []
        self._context = multiprocessing.get_context("spawn")

    @property
    def has_room(self) -> bool:
        """Whether a job would start at once."""
        return len(self.busy) < self._size

    @property
    def busy(self) -> tuple[int, ...]:
        """The jobs at work, by worker."""
        return tuple(worker.task for worker in self._workers if worker.task is not None)

    def start(self, task: int, job: Job) -> None:
        """Give a job to an idle worker, or to a new one."""
        idle = next((worker for worker in self._workers if worker.task is None), None) or self._spawn()
        idle.task = task
        idle.pipe.send(job)

    def messages(self, timeout: float) -> Iterator[tuple[int, Message]]:
        """What the workers have to say within some seconds, with the job each is about."""
        ends = [worker.pipe for worker in self._workers] + [w.process.sentinel for w in self._workers]
        connection.wait(ends, timeout)
        for worker in list(self._workers):
            try:
                while worker.pipe.poll():
                    message: Message = worker.pipe.recv()
                    task = worker.task
                    if not isinstance(message, Progress):
                        worker.task = None
                    if task is not None:
                        yield task, message
            except (EOFError, ConnectionResetError):
                worker.process.join()
            if not worker.process.is_alive():
                self._workers.remove(worker)
                if worker.task is not None:
                    yield worker.task, Failed(_obituary(worker))

    def interrupt(self) -> None:
        """Ask every worker to stop after the step it is at, and wait; those that take too long are ended."""
        for worker in self._workers:
            if worker.process.is_alive() and worker.process.pid is not None:
                os.kill(worker.process.pid, signal.SIGINT)
        deadline = time.monotonic() + _PATIENCE_SECONDS
        while any(worker.task is not None for worker in self._workers) and time.monotonic() < deadline:
            for _ in self.messages(0.2):
                pass
        self.close()

    def close(self) -> None:
        """End the workers; idle ones leave by themselves."""
        for worker in self._workers:
            if worker.task is not None:
                worker.process.terminate()
            elif worker.process.is_alive():
                _say_goodbye(worker)
        for worker in self._workers:
            worker.process.join(timeout=5)
            if worker.process.is_alive():
                worker.process.kill()
                worker.process.join()
            if worker.log.exists() and worker.log.stat().st_size == 0:
                worker.log.unlink()
        self._workers.clear()

    def _spawn(self) -> _Worker:
        ours, theirs = self._context.Pipe()
        self._logs.mkdir(parents=True, exist_ok=True)
        log = self._logs / f"worker-{os.getpid()}-{len(list(self._logs.glob('worker-*.log')))}.log"
        process = self._context.Process(target=work, args=(theirs, str(log), self._threads), daemon=True)
        with _interrupts_held_back():
            process.start()
        theirs.close()
        worker = _Worker(process, ours, log)
        self._workers.append(worker)
        return worker


@contextmanager
def _interrupts_held_back() -> Iterator[None]:
    """For a process to start with Ctrl-C held back until it can answer it: `work` lets it through."""
    resource_tracker.ensure_running()  # started later, it would let interrupts through again
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _say_goodbye(worker: _Worker) -> None:
    try:
        worker.pipe.send(None)
    except (BrokenPipeError, ConnectionResetError):
        worker.process.join(timeout=1)


def _obituary(worker: _Worker) -> str:
    """How a worker ended, with the last of what it wrote."""
    code = worker.process.exitcode or 0
    how = f"was killed by signal {-code}" if code < 0 else f"ended with code {code}"
    wrote = worker.log.read_text(errors="replace")[-_LOG_TAIL:] if worker.log.exists() else ""
    hint = " (out of memory?)" if code == -signal.SIGKILL else ""
    return f"its process {how}{hint}.\n{wrote}".rstrip()


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
