"""What was spent, as the accountants see it: Poisson-subsampled Gaussian mechanisms and how often each ran."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple


class Spend(NamedTuple):
    """`steps` releases of one mechanism, under adding or removing one unit; noise 0 is no protection at all."""

    sampling_rate: float
    noise_multiplier: float
    steps: int


def counted(spends: Iterable[Spend]) -> tuple[Spend, ...]:
    """Spends as an accountant counts them, in order.

    **Edge cases.** One spend without noise makes the whole non-private; one that samples nobody costs nothing.
    """
    known = tuple(Spend(float(rate), float(noise), steps) for rate, noise, steps in spends if rate > 0)
    return known if is_private(known) else (Spend(1.0, 0.0, 1),)


def merged(spends: Iterable[Spend]) -> tuple[Spend, ...]:
    """Spends with equal mechanisms added up: composition does not depend on the order."""
    steps: dict[tuple[float, float], int] = {}
    for rate, noise, count in spends:
        steps[rate, noise] = steps.get((rate, noise), 0) + count
    return tuple(Spend(rate, noise, count) for (rate, noise), count in steps.items() if count)


def between(spends: Iterable[Spend], start: int, stop: int) -> tuple[Spend, ...]:
    """The spends of the steps start..stop-1."""
    parts, first = [], 0
    for rate, noise, count in spends:
        overlap = min(first + count, stop) - max(first, start)
        if overlap > 0:
            parts.append(Spend(rate, noise, overlap))
        first += count
    return tuple(parts)


def is_private(spends: Sequence[Spend]) -> bool:
    """Whether every mechanism adds noise."""
    return all(spend.noise_multiplier > 0 for spend in spends)
