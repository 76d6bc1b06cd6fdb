"""Contrasts: the number that decides a claim, for every cell and seed of its experiments, and pooled over cells."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from sparsedp_experiments.comparison.statistics import CONFIDENCE, Estimate, estimate
from sparsedp_experiments.pages.study import Cell, Measured, Record

Labels = Mapping[str, str]
"""A label on some axes."""


@dataclass(frozen=True, slots=True)
class Contrast:
    """The mean of some cells less the mean of others, at equal labels on all axes they do not name.

    Attributes:
        better: what the claim puts above.
        worse: what it puts below.
        at: labels at which the gap between them is taken; None for a plain gap.
        less_at: labels at which a second gap is taken and subtracted; it goes with `at`.
        only: labels that count, by axis.
    """

    better: tuple[Labels, ...]
    worse: tuple[Labels, ...]
    at: Labels | None
    less_at: Labels | None
    only: Mapping[str, tuple[str, ...]]

    @property
    def terms(self) -> tuple[tuple[float, Labels], ...]:
        """Weighted cells whose sum is the contrast."""
        gap = [(1 / len(self.better), one) for one in self.better]
        gap += [(-1 / len(self.worse), one) for one in self.worse]
        if self.at is None or self.less_at is None:
            return tuple(gap)
        first = [(weight, {**labels, **self.at}) for weight, labels in gap]
        second = [(-weight, {**labels, **self.less_at}) for weight, labels in gap]
        return (*first, *second)


@dataclass(frozen=True, slots=True)
class Part:
    """A contrast in one place of one experiment: the experiment, the labels of the free axes, a value per seed."""

    study: str
    place: Cell
    values: Mapping[int, float]

    @property
    def estimate(self) -> Estimate:
        """Mean and 95 % interval over seeds."""
        return estimate([self.values[seed] for seed in sorted(self.values)])


def parts_of(contrast: Contrast, study: Measured, metric: str) -> tuple[Part, ...]:
    """The contrast at every combination of the free axes where all its cells share a seed."""
    scores = _scores(study.records, metric)
    named = {axis for _, labels in contrast.terms for axis in labels}
    free = [axis for axis in study.axes if axis not in named]
    choices = [study.axes[axis] for axis in free]
    parts = []
    for labels in itertools.product(*choices):
        place = dict(zip(free, labels, strict=True))
        if any(place.get(axis, wanted[0]) not in wanted for axis, wanted in contrast.only.items()):
            continue
        values = _values(contrast, place, scores)
        if values:
            parts.append(Part(study.name, place, values))
    return tuple(parts)


def pooled(parts: Sequence[Part], confidence: float = CONFIDENCE) -> tuple[Estimate, int] | None:
    """One value per seed, the mean over parts, and how many parts went in; None without any.

    A part with a single seed waits for its second where others have more; seeds are those all parts share.
    """
    enough = [part for part in parts if len(part.values) > 1] or list(parts)
    if not enough:
        return None
    common = sorted(set.intersection(*(set(part.values) for part in enough)))
    if not common:
        return None
    means = [sum(part.values[seed] for part in enough) / len(enough) for seed in common]
    return estimate(means, confidence), len(enough)


def _values(
    contrast: Contrast, place: Cell, scores: Mapping[frozenset[tuple[str, str]], Mapping[int, float]]
) -> dict[int, float]:
    terms = [
        (weight, scores.get(frozenset({**place, **labels}.items()), {})) for weight, labels in contrast.terms
    ]
    common = sorted(set.intersection(*(set(values) for _, values in terms)))
    return {seed: sum(weight * values[seed] for weight, values in terms) for seed in common}


def _scores(records: Iterable[Record], metric: str) -> dict[frozenset[tuple[str, str]], dict[int, float]]:
    """The metric of every cell by seed."""
    found: dict[frozenset[tuple[str, str]], dict[int, float]] = {}
    for record in records:
        value = record["metrics"].get(metric)
        if value is not None:
            found.setdefault(frozenset(record["cell"].items()), {})[record["seed"]] = float(value)
    return found
