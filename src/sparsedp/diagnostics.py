"""What a run's releases say about its support: noise against signal, energy shares, overlaps, support per parameter.

Formal guarantees: everything here is computed from released values and public numbers, so it is post-processing.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, final

from scipy import special, stats
from torch import Tensor

from sparsedp.errors import DataError, SparseDPError
from sparsedp.methods.auto import noise_ratio
from sparsedp.methods.method import WARM_UP
from sparsedp.methods.ranking import BIAS, HEAD, find, size_of
from sparsedp.methods.support_scheduler import noise_on_mean
from sparsedp.methods.warmup import MINIMUM_WARMUP, MOST_COORDINATES, RANKINGS, observed_phase, observed_steps
from sparsedp.parameters import Support
from sparsedp.runs.run import Run


@final
@dataclass(frozen=True, slots=True)
class Baseline:
    """What a quantity is by chance, as for a uniformly random support: mean and standard deviation."""

    mean: float
    std: float

    def interval(self) -> tuple[float, float]:
        """The central normal interval at 95 %, cut to [0, 1]."""
        reach = float(special.ndtri(0.975)) * self.std
        return max(0.0, self.mean - reach), min(1.0, self.mean + reach)

    def surprise(self, seen: float) -> float:
        """How many standard deviations above it a value is."""
        return (seen - self.mean) / self.std if self.std else math.inf * (seen > self.mean)


@final
@dataclass(frozen=True, slots=True)
class NoisyEstimate:
    """An unbiased estimate and the standard deviation of the noise in it."""

    value: float
    std: float


@final
@dataclass(frozen=True, slots=True, eq=False)
class SplitEnergies:
    """Coordinate energies estimated from released gradients by sample splitting. Post-processing, so free.

    `G_p^2` is estimated by the product of the means of two disjoint sets of steps, and the ranking by a third, so no
    noise is counted as signal: the estimates are unbiased under any ranking, and may be negative.

    `order` has the coordinates, best first, by the steps that rank; `first` and `second` are the mean released
    gradients of two other sets of steps, d-vectors, with the variances of the noise on each coordinate.
    """

    order: Tensor = field(repr=False)
    first: Tensor = field(repr=False)
    second: Tensor = field(repr=False)
    first_variance: float
    second_variance: float

    @property
    def dimension(self) -> int:
        """The number d of coordinates."""
        return self.first.numel()

    def support(self, size: int) -> Support:
        """The first `size` coordinates of the ranking."""
        return Support(self.order[:size], self.dimension)

    def energy(self, support: Support) -> NoisyEstimate:
        """The energy on a support.

        Its variance is the sum of `G^2 (v1 + v2) + v1 v2`, estimated without bias by `m1^2 v2 + m2^2 v1 - v1 v2` and
        never taken below what noise alone gives. Only the noise that was added is in it: sampling of batches makes
        the true one a little larger.
        """
        m1, m2 = support.gather(self.first), support.gather(self.second)
        v1, v2 = self.first_variance, self.second_variance
        floor = support.size * v1 * v2
        spread = float((m1**2).sum()) * v2 + float((m2**2).sum()) * v1 - floor
        return NoisyEstimate(float((m1 * m2).sum()), math.sqrt(max(spread, floor)))


def statistics_of(run: Run) -> dict[str, SplitEnergies]:
    """The split energies of a run's warm-up, by ranking; a run that kept none is refused."""
    kept = run.warmup
    if kept is None:
        raise DataError(why_nothing(run))
    variance = noise_on_mean(run.plan, observed_phase(run.plan)) ** 2
    first, second = kept["first"].double(), kept["second"].double()
    even, odd = variance / int(kept["even_steps"]), variance / int(kept["odd_steps"])
    return {
        score.name: SplitEnergies(kept[f"order.{score.name}"].long(), first, second, even, odd)
        for score in RANKINGS
    }


def why_nothing(run: Run) -> str:
    """Why a run has no statistics, and what to do."""
    plan, record = run.plan, run.record
    steps, first = observed_steps(plan), plan.first_step(observed_phase(plan).name)
    nothing = f"{run.path} has no warm-up statistics: "
    if any(span.active < record["d"] and span.step < first + steps for span in run.spans):
        return (
            f"{nothing}{plan.method} has no warm-up and does not train every coordinate for its first {steps} steps, "
            "so nothing shows what the others would have held; train by a method with a warm-up, or by dp-sgd"
        )
    if steps < MINIMUM_WARMUP:
        return f"{nothing}{steps} steps are too few to split, {MINIMUM_WARMUP} are the least; train longer"
    if record["d"] > MOST_COORDINATES:
        return (
            f"{nothing}they are kept for at most {MOST_COORDINATES:,} coordinates, and it has {record['d']:,}"
        )
    if run.warming_up:
        return f"{nothing}its warm-up is not over; go on with `sparsedp train --resume {run.path}`, or resume=True"
    return f"{nothing}too many steps were lost; train again"


