"""A few worker processes, each with one job at a time."""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing import connection, resource_tracker
from multiprocessing.context import SpawnProcess
from pathlib import Path
from typing import final

from sparsedp_experiments.runs.worker import Failed, Job, Message, Progress, work

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
