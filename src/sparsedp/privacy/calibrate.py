"""Calibration: the noise that spends a given epsilon and no more."""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, replace
from importlib.metadata import version
from typing import Any, final

from sparsedp.core.errors import PrivacyError, PrivacyWarning
from sparsedp.privacy import cache, checks
from sparsedp.privacy.accountants import Accountant
from sparsedp.privacy.accountants import accountant as accountant_named
from sparsedp.privacy.events import Spend, event_of
from sparsedp.privacy.plan import Phase, Plan
from sparsedp.privacy.search import Found, least_noise

CACHE_FORMAT = 1
"""Raise it when an accountant's numbers change."""

UNDERSHOOT = 0.005
"""A calibrated plan spends at least this close to its target."""


@final
@dataclass(frozen=True, slots=True)
class Target:
    """What to spend, and who counts it."""

    epsilon: float
    delta: float
    accountant: Accountant

    def share(self, fraction: float) -> Target:
        """A fraction of the epsilon, same delta."""
        return replace(self, epsilon=fraction * self.epsilon)


@final
@dataclass(frozen=True, slots=True)
class EqualNoise:
    """One noise multiplier for all open phases."""

    def solve(self, spends: tuple[Spend, ...], target: Target) -> tuple[Spend, ...]:
        """The spends with the noise that makes them cost the target together."""
        return _fill(spends, _common_noise(spends, target))

    def to_json(self) -> dict[str, Any]:
        """A description for cache keys and records."""
        return {"split": "equal-noise"}


@final
@dataclass(frozen=True, slots=True)
class NominalSplit:
    """Two open phases: the first alone costs `phase1_budget` of epsilon; the second fills up the composed cost.

    TP-TopK Sec. 7: the split is nominal because epsilons do not add; what is kept to is the composed epsilon.
    """

    phase1_budget: float = 0.3

    def __post_init__(self) -> None:
        budget = checks.number(self.phase1_budget, "phase1_budget", above=0.0)
        if budget >= 1:
            raise PrivacyError(f"phase1_budget: got {budget}, expected a fraction of epsilon in (0, 1)")

    def solve(self, spends: tuple[Spend, ...], target: Target) -> tuple[Spend, ...]:
        """The spends with the first open phase's noise found alone, then the second's for the whole."""
        places = [place for place, spend in enumerate(spends) if spend.noise_multiplier == 0]
        if len(places) != 2:
            raise PrivacyError(
                f"a nominal split needs two phases without noise, got {len(places)}; use EqualNoise()"
            )
        first = places[0]
        alone = spends[first]
        noise = _common_noise((alone,), target.share(self.phase1_budget))
        begun = (*spends[:first], alone._replace(noise_multiplier=noise), *spends[first + 1 :])
        return _fill(begun, _common_noise(begun, target))

    def to_json(self) -> dict[str, Any]:
        """A description for cache keys and records."""
        return {"split": "nominal", "phase1_budget": self.phase1_budget}


Split = EqualNoise | NominalSplit


