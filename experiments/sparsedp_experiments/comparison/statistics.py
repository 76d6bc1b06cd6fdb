"""Means, spreads and paired differences over seeds, with Student intervals."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import final

from scipy.special import stdtrit

from sparsedp.errors import SparseDPError

CONFIDENCE = 0.95


@final
@dataclass(frozen=True, slots=True)
class Estimate:
    """A mean over seeds.

    Attributes:
        count: how many values.
        mean: their mean.
        std: their standard deviation (n - 1); None for a single value.
        low: lower end of the interval of the mean (Student's t); None for a single value.
        high: upper end.
    """

    count: int
    mean: float
    std: float | None
    low: float | None
    high: float | None


def estimate(values: Sequence[float], confidence: float = CONFIDENCE) -> Estimate:
    """Mean, standard deviation and interval of some values, 95 % unless told otherwise.

    >>> found = estimate([1.0, 2.0, 3.0])
    >>> found.mean, found.std, round(found.high, 3)
    (2.0, 1.0, 4.484)
    """
    n = len(values)
    if n == 0:
        raise SparseDPError("estimate: got no values, expected at least one")
    mean = math.fsum(values) / n
    if n == 1:
        return Estimate(1, mean, None, None, None)
    std = math.sqrt(math.fsum((value - mean) ** 2 for value in values) / (n - 1))
    half = half_width(std, n, confidence)
    return Estimate(n, mean, std, mean - half, mean + half)


def half_width(std: float, count: int, confidence: float = CONFIDENCE) -> float:
    """How far Student's interval of a mean reaches to each side, from the standard deviation of so many values."""
    return float(stdtrit(count - 1, (1 + confidence) / 2)) * std / math.sqrt(count)


def paired_difference(values: Mapping[int, float], baseline: Mapping[int, float]) -> Estimate | None:
    """The mean of value less baseline over the seeds both have; None if they share none.

    Runs of one seed share batches and noise stream, so their difference varies less than they do.
    """
    common = sorted(values.keys() & baseline.keys())
    return estimate([values[seed] - baseline[seed] for seed in common]) if common else None
