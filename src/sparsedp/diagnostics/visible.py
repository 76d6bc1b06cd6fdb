"""What anyone who has a run's folder can say about its support: from releases and public numbers alone, so free."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any, final

from sparsedp.diagnostics.proxy import SplitConcentration, split_concentration
from sparsedp.diagnostics.quality import LayerShare, Overlap, overlap, support_per_layer
from sparsedp.diagnostics.splits import WarmupStatistics, statistics_of, why_nothing
from sparsedp.diagnostics.view import Proxy, RunView
from sparsedp.methods.auto import noise_ratio
from sparsedp.methods.ranking import part_sizes
from sparsedp.methods.support_scheduler import noise_on_mean
from sparsedp.parameters import Layout, Support
from sparsedp.runs.reader import Run
from sparsedp.runs.snapshots import read_snapshots

DENSE_LOOK = 5
"""A dense run is looked at as if it kept one coordinate in this many."""


@final
@dataclass(frozen=True, slots=True)
class NoiseFacts:
    """What the plan alone says about the last phase.

    Attributes:
        noise_std: nu, on each coordinate of a released mean gradient.
        sparse_energy: `k nu^2`, the noise energy of a step.
        dense_energy: `d nu^2`, what it would be on all coordinates.
        noise_ratios: r, the norm of a step's noise over the clip norm, for parts of the model and the support.
    """

    noise_std: float
    sparse_energy: float
    dense_energy: float
    noise_ratios: Mapping[str, float]


@final
@dataclass(frozen=True, slots=True)
class Visible:
    """The DP-visible diagnostics of a run.

    Attributes:
        size: k of the support that is looked at: the last one, or a fifth of the coordinates of a dense run.
        dimension: d.
        proxy: `rho_sig` against its pure-noise null; None for rankings that are no energies.
        splits: by ranking, the share of energy the best k hold by the split estimate; compare with k/d.
        missing: why there is no split estimate; None if there is one.
        layers: the last support by parameter.
        overlaps: pairs of supports by name, and what they share.
        noise: what the plan says.
        decisions: what each round of `tp-adaptive` kept and why, with the mixture that it fitted.
    """

    size: int
    dimension: int
    proxy: Proxy | None
    splits: Mapping[str, SplitConcentration]
    missing: str | None
    layers: tuple[LayerShare, ...] = field(repr=False)
    overlaps: tuple[tuple[str, str, Overlap], ...]
    noise: NoiseFacts
    decisions: tuple[Mapping[str, Any], ...] = ()

    def to_json(self) -> dict[str, Any]:
        """As JSON values."""
        proxy = self.proxy
        return {
            "k": self.size,
            "d": self.dimension,
            "proxy": None
            if proxy is None
            else {**asdict(proxy), "surprise": proxy.null.surprise(proxy.seen)},
            "splits": {name: asdict(split) for name, split in self.splits.items()},
            "missing": self.missing,
            "layers": [{**asdict(layer), "active_ratio": layer.active_ratio} for layer in self.layers],
            "overlaps": [{"first": a, "second": b, **asdict(shared)} for a, b, shared in self.overlaps],
            "noise": asdict(self.noise),
            "decisions": list(self.decisions),
        }


def look(folder: Path | str) -> Visible:
    """The DP-visible diagnostics of the run in a folder.

    **Privacy.** Post-processing of releases and public numbers: free, and as public as the run.

    Raises:
        DataError: there is no run, or one of its files is damaged.
    """
    run = Run.open(folder)
    view = RunView.of(run)
    d = view.support.dimension
    size = looked_at(view.support)
    found, missing = _statistics(run)
    return Visible(
        size=size,
        dimension=d,
        proxy=view.proxy(),
        splits={}
        if found is None
        else {name: split_concentration(split, size) for name, split in found.splits.items()},
        missing=missing,
        layers=support_per_layer(view.support, run.layout),
        overlaps=tuple(_overlaps(folder, view.support, found)),
        noise=_noise(view, run.layout),
        decisions=tuple(run.checkpoint.state["controller"]["values"].get("decisions", ())),
    )


def looked_at(support: Support) -> int:
    """How many coordinates the statistics are of: k, or a fifth of the coordinates of a dense run."""
    return max(1, support.dimension // DENSE_LOOK) if support.is_full else support.size


def _statistics(run: Run) -> tuple[WarmupStatistics | None, str | None]:
    """What the warm-up showed, or why nothing is known of it; a damaged file is an error."""
    return (None, why_nothing(run)) if run.warmup is None else (statistics_of(run), None)


def _overlaps(
    folder: Path | str, support: Support, found: WarmupStatistics | None
) -> Iterator[tuple[str, str, Overlap]]:
    """The last support against what the warm-up's rankings would keep, and supports along the run."""
    if not support.is_full:
        for name, split in {} if found is None else found.splits.items():
            yield (
                "last support",
                f"{name}, by half a warm-up",
                overlap(support, split.support(support.size)),
            )
    kept = [shot for shot in read_snapshots(folder) if not shot.support.is_full]
    for before, after in pairwise(kept):
        if before.support != after.support:
            yield f"step {before.step}", f"step {after.step}", overlap(before.support, after.support)


def _noise(view: RunView, layout: Layout) -> NoiseFacts:
    phase, k, d = view.plan.phases[-1], view.support.size, view.support.dimension
    nu = noise_on_mean(view.plan, phase)
    clipped = phase.clip_norm is not None and phase.noise_multiplier > 0
    sizes = part_sizes(layout) | {"support": k}
    return NoiseFacts(
        nu,
        k * nu**2,
        d * nu**2,
        {name: noise_ratio(view.plan, size) for name, size in sizes.items() if size} if clipped else {},
    )
