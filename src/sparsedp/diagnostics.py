"""What a run's releases say about its support: noise against signal, energy shares, overlaps, support per parameter.

Formal guarantees: everything here is computed from released values and public numbers, so it is post-processing.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, final

from scipy import special, stats
from torch import Tensor

from sparsedp.errors import DataError, SparseDPError
from sparsedp.methods.auto import noise_ratio
from sparsedp.methods.method import WARM_UP
from sparsedp.methods.ranking import part_sizes
from sparsedp.methods.support_scheduler import noise_on_mean
from sparsedp.methods.warmup import MINIMUM_WARMUP, MOST_COORDINATES, observed_phase, observed_steps
from sparsedp.parameters import ParameterLayout, Support
from sparsedp.privacy.plan import Plan
from sparsedp.runs.run import Run


@final
@dataclass(frozen=True, slots=True)
class Baseline:
    """A quantity for a uniformly random support: its exact mean and standard deviation."""

    mean: float
    std: float

    def interval(self) -> tuple[float, float]:
        """The central normal interval at 95 %, cut to [0, 1]."""
        reach = float(special.ndtri(0.975)) * self.std
        return max(0.0, self.mean - reach), min(1.0, self.mean + reach)


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

    Attributes:
        order: coordinates, best first, by the steps that rank.
        first: mean released gradient of one set of steps, a d-vector.
        second: that of the other.
        first_variance: variance of the noise on each coordinate of `first`.
        second_variance: that of `second`.
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


@final
@dataclass(frozen=True, slots=True, eq=False)
class WarmupStatistics:
    """Split energies of one warm-up, by ranking, of which `steps` of `planned` were seen, with noise nu_1 on each."""

    splits: Mapping[str, SplitEnergies] = field(repr=False)
    steps: int
    planned: int
    noise_std: float


def statistics_of(run: Run) -> WarmupStatistics:
    """The statistics a run kept.

    Raises:
        DataError: it kept none, and why; or a file is damaged.
    """
    seen = run.warmup
    if seen is None:
        raise DataError(why_nothing(run))
    noise = noise_on_mean(run.plan, observed_phase(run.plan))
    splits = {
        name: SplitEnergies(order, seen.first, seen.second, noise**2 / seen.even, noise**2 / seen.odd)
        for name, order in seen.orders.items()
    }
    return WarmupStatistics(splits, seen.steps, observed_steps(run.plan), noise)


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


@final
@dataclass(frozen=True, slots=True)
class PureNoise:
    """What `rho_sig` of the best k of d coordinates is when there is no gradient at all."""

    mean: float
    std: float

    def surprise(self, seen: float) -> float:
        """How many standard deviations above pure noise a value is."""
        return (seen - self.mean) / self.std if self.std else math.inf * (seen > self.mean)


def pure_noise(size: int, dimension: int, squares: int) -> PureNoise:
    """The null of `rho_sig`, for scores that average `squares` independent squares less their expectation.

    `squares` is the number of warm-up steps T for the energy score and 1 for the coherent score. With `X = chi2_n/n`,
    the null is `E[X - 1; X > u]/E[X - 1; X > 1]`, where u is X's upper k/d quantile; the standard
    deviation is that of the ratio of the two sums to first order in 1/d.

    Edge cases: When more than the positive scores are kept, it is 1 without deviation.
    """
    if not 0 < size <= dimension or squares < 1:
        raise SparseDPError(
            f"pure_noise: got k={size} of d={dimension} with {squares} squares, expected 0 < k <= d and squares >= 1"
        )
    cut = float(stats.chi2.isf(size / dimension, squares)) / squares if size < dimension else 0.0
    if cut <= 1:
        return PureNoise(1.0, 0.0)
    top, whole = _partial(cut, squares), _partial(1.0, squares)
    numerator, denominator = top[1] - top[0], whole[1] - whole[0]
    ratio = numerator / denominator
    # Influence of one coordinate on the ratio: (X - u)+ - ratio (X - 1)+, over the denominator.
    excess = top[1] - cut * top[0]
    square = (top[2] - 2 * cut * top[1] + cut**2 * top[0]) + ratio**2 * (whole[2] - 2 * whole[1] + whole[0])
    cross = top[2] - (1 + cut) * top[1] + cut * top[0]
    variance = square - 2 * ratio * cross - (excess - ratio * denominator) ** 2
    return PureNoise(ratio, math.sqrt(max(variance, 0.0) / dimension) / denominator)


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


@final
@dataclass(frozen=True, slots=True)
class Proxy:
    """`rho_sig` of a run's support, and what pure noise would give."""

    seen: float
    null: PureNoise


