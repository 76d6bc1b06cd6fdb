"""Find the least noise whose cost stays within a target: the search behind every calibration."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

from sparsedp.errors import OutOfReachError, PrivacyError

LEAST_NOISE, MOST_NOISE = 0.1, 10_000.0
"""Noise multipliers outside protect nobody, or leave nothing to learn."""

TOLERANCE = 0.0025
"""Accepted: a cost between this fraction below the target and `MARGIN` below it."""

MARGIN = 1e-4
"""Kept free, so that another machine's last digits do not push a recomputed epsilon over the target."""

EVALUATIONS = 80


class Found(NamedTuple):
    """The noise, and d log(cost) / d log(noise) there, from which a finer search can start."""

    noise: float
    slope: float


def least_noise(cost: Callable[[float], float], target: float, start: Found, what: str) -> Found:
    """The noise whose cost is just within the target: safeguarded secant steps on the log-log curve.

    `cost` decreases in the noise. The answer never costs more than the target, also where `cost` jumps.

    Raises:
        PrivacyError: no noise in `LEAST_NOISE..MOST_NOISE` will do; `what` says for which request.
    """
    aim = math.log(target * (1 - (TOLERANCE + MARGIN) / 2))
    place, slope = _clamp(math.log(start.noise)), start.slope
    too_little, enough = -math.inf, math.inf
    last: tuple[float, float] | None = None
    for _ in range(EVALUATIONS):
        value = cost(math.exp(place))
        within = value <= target * (1 - MARGIN)
        if within and value >= target * (1 - TOLERANCE):
            return Found(math.exp(place), slope)
        if within:
            enough = place
        else:
            too_little = place
        _check_reachable(place, within, what)
        if 0 < value < math.inf:
            height = math.log(value)
            if last is not None and place != last[0]:
                slope = min(-0.05, max(-30.0, (height - last[1]) / (place - last[0])))
            last = (place, height)
            ahead = place + min(1.5, max(-1.5, (aim - height) / slope))
        else:
            ahead = place + (-1.5 if within else 1.5)
        if not too_little < ahead < enough:
            ahead = (too_little + enough) / 2
        if enough - too_little < 1e-9:
            break
        place = _clamp(ahead)
    if enough == math.inf:
        raise PrivacyError(f"{what}: no noise was found that keeps to the target")
    return Found(math.exp(enough), slope)


def _clamp(place: float) -> float:
    return min(math.log(MOST_NOISE), max(math.log(LEAST_NOISE), place))


def _check_reachable(place: float, within: bool, what: str) -> None:
    if not within and place >= math.log(MOST_NOISE):
        raise OutOfReachError(
            f"{what}: too small: even a noise multiplier of {MOST_NOISE:g} costs more. "
            "Raise epsilon or delta, take fewer steps, or sample fewer units per step"
        )
    if within and place <= math.log(LEAST_NOISE):
        raise PrivacyError(
            f"{what}: so large that a noise multiplier of {LEAST_NOISE:g} costs less, which protects nobody. "
            "Lower epsilon, or train without privacy and say so"
        )