def proxy_concentration(scores: Tensor, support: Support) -> float:
    """`rho_sig(A)`: the support's share of `max(a_p, 0)`; 0 when no score is positive."""
    positive = scores.double().clamp(min=0)
    total = float(positive.sum())
    return float(support.gather(positive).sum()) / total if total else 0.0


def pure_noise(size: int, dimension: int, squares: int) -> Baseline:
    """The null of `rho_sig`, for scores that average `squares` independent squares less their expectation.

    `squares` is the number of warm-up steps T for the energy score and 1 for the coherent score. With `X = chi2_n/n`,
    the null is `E[X - 1; X > u]/E[X - 1; X > 1]`, where u is X's upper k/d quantile; the standard
    deviation is that of the ratio of the two sums to first order in 1/d.

    Edge cases: When more than the positive scores are kept, it is 1 without deviation.
    """
    cut = float(stats.chi2.isf(size / dimension, squares)) / squares if size < dimension else 0.0
    if cut <= 1:
        return Baseline(1.0, 0.0)
    top, whole = _partial(cut, squares), _partial(1.0, squares)
    numerator, denominator = top[1] - top[0], whole[1] - whole[0]
    ratio = numerator / denominator
    # Influence of one coordinate on the ratio: (X - u)+ - ratio (X - 1)+, over the denominator.
    excess = top[1] - cut * top[0]
    square = (top[2] - 2 * cut * top[1] + cut**2 * top[0]) + ratio**2 * (whole[2] - 2 * whole[1] + whole[0])
    cross = top[2] - (1 + cut) * top[1] + cut * top[0]
    variance = square - 2 * ratio * cross - (excess - ratio * denominator) ** 2
    return Baseline(ratio, math.sqrt(max(variance, 0.0) / dimension) / denominator)


def _partial(cut: float, freedom: int) -> tuple[float, float, float]:
    """`E[X^j; X > cut]` for j = 0, 1, 2 and `X = chi2_n/n`."""
    tails = [float(special.chdtrc(freedom + 2 * j, cut * freedom)) for j in range(3)]
    return tails[0], tails[1], tails[2] * (1 + 2 / freedom)


@final
@dataclass(frozen=True, slots=True)
class SplitConcentration:
    """The split version of `rho_sig`: ranked by some steps, measured by others.

    `share` is the support's share of the `total` estimated energy, None when that is not clearly positive; a random
    support has `active_ratio`.
    """

    share: NoisyEstimate | None
    total: NoisyEstimate
    active_ratio: float


def split_concentration(split: SplitEnergies, size: int, clearly: float = 3.0) -> SplitConcentration:
    """The share of energy the best `size` coordinates hold, if the total is `clearly` many deviations above zero.

    Unbiased in numerator and denominator, so a random ranking gives k/d whatever the noise.
    """
    inside = split.energy(split.support(size))
    outside = split.energy(Support(split.order[size:], split.dimension))
    total = NoisyEstimate(inside.value + outside.value, math.hypot(inside.std, outside.std))
    ratio = size / split.dimension
    if total.value <= clearly * total.std:
        return SplitConcentration(None, total, ratio)
    share = inside.value / total.value
    std = math.hypot((1 - share) * inside.std, share * outside.std) / total.value
    return SplitConcentration(NoisyEstimate(share, std), total, ratio)


def proxy_of(run: Run) -> tuple[float, Baseline] | None:
    """`rho_sig` of a run's support and what pure noise gives; None without a warm-up or for scores of no energies."""
    warm_up = next((phase for phase in run.plan.phases if phase.name == WARM_UP.name), None)
    scores, ranking, support = run.scores, run.method["ranking"], run.active
    if scores is None or ranking is None or warm_up is None:
        return None
    squares = {"energy": warm_up.steps, "coherent": 1}.get(ranking["name"])
    if squares is None:
        return None
    return proxy_concentration(scores, support), pure_noise(support.size, support.dimension, squares)