def calibrate(
    plan: Plan,
    epsilon: float,
    delta: float,
    accountant: str = "pld",
    split: Split = EqualNoise(),  # noqa: B008
) -> Plan:
    """The plan with noise such that it costs `epsilon` at `delta`: never more, at most 0.5 % less.

    Phases with a noise multiplier keep it and are counted; phases without one (0) get theirs from `split`.

    **Privacy.** The guarantee holds when the whole plan was fixed before the first release. For a plan chosen after
    an earlier run's releases were seen, use `RdpFilter.calibrate`.
    **Edge cases.** Answers are cached on disk, but a cached answer is accounted for again before it is used: a stale
    or damaged cache costs time, never privacy.

    Raises:
        PrivacyError: nothing to calibrate, a phase without a clip, or an epsilon that no noise reaches.

    Warns:
        PrivacyWarning: delta is 1/N or more, which allows publishing one unit's record outright.
    """
    target = Target(
        checks.positive_epsilon(epsilon), checks.delta_in_range(delta), accountant_named(accountant)
    )
    _check_open_phases(plan)
    warn_if_large(target.delta, plan)
    spends = tuple(Spend(phase.sampling_rate, phase.noise_multiplier, phase.steps) for phase in plan.phases)
    request = {
        "accountant": accountant,
        "delta": target.delta,
        "dp-accounting": version("dp-accounting"),
        "epsilon": target.epsilon,
        "format": CACHE_FORMAT,
        "spends": [list(spend) for spend in spends],
        **split.to_json(),
    }
    solved = _trusted(cache.load(request), spends, target)
    if solved is None:
        solved = split.solve(spends, target)
        cache.store(request, [spend.noise_multiplier for spend in solved])
    noise = {phase.name: spend.noise_multiplier for phase, spend in zip(plan.phases, solved, strict=True)}
    return replace(
        plan.with_noise(noise), delta=target.delta, target_epsilon=target.epsilon, accountant=accountant
    )


def warn_if_large(delta: float, plan: Plan) -> None:
    """Warn when delta is at least one over the number of units."""
    if delta * plan.units >= 1:
        warnings.warn(
            f"delta={delta:g} is not below 1/N = {1 / plan.units:.3g} for N={plan.units} units ({plan.unit}): "
            "a mechanism that publishes one unit's record outright would satisfy it; use a delta well below 1/N",
            PrivacyWarning,
            stacklevel=3,
        )


def open_phases(plan: Plan) -> list[Phase]:
    """The phases that wait for their noise."""
    return [phase for phase in plan.phases if phase.noise_multiplier == 0]


def _check_open_phases(plan: Plan) -> None:
    unclipped = [phase.name for phase in plan.phases if phase.clip_norm is None]
    if unclipped:
        raise PrivacyError(
            f"phases {unclipped} have no clip_norm, so no noise makes them private; give them one"
        )
    if not open_phases(plan):
        raise PrivacyError(
            "every phase has its noise already; set it to 0 (plan.with_noise) where it is to be found"
        )


def _common_noise(spends: Sequence[Spend], target: Target) -> float:
    """The one noise for all open spends: a search on the quick estimate, finished on the real one."""

    def filled(noise: float) -> Any:
        return event_of(_fill(spends, noise))

    strength = math.sqrt(sum(s.steps * s.sampling_rate**2 for s in spends if s.noise_multiplier == 0))
    guess = Found(max(0.6, strength * math.sqrt(2 * math.log(1.25 / target.delta)) / target.epsilon), -1.2)
    steps = sum(spend.steps for spend in spends)
    what = (
        f"epsilon={target.epsilon:g} at delta={target.delta:g} for {steps} steps ({target.accountant.name})"
    )
    for estimate in (target.accountant.rough_epsilon, target.accountant.epsilon):
        guess = least_noise(lambda noise: estimate(filled(noise), target.delta), target.epsilon, guess, what)  # noqa: B023
    return guess.noise


def _fill(spends: Sequence[Spend], noise: float) -> tuple[Spend, ...]:
    return tuple(s if s.noise_multiplier else s._replace(noise_multiplier=noise) for s in spends)


def _trusted(cached: Any, spends: tuple[Spend, ...], target: Target) -> tuple[Spend, ...] | None:
    """A cached answer, if it fits the request and really costs the target."""
    if not isinstance(cached, list) or len(cached) != len(spends):
        return None
    if not all(isinstance(noise, float) and 0 < noise < math.inf for noise in cached):
        return None
    solved = tuple(
        spend._replace(noise_multiplier=noise) for spend, noise in zip(spends, cached, strict=True)
    )
    if any(
        old.noise_multiplier not in (0, new.noise_multiplier) for old, new in zip(spends, solved, strict=True)
    ):
        return None
    spent = target.accountant.epsilon(event_of(solved), target.delta)
    return solved if (1 - UNDERSHOOT) * target.epsilon <= spent <= target.epsilon else None
