"""A round: what each client is asked, how it ended, and how many bytes that takes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol, final

from sparsedp.callbacks.reports import StepReport
from sparsedp.federated.task import Base, Task
from sparsedp.methods import StepSetting
from sparsedp.privacy.shares import SharedCharge

DOWN, UP, REFRESH = "client_bytes_down", "client_bytes_up", "client_bytes_refresh"
"""Metrics of an epoch: bytes to and from one client that takes part in its last step, and what it gets once for each
support. They follow from k and d; how many clients took part is nobody's business."""


@final
@dataclass(frozen=True, slots=True, eq=False)
class Round:
    """A round that has begun. Who takes part is private.

    Attributes:
        step: of the plan; one that counts and trains has two rounds, of the same clients.
        tasks: for each client that was picked, by its number.
        task: what all of them are asked.
        setting: the step's; None for a round that counts.
    """

    step: int
    tasks: Mapping[int, Task] = field(repr=False)
    setting: StepSetting | None = field(repr=False)
    task: Task = field(repr=False)

    @property
    def clients(self) -> tuple[int, ...]:
        """Who was picked."""
        return tuple(self.tasks)


@final
@dataclass(frozen=True, slots=True)
class Refusal:
    """An answer that does not count as it came.

    Attributes:
        client: whose.
        why: in words.
    """

    client: int
    why: str


@final
@dataclass(frozen=True, slots=True)
class RoundReport:
    """A round that is done.

    Attributes:
        report: the step as callbacks see it; None for a round that counts. Public.
        refused: clients whose answer was refused or shortened, and why. For the operator: it tells who took part.
        missing: clients that were picked and did not answer. As well.
    """

    report: StepReport | None
    refused: tuple[Refusal, ...] = field(repr=False)
    missing: tuple[int, ...] = field(repr=False)


@final
@dataclass(frozen=True, slots=True, eq=False)
class Step:
    """A step that has begun: one round, or a count and then an update of the same clients.

    Attributes:
        picked: who takes part. Private.
        paid: what its releases are charged to, together the phase's cost.
        done: the tasks of its rounds that are done.
    """

    picked: Sequence[int] = field(repr=False)
    paid: SharedCharge
    done: tuple[Task, ...] = ()


class Measure(Protocol):
    """How many bytes messages have on a transport."""

    def task(self, task: Task) -> int:
        """Of a task, to one client."""
        ...

    def answer(self, task: Task) -> int:
        """Of what one client sends back."""
        ...


@final
class ArraysAlone:
    """Where no transport says more: the bytes of the arrays."""

    def task(self, task: Task) -> int:
        """Of a task."""
        return task.to_wire().size

    def answer(self, task: Task) -> int:
        """Of an update or count."""
        return task.size * task.integers.itemsize


def bytes_of(tasks: Sequence[Task], base: Base, measure: Measure) -> dict[str, float]:
    """The bytes of a step's rounds, for one client; the last task is the one that trains."""
    *_, last = tasks
    whole = last if last.base is not None else replace(last, base=base, active=None, moved=None)
    return {
        DOWN: float(sum(map(measure.task, tasks))),
        UP: float(sum(map(measure.answer, tasks))),
        REFRESH: float(measure.task(whole)),
    }
