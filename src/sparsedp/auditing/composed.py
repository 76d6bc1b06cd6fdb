"""Single releases, as they were found to be, put together by an accountant for the whole plan."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import final

from sparsedp.auditing.target import Target
from sparsedp.privacy.accountants import ACCOUNTANTS, Accountant, accountant
from sparsedp.privacy.events import Spend
from sparsedp.privacy.plan import Phase, Plan
from sparsedp.privacy.pld import ROUNDING

LEAST_NOISE = 0.25
TIGHTEST = "pld"


@final
@dataclass(frozen=True, slots=True)
class Together:
    """Releases of the same units: all of a step, or one that is made before training.

    Attributes:
        phase: theirs.
        names: the targets'.
        times: how often the plan makes them.
    """

    phase: Phase
    names: tuple[str, ...]
    times: int

    def noise(self, found: Mapping[str, float]) -> float:
        """What they amount to: Gaussian releases of the same units add up in precision, noise^-2."""
        each = [found[name] for name in self.names]
        if min(each) == 0:
            return 0.0
        precision = sum(noise**-2 for noise in each)
        return precision**-0.5 if precision else math.inf


def releases_of(targets: Iterable[Target]) -> list[Together]:
    """The targets, those of one step together."""
    parts: dict[str, list[Target]] = {}
    for target in targets:
        parts.setdefault(target.phase.name if target.phase.trains else target.name, []).append(target)
    return [
        Together(
            some[0].phase,
            tuple(target.name for target in some),
            some[0].phase.steps if some[0].phase.trains else 1,
        )
        for some in parts.values()
    ]


@final
class Composition:
    """Puts releases together, at the plan's delta.

    By privacy loss distributions, which come close to the truth, wherever they reach the plan's delta; else by the
    plan's own accountant, so that what was measured is compared with what is claimed by the same yardstick.
    """

    def __init__(self, plan: Plan) -> None:
        self._delta = plan.delta or 0.0
        self._reach = int(0.99 * self._delta / (4 * ROUNDING))
        """Steps that the tightest accountant can put together at this delta."""
        own = plan.accountant or TIGHTEST
        slack = own if own in ACCOUNTANTS else "rdp"
        self._accountant: Accountant = accountant(TIGHTEST if plan.total_steps <= self._reach else slack)

    @property
    def accountant(self) -> str:
        """Who counts."""
        return self._accountant.name

    def claim(self, phase: Phase) -> float:
        """Epsilon of a single step as it is planned."""
        return self._epsilon([Spend(phase.sampling_rate, phase.noise_multiplier, 1)])

    def epsilon(self, releases: Iterable[tuple[float, float, int]]) -> float:
        """Epsilon of releases with the rates and noise found; what could not be measured counts as never released.

        Noise below `LEAST_NOISE` counts as that much: still a lower bound, and quick.
        """
        return self._epsilon(
            [
                Spend(rate, max(noise, LEAST_NOISE) if noise else 0.0, times)
                for rate, noise, times in releases
                if math.isfinite(noise) and rate > 0
            ]
        )

    def _epsilon(self, spends: list[Spend]) -> float:
        if self.accountant == TIGHTEST:
            spends = _first(sorted(spends, key=lambda spend: spend.noise_multiplier), self._reach)
        return self._accountant.epsilon(spends, self._delta) if spends else 0.0


def one_step(
    composition: Composition,
    releases: Iterable[Together],
    rates: Mapping[str, float],
    noise: Mapping[str, float],
) -> dict[str, float]:
    """Claim and lower bound of the single step that leaks most."""
    pairs = [
        (composition.claim(each.phase), composition.epsilon([(rates[each.phase.name], each.noise(noise), 1)]))
        for each in releases
    ]
    claim, bound = max(pairs, key=lambda pair: pair[0])
    return {"claimed_epsilon": claim, "lower_bound": bound}


def _first(spends: list[Spend], steps: int) -> list[Spend]:
    """As many of the releases as that: fewer never cost more."""
    kept = []
    for spend in spends:
        some = min(spend.steps, steps)
        kept += [spend._replace(steps=some)] if some else []
        steps -= some
    return kept
