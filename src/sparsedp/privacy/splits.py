"""How a budget is shared between the phases of a plan."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, final

from sparsedp.errors import PrivacyError
from sparsedp.privacy import checks
from sparsedp.privacy.events import Spend
from sparsedp.privacy.search import Found, least_noise


@final
@dataclass(frozen=True, slots=True)
class Goal:
    """What some spends may cost together, and who counts it.

    Attributes:
        limit: the cost not to exceed.
        cost: the cost of spends; what is kept to.
        rough_cost: a quick estimate of it, to start the search.
        what: names the request in errors.
    """

    limit: float
    cost: Callable[[Sequence[Spend]], float]
    rough_cost: Callable[[Sequence[Spend]], float]
    what: str

    def share(self, fraction: float) -> Goal:
        """A fraction of the limit."""
        return replace(self, limit=fraction * self.limit, what=f"{fraction:g} of {self.what}")


@final
@dataclass(frozen=True, slots=True)
class EqualNoise:
    """One noise multiplier for all phases without one."""

    def solve(self, spends: Sequence[Spend], goal: Goal) -> tuple[Spend, ...]:
        """The spends, their missing noise such that all together cost the goal."""
        return _filled(spends, _common_noise(spends, goal))

    def to_json(self) -> dict[str, Any]:
        """A description for cache keys and records."""
        return {"split": "equal-noise"}


@final
@dataclass(frozen=True, slots=True)
class NominalSplit:
    """Two phases without noise: the first alone costs `phase1_budget` of epsilon, the second fills up the whole.

    TP-TopK Sec. 7: nominal, because epsilons do not add; what is kept to is the composed epsilon.
    """

    phase1_budget: float = 0.3

    def __post_init__(self) -> None:
        if checks.number(self.phase1_budget, "phase1_budget", above=0.0) >= 1:
            raise PrivacyError(f"phase1_budget: got {self.phase1_budget}, expected a fraction in (0, 1)")

    def solve(self, spends: Sequence[Spend], goal: Goal) -> tuple[Spend, ...]:
        """The spends, the first missing noise found for its share alone, the second for the whole."""
        missing = [place for place, spend in enumerate(spends) if spend.noise_multiplier == 0]
        if len(missing) != 2:
            raise PrivacyError(
                f"a nominal split needs two phases without noise, got {len(missing)}; use EqualNoise()"
            )
        first = missing[0]
        (found,) = EqualNoise().solve(spends[first : first + 1], goal.share(self.phase1_budget))
        return EqualNoise().solve((*spends[:first], found, *spends[first + 1 :]), goal)

    def to_json(self) -> dict[str, Any]:
        """A description for cache keys and records."""
        return {"split": "nominal", "phase1_budget": self.phase1_budget}


BudgetSplit = EqualNoise | NominalSplit


def read_split(value: Any) -> BudgetSplit:
    """The split that `to_json` described.

    Raises:
        PrivacyError: there is no such split.
    """
    match value:
        case {"split": "equal-noise"} if len(value) == 1:
            return EqualNoise()
        case {"split": "nominal", "phase1_budget": share} if len(value) == 2:
            return NominalSplit(share)
    raise PrivacyError(f"split: got {value!r}, expected what EqualNoise or NominalSplit writes")


def _common_noise(spends: Sequence[Spend], goal: Goal) -> float:
    """The one missing noise: a search on the quick estimate, finished on the real cost."""
    strength = math.sqrt(sum(s.steps * s.sampling_rate**2 for s in spends if s.noise_multiplier == 0))
    rough = least_noise(
        lambda noise: goal.rough_cost(_filled(spends, noise)),
        goal.limit,
        Found(max(0.6, strength), -1.2),
        goal.what,
    )
    return least_noise(lambda noise: goal.cost(_filled(spends, noise)), goal.limit, rough, goal.what).noise


def _filled(spends: Sequence[Spend], noise: float) -> tuple[Spend, ...]:
    return tuple(s if s.noise_multiplier else s._replace(noise_multiplier=noise) for s in spends)
