"""Stages: what a method does one after the other. Each is a phase of the plan, with a charge known beforehand."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from sparsedp.errors import SparseDPError


class Moves(Enum):
    """Which coordinates a stage may move."""

    ALL = "all"
    HEAD = "head"
    SUPPORT = "support"
    NOTHING = "nothing"


@dataclass(frozen=True, slots=True)
class Stage:
    """One stage of a method.

    Attributes:
        name: its phase in the plan.
        moves: the coordinates it may move, and so releases a gradient of; a stage that moves nothing makes one
            release of the ranking's own, over all units.
        observes: whether the ranking sees what it releases.

    A stage before the main one that moves something takes the plan's `warmup_fraction` of the steps; a selection,
    which comes first, the plan's `selection_budget` of epsilon.
    """

    name: str
    moves: Moves
    observes: bool = False

    @property
    def trains(self) -> bool:
        """Whether it takes steps of the training loop: all do but a selection."""
        return self.moves is not Moves.NOTHING


WARM_UP = Stage("warm-up", Moves.ALL, observes=True)
HEAD = Stage("head", Moves.HEAD)
SELECT = Stage("select", Moves.NOTHING, observes=True)
MAIN = Stage("main", Moves.SUPPORT, observes=True)

TRAIN = "train"
"""What the main stage's phase is called when no other stage trains."""


def check_stages(stages: tuple[Stage, ...], who: str) -> None:
    """Refuse stages in no sensible order.

    Raises:
        SparseDPError: the last is not the main one, or several of a kind come before it.
    """
    before = stages[:-1]
    names = [stage.name for stage in stages]
    if not stages or stages[-1].moves is not Moves.SUPPORT or len(set(names)) != len(names):
        raise SparseDPError(f"{who}: got the stages {names}, expected different ones with the main one last")
    if any(not stage.trains for stage in before[1:]):
        raise SparseDPError(f"{who}: got the stages {names}, expected a selection first")
    moving = [stage for stage in before if stage.trains]
    if len(moving) > 1 or any(stage.moves is Moves.SUPPORT for stage in before):
        raise SparseDPError(
            f"{who}: got the stages {names}, expected at most one that trains before the main one, as it "
            "takes warmup_fraction of the steps"
        )


def phase_names(stages: tuple[Stage, ...]) -> tuple[str, ...]:
    """The phases of the stages, in order; the main one is "train" where nothing trains before it."""
    alone = not any(stage.trains for stage in stages[:-1])
    return (*(stage.name for stage in stages[:-1]), TRAIN if alone else stages[-1].name)