@final
@dataclass(frozen=True, slots=True)
class Overlap:
    """How much two supports share: a count, its share of the smaller one, and that of two random ones (`random`).

    `jaccard` is over the union; `churn` is the share of the first support's coordinates that the second one dropped.
    """

    shared: int
    share: float
    jaccard: float
    random: Baseline
    churn: float


def overlap(first: Support, second: Support) -> Overlap:
    """Compare two supports with each other and with chance (a hypergeometric count)."""
    a, b, d = first.size, second.size, first.dimension
    shared = a - first.without(second).size
    small = min(a, b)
    if small == 0:
        raise SparseDPError("overlap: a support is empty; compare supports with coordinates in them")
    mean = a * b / d
    variance = mean * (1 - a / d) * (d - b) / (d - 1) if d > 1 else 0.0
    random = Baseline(mean / small, math.sqrt(variance) / small)
    return Overlap(shared, shared / small, shared / (a + b - shared), random, 1 - shared / a)


@final
@dataclass(frozen=True, slots=True)
class LayerShare:
    """One parameter's part of a support."""

    name: str
    size: int
    active: int

    @property
    def active_ratio(self) -> float:
        """The share of the parameter that is active."""
        return self.active / self.size if self.size else 0.0


DENSE_LOOK = 5
"""A dense run is looked at as if it kept one coordinate in this many."""


@final
@dataclass(frozen=True, slots=True)
class Visible:
    """The DP-visible diagnostics of a run.

    Attributes:
        k: size of the last support, of d coordinates.
        shown: the size that the estimates are for: k, or a fifth of the coordinates of a dense run.
        proxy: `rho_sig` and its pure-noise null; None for rankings that are no energies.
        splits: by ranking, the share of energy the best `shown` hold by the split estimate.
        missing: why there is no split estimate; None if there is one.
        layers: the last support by parameter.
        overlaps: the last support and what the warm-up's rankings would keep, by ranking.
        noise_std: the noise nu of the last phase on a coordinate; k nu^2 and d nu^2 follow.
        noise_ratios: r for parts of the model and the support.
        decisions: what each round of `tp-adaptive` kept and why, with the mixture that it fitted.
    """

    k: int
    d: int
    shown: int
    proxy: tuple[float, Baseline] | None
    splits: Mapping[str, SplitConcentration]
    missing: str | None
    layers: tuple[LayerShare, ...] = field(repr=False)
    overlaps: Mapping[str, Overlap]
    noise_std: float
    noise_ratios: Mapping[str, float]
    decisions: tuple[Mapping[str, Any], ...] = ()

    def to_json(self) -> dict[str, Any]:
        """As JSON values."""
        seen, null = self.proxy or (0.0, Baseline(0.0, 0.0))
        proxy = {"seen": seen, "null": asdict(null), "surprise": null.surprise(seen)}
        return {
            **asdict(self),
            "proxy": proxy if self.proxy else None,
            "layers": [{**asdict(layer), "active_ratio": layer.active_ratio} for layer in self.layers],
        }


def inspect_run(folder: Path | str) -> Visible:
    """The DP-visible diagnostics of the run in a folder.

    Formal guarantees: Post-processing of releases and public numbers: free, and as public as the run.

    Raises:
        DataError: there is no run, or one of its files is damaged.
    """
    run = Run.open(folder)
    support, plan = run.active, run.plan
    places = support.split(run.layout)
    shown = max(1, support.dimension // DENSE_LOOK) if support.is_full else support.size
    splits, missing = ({}, why_nothing(run)) if run.warmup is None else (statistics_of(run), None)
    sizes = {word: size_of(find(run.layout, (word,), "part")) for word in (HEAD, BIAS)}
    sizes = {"all": support.dimension, **sizes, "support": support.size}
    return Visible(
        k=support.size,
        d=support.dimension,
        shown=shown,
        proxy=proxy_of(run),
        splits={name: split_concentration(split, shown) for name, split in splits.items()},
        missing=missing,
        layers=tuple(LayerShare(slot.name, slot.size, len(places[slot.name])) for slot in run.layout),
        overlaps={
            name: overlap(support, split.support(shown))
            for name, split in splits.items()
            if not support.is_full
        },
        noise_std=noise_on_mean(plan, plan.phases[-1]),
        noise_ratios={name: noise_ratio(plan, count) for name, count in sizes.items() if count},
        decisions=tuple(run.checkpoint.state["controller"]["values"].get("decisions", ())),
    )
