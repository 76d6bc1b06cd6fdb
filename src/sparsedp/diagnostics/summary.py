"""What a warm-up shows, for reports: the share of energy by ranking and ratio."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from sparsedp._validate import exact_ratio, share_of
from sparsedp.diagnostics.criteria import SplitEnergies
from sparsedp.diagnostics.proxy import split_concentration
from sparsedp.diagnostics.splits import WarmupStatistics, statistics_of
from sparsedp.runs.reader import Run

SHARES = (0.01, 0.02, 0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0)


def summarize_warmup(run: Run) -> Mapping[str, Any] | None:
    """What a run's warm-up showed, as a report shows it; None if it kept nothing.

    **Privacy.** Post-processing of releases, as public as the run.
    """
    return None if run.warmup is None else summary_of(statistics_of(run))


def summary_of(found: WarmupStatistics) -> Mapping[str, Any]:
    """The share of energy by ranking and ratio."""
    return {
        "steps": found.steps,
        "planned": found.planned,
        "noise_std": found.noise_std,
        "curves": [split_curve(name, split) for name, split in found.splits.items()],
    }


def split_curve(ranking: str, split: SplitEnergies) -> Mapping[str, Any]:
    """The share of energy the best x of coordinates hold, by the split estimate, and its standard deviation.

    **Edge cases.** Empty lists when the energy does not stand out from the noise.
    """
    d = split.dimension
    sizes = sorted({max(1, share_of(exact_ratio(share), d)) for share in SHARES})
    points = [(size / d, split_concentration(split, size).share) for size in sizes]
    known = [(ratio, share) for ratio, share in points if share is not None]
    return {
        "ranking": ranking,
        "ratio": [ratio for ratio, _ in known],
        "share": [share.value for _, share in known],
        "std": [share.std for _, share in known],
    }
