"""A round: what clients are asked, and how it ended."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import final

from sparsedp.federated.task import Task
from sparsedp.methods import StepSetting
from sparsedp.privacy.ledger import SharedCharge
from sparsedp.results import StepReport


@final
@dataclass(frozen=True, slots=True, eq=False)
class Round:
    """A round that has begun. Who takes part is private.

    Attributes:
        step: of the plan; one that counts and trains has two rounds, of the same clients.
        clients: the numbers of those that were picked.
        setting: the step's; None for a round that counts.
        task: what all of them are asked.
    """

    step: int
    clients: Sequence[int] = field(repr=False)
    setting: StepSetting | None = field(repr=False)
    task: Task = field(repr=False)


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
        counted: whether its count is done.
    """

    picked: Sequence[int] = field(repr=False)
    paid: SharedCharge
    counted: bool = False