@final
@dataclass(frozen=True, slots=True, eq=False)
class RunView:
    """The public state of a run that diagnostics start from.

    `support` is the last one, `scores` what the last ranking was made from, `ranking` the method's as the record
    describes it. `learning_rate` is `eta/(1 - momentum)` of SGD, by which a constant gradient moves in the long run;
    None for other optimizers.
    """

    plan: Plan
    support: Support
    scores: Tensor | None
    ranking: Mapping[str, Any] | None
    learning_rate: float | None = None

    @classmethod
    def of(cls, run: Run) -> RunView:
        """What a run's folder holds."""
        rate = _rate(run.record["settings"]["optimizer"])
        return cls(run.plan, run.active, run.scores, run.method["ranking"], rate)

    def proxy(self) -> Proxy | None:
        """DP-visible concentration against its null; None without a warm-up or for scores that are no energies."""
        warm_up = next((phase for phase in self.plan.phases if phase.name == WARM_UP.name), None)
        if self.scores is None or self.ranking is None or warm_up is None:
            return None
        squares = {"energy": warm_up.steps, "coherent": 1}.get(self.ranking["name"])
        if squares is None:
            return None
        null = pure_noise(self.support.size, self.support.dimension, squares)
        return Proxy(proxy_concentration(self.scores, self.support), null)


def _rate(optimizer: Mapping[str, Any]) -> float | None:
    if optimizer["class"] != "SGD" or not optimizer["groups"]:
        return None
    group = optimizer["groups"][0]
    return float(group["lr"]) / (1 - float(group.get("momentum", 0.0)))


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
    shared, d = first.overlap(second), first.dimension
    a, b = first.size, second.size
    small = min(a, b)
    if small == 0:
        raise SparseDPError("overlap: a support is empty; compare supports with coordinates in them")
    mean = a * b / d
    variance = mean * (1 - a / d) * (d - b) / (d - 1) if d > 1 else 0.0
    return Overlap(
        shared,
        shared / small,
        shared / (a + b - shared),
        Baseline(mean / small, math.sqrt(variance) / small),
        1 - shared / a,
    )


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


def support_per_layer(support: Support, layout: ParameterLayout) -> tuple[LayerShare, ...]:
    """How many coordinates of each parameter are active."""
    masks = support.per_parameter(layout)
    return tuple(LayerShare(slot.name, slot.size, int(masks[slot.name].sum())) for slot in layout)


DENSE_LOOK = 5
"""A dense run is looked at as if it kept one coordinate in this many."""


@final
@dataclass(frozen=True, slots=True)
class NoiseFacts:
    """What the plan says of the last phase: nu, `k nu^2`, `d nu^2`, and r for parts of the model and the support."""

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


def inspect_run(folder: Path | str) -> Visible:
    """The DP-visible diagnostics of the run in a folder.

    Formal guarantees: Post-processing of releases and public numbers: free, and as public as the run.

    Raises:
        DataError: there is no run, or one of its files is damaged.
    """
    run = Run.open(folder)
    view = RunView.of(run)
    d = view.support.dimension
    size = shown_size(view.support)
    found, missing = (None, why_nothing(run)) if run.warmup is None else (statistics_of(run), None)
    return Visible(
        size=size,
        dimension=d,
        proxy=view.proxy(),
        splits={}
        if found is None
        else {name: split_concentration(split, size) for name, split in found.splits.items()},
        missing=missing,
        layers=support_per_layer(view.support, run.layout),
        overlaps=tuple(_overlaps(view.support, found)),
        noise=_noise(view, run.layout),
        decisions=tuple(run.checkpoint.state["controller"]["values"].get("decisions", ())),
    )


def shown_size(support: Support) -> int:
    """How many coordinates the statistics are of: k, or a fifth of the coordinates of a dense run."""
    return max(1, support.dimension // DENSE_LOOK) if support.is_full else support.size


def _overlaps(support: Support, found: WarmupStatistics | None) -> Iterator[tuple[str, str, Overlap]]:
    """The last support against what the warm-up's rankings would keep."""
    if not support.is_full:
        for name, split in {} if found is None else found.splits.items():
            yield (
                "last support",
                f"{name}, by half a warm-up",
                overlap(support, split.support(support.size)),
            )


def _noise(view: RunView, layout: ParameterLayout) -> NoiseFacts:
    phase, k, d = view.plan.phases[-1], view.support.size, view.support.dimension
    nu = noise_on_mean(view.plan, phase)
    sizes = part_sizes(layout) | {"support": k}
    return NoiseFacts(
        nu,
        k * nu**2,
        d * nu**2,
        {name: noise_ratio(view.plan, size) for name, size in sizes.items() if size},
    )
