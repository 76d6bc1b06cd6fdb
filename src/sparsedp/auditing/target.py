"""What is attacked by itself: a release of the plan that can be made over and over, with canaries in it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol, final

from sparsedp.auditing.canaries import CanaryEngine, Directions, added_by, noisy_sum, one_batch, release
from sparsedp.auditing.coins import Coins
from sparsedp.auditing.estimators import Vector
from sparsedp.auditing.subject import Setting
from sparsedp.parameters import Layout, Support
from sparsedp.privacy.plan import Phase, Plan
from sparsedp.privacy.released import Released
from sparsedp.randomness import PublicRandomness, SystemRandomness

MOST_CANARIES = 2048
"""In one release."""


class Target(Protocol):
    """One release of a step, and what an attacker knows of it."""

    @property
    def name(self) -> str:
        """Unique in the plan."""
        ...

    @property
    def each(self) -> str:
        """What one of its numbers belongs to, in words."""
        ...

    @property
    def numbers(self) -> str:
        """All of its numbers, in words."""
        ...

    @property
    def phase(self) -> Phase:
        """The phase it belongs to."""
        ...

    @property
    def noise(self) -> float:
        """The noise multiplier it is to have."""
        ...

    @property
    def support(self) -> Support:
        """Where it lies."""
        ...

    def directions(self, most: int, *, single: bool) -> Directions:
        """Directions of at most so many canaries: of one number each, or of all numbers shared out."""
        ...

    def release(self, directions: Directions, present: Coins) -> Released:
        """Make it, with the canaries that are present."""
        ...

    def noisy_sum(self, released: Released) -> Vector:
        """What the attacker makes of it, in clip norms."""
        ...

    def added(self, directions: Directions, present: Coins) -> Vector:
        """What the canaries present add to that, if all is as it should be."""
        ...


@final
@dataclass(frozen=True, slots=True, eq=False)
class GradientTarget:
    """The gradient that a step releases."""

    plan: Plan
    setting: Setting
    layout: Layout

    @property
    def name(self) -> str:
        """The phase's."""
        return self.phase.name

    @property
    def each(self) -> str:
        """Of the model."""
        return "coordinate"

    @property
    def numbers(self) -> str:
        """Of the support."""
        return "active coordinates"

    @property
    def phase(self) -> Phase:
        """The step's."""
        return self.setting.phase

    @property
    def noise(self) -> float:
        """The gradient's own."""
        return self.phase.gradient_noise

    @property
    def support(self) -> Support:
        """The step's."""
        return self.setting.support

    def directions(self, most: int, *, single: bool) -> Directions:
        """With random signs."""
        return spread_out(self.support.size, most, single=single)

    def release(self, directions: Directions, present: Coins) -> Released:
        """By `privatize`, from an engine that sums canaries."""
        engine = CanaryEngine(self.layout, directions)
        return release(self.plan, self.setting, engine, one_batch(present), SystemRandomness())

    def noisy_sum(self, released: Released) -> Vector:
        """In the space of the clip."""
        return noisy_sum(self.plan, self.setting, released)

    def added(self, directions: Directions, present: Coins) -> Vector:
        """Each canary as long as the clip lets it be."""
        return added_by(self.setting.clip, self.noise, directions, present)


def spread_out(size: int, most: int, *, single: bool) -> Directions:
    """Random directions for at most so many canaries."""
    make = Directions.single if single else Directions.blocks
    return make(size, min(most, MOST_CANARIES), PublicRandomness.fresh())
