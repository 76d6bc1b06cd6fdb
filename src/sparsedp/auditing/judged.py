"""What was measured of every release, held against what it should be."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import final

from sparsedp.auditing.leave_one_out import Movement
from sparsedp.auditing.mechanism import ReleaseFinding
from sparsedp.auditing.target import Target
from sparsedp.runs.verify import Check


@final
@dataclass(frozen=True, slots=True, eq=False)
class MeasuredRelease:
    """All that is known of one release.

    Attributes:
        target: the release.
        found: what canaries found.
        moved: the farthest that a unit of the data moved its sum; None if it has no number that a unit could move.
        record: upper limit on the noise that a real record meets; None where none was sent.
    """

    target: Target
    found: ReleaseFinding
    moved: Movement | None
    record: float | None

    @property
    def name(self) -> str:
        """The release's."""
        return self.target.name

    @property
    def noise(self) -> float:
        """The least noise that is beyond doubt."""
        found = self.found
        return min(found.noise, found.worst_noise, math.inf if self.record is None else self.record)

    @property
    def effective_noise(self) -> float:
        """The same over the farthest a unit moves the sum."""
        return self.noise if self.moved is None or self.moved.within else self.noise / self.moved.ratio

    @property
    def words(self) -> str:
        """What was done to it."""
        found, target = self.found, self.target
        if not found.releases:
            return f"{self.name} has no {target.numbers}, so there is nothing to attack"
        return f"{self.name} ({found.active:,} {target.numbers}, released {found.releases:,} times)"

    def checks(self) -> list[Check]:
        """Whether every number gets its noise, and no noise tells of another."""
        found, target = self.found, self.target
        if found.worst_noise < target.noise:
            where = f"{target.each} {found.worst_coordinate} has noise of at most {found.worst_noise:.3g} clip norms"
            noisy = Check(f"{self.name}: all {found.active:,} {target.numbers} get their noise", where)
        elif self.noise < target.noise:
            what = f"a canary meets noise of at most {self.noise:.3g} times what it adds"
            noisy = Check(f"{self.name}: noise of {target.noise:.3g} clip norms", what)
        else:
            noisy = Check(f"{self.name}: all {found.active:,} {target.numbers} get their noise")
        return [noisy, Check(f"{self.name}: the noise has no pattern", "; ".join(found.problems) or None)]


def check_all(
    measured: Sequence[MeasuredRelease],
    moved: Sequence[Movement],
    odd_draws: list[str],
    estimates: Mapping[str, float],
    claimed: float,
) -> tuple[Check, ...]:
    """Everything that was tried."""
    over = [name for name, bound in estimates.items() if bound > claimed]
    return (
        _check_movement(moved),
        Check(
            "every unit is sampled by a coin of its own, at the planned rate", "; ".join(odd_draws) or None
        ),
        *(check for one in measured for check in one.checks()),
        Check("no lower bound passes the claimed epsilon", f"passed by {', '.join(over)}" if over else None),
    )


def _check_movement(moved: Sequence[Movement]) -> Check:
    worst, tried = max(moved, key=lambda one: one.ratio), sum(one.tried for one in moved)
    if worst.within:
        return Check(f"one unit moves the clipped sum by at most the clip norm ({tried} pairs of batches)")
    return Check(
        "one unit moves the clipped sum by at most the clip norm",
        f"{worst.unit} in a batch of {worst.batch} moved the sum of phase {worst.name} by {worst.ratio:.4g} times "
        "the stated sensitivity; the model, the loss or the loading lets one unit change what others add",
    )
