"""Noise energy: how much noise a step adds, k nu^2 on the support against d nu^2 on everything."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import final

from sparsedp.methods.support_scheduler import noise_on_mean
from sparsedp.privacy.plan import Plan
from sparsedp.runs.record import SupportSpan


@final
@dataclass(frozen=True, slots=True)
class Stretch:
    """Consecutive steps with one support size and one noise level.

    Attributes:
        first: its first step.
        steps: how many there are.
        phase: the plan's phase.
        active: k.
        noise_std: nu, the noise on each coordinate of the released mean gradient, before any standardization.
    """

    first: int
    steps: int
    phase: str
    active: int
    noise_std: float

    @property
    def energy(self) -> float:
        """K nu^2: the expected squared length of a step's noise."""
        return self.active * self.noise_std**2


def stretches(plan: Plan, spans: Sequence[SupportSpan], dimension: int, stop: int) -> tuple[Stretch, ...]:
    """The training steps before `stop`, cut where the phase or the size of the support changes.

    **Edge cases.** Steps before the first known support count as dense.
    """
    starts = {plan.first_step(phase.name) for phase in plan.training}
    first_step = min(starts)
    cuts = sorted(
        {first_step, max(first_step, stop)}
        | {cut for cut in starts | {span.step for span in spans} if cut < stop}
    )
    places = [span.step for span in spans]
    parts: list[Stretch] = []
    for first, end in pairwise(cuts):
        known = bisect_right(places, first)
        active = spans[known - 1].active if known else dimension
        phase = plan.phase_at(first)
        if parts and (parts[-1].phase, parts[-1].active) == (phase.name, active):
            parts[-1] = replace(parts[-1], steps=parts[-1].steps + end - first)
        else:
            parts.append(Stretch(first, end - first, phase.name, active, noise_on_mean(plan, phase)))
    return tuple(parts)


def energy_share(parts: Sequence[Stretch], dimension: int) -> float | None:
    """Noise energy of some steps as a share of what they would add on all coordinates; None without noise."""
    dense = sum(part.steps * dimension * part.noise_std**2 for part in parts)
    return sum(part.steps * part.energy for part in parts) / dense if dense else None
