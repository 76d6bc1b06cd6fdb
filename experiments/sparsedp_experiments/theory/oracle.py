"""Un-noised gradients, their symmetry, and the curvature of the mean loss: for looking only. Nothing here is private.

The model is used as it is: call `model.eval()` first to leave dropout out.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice, pairwise
from typing import final

import torch
from torch import Tensor, nn

from sparsedp.batch import LossFunction, MicroBatch, slice_batch, to_device, validate_losses
from sparsedp.clipping import ROUNDING_MARGIN, FlatClip
from sparsedp.errors import DataError
from sparsedp.grad_sample.query import ClippedSumEngine, ClippedSumQuery
from sparsedp.parameters import ParameterLayout, Support
from sparsedp.randomness import PublicRandomness
from sparsedp_experiments.data.bundle import Split
from sparsedp_experiments.theory.bounds import clipping_bias_bound

UNCLIPPED = FlatClip(1e30)
"""Longer than any gradient."""
HELD_OUT = 7
"""Key of the public randomness that chooses rows."""


def lopsidedness(points: Tensor) -> float:
    """`||mean(x ||x||^2)|| / mean(||x||^3)` of points `[n, axes]` about zero: 0 if symmetric, 1 if all on one ray.

    **Edge cases.** A sample of a symmetric distribution gives a little more than 0; see `lopsidedness_by_chance`.
    """
    cubes, whole = _cubes(points)
    return float(torch.linalg.vector_norm(cubes.sum(dim=0))) / whole if whole else 0.0


def lopsidedness_by_chance(points: Tensor, public: PublicRandomness, flips: int = 200) -> Tensor:
    """What `lopsidedness` is when the sign of each point is drawn anew, sorted: what a symmetric cloud gives."""
    cubes, whole = _cubes(points)
    return torch.sort(_flipped(cubes, public, 3, flips) / (whole or 1.0)).values


def _cubes(points: Tensor) -> tuple[Tensor, float]:
    """`x ||x||^2` of every point, and the sum of their lengths."""
    lengths = torch.linalg.vector_norm(points.double(), dim=1)
    return points.double() * (lengths**2).unsqueeze(1), float((lengths**3).sum())


def _flipped(cubes: Tensor, public: PublicRandomness, key: int, flips: int) -> Tensor:
    """The length of their sum when the sign of each is drawn anew."""
    signs = torch.stack([public.normal(len(cubes), (key, flip)).sign() for flip in range(flips)])
    lengths: Tensor = torch.linalg.vector_norm(signs @ cubes, dim=1)
    return lengths


def symmetry_error(gradient: Tensor, deviations: Tensor, clip: FlatClip) -> float:
    """`b_t` of RS, Theorem 3.3: what asymmetry adds to the progress of a clipped step.

    It is `E<grad, clipped(grad + xi)>` less the same with xi or -xi, each half the time, the symmetric proxy that is
    nearest at hand; xi are the rows of `deviations`, one sample's deviation from the mean gradient each.
    """
    g, xi = gradient.double(), deviations.double()
    seen, mirrored = (_progress(g, g + side * xi, clip) for side in (1.0, -1.0))
    return (seen - mirrored) / 2


def _progress(gradient: Tensor, samples: Tensor, clip: FlatClip) -> float:
    factors = clip.factors(torch.linalg.vector_norm(samples, dim=1))
    return float((factors * (samples @ gradient)).mean())


def mean_loss(model: nn.Module, loss: LossFunction, batches: Sequence[MicroBatch]) -> float:
    """The mean loss over rows, without noise."""
    rows = _count_rows(batches)
    device = next(model.parameters()).device
    with torch.no_grad():
        total = sum(
            float(validate_losses(loss(model, to_device(b.rows, device)), b.example_count).double().sum())
            for b in batches
            if b.example_count
        )
    return total / rows


@final
@dataclass(frozen=True, slots=True)
class Smoothness:
    """The largest magnitude of a Hessian eigenvalue at one point: the smoothness the loss shows there."""

    value: float  # the estimate; from below, so the true one may be larger
    residual: float  # `||Hv - (v.Hv) v||`: some eigenvalue lies within it of the Rayleigh quotient
    iterations: int  # how many products it took


def smoothness(
    model: nn.Module,
    loss: LossFunction,
    batches: Sequence[MicroBatch],
    public: PublicRandomness,
    *,
    iterations: int = 50,
    tolerance: float = 1e-3,
) -> Smoothness:
    """Power iteration from a random start, until the estimate moves by less than `tolerance` of itself.

    **Edge cases.** A loss without curvature has smoothness 0.
    """
    rows = _count_rows(batches)
    vector = public.normal(ParameterLayout.of(model).dimension, (0,))
    vector /= torch.linalg.vector_norm(vector)
    value, residual, done = 0.0, 0.0, 0
    while done < iterations:
        done += 1
        product = _product(model, loss, batches, vector, rows)
        before, value = value, float(torch.linalg.vector_norm(product))
        residual = float(torch.linalg.vector_norm(product - (vector @ product) * vector))
        if value == 0 or abs(value - before) <= tolerance * value:
            break
        vector = product / value
    return Smoothness(value, residual, done)


def _product(
    model: nn.Module, loss: LossFunction, batches: Sequence[MicroBatch], vector: Tensor, rows: int
) -> Tensor:
    layout = ParameterLayout.of(model)
    parameters = layout.parameters(model)
    direction = [
        vector[slot.span].reshape(slot.shape).to(p) for slot, p in zip(layout, parameters, strict=True)
    ]
    total = torch.zeros(layout.dimension, dtype=torch.float64)
    for batch in batches:
        if not batch.example_count:
            continue
        losses = validate_losses(
            loss(model, to_device(batch.rows, parameters[0].device)), batch.example_count
        )
        slopes = torch.autograd.grad(
            losses.sum() / rows, parameters, create_graph=True, materialize_grads=True
        )
        along = torch.stack([(s * v).sum() for s, v in zip(slopes, direction, strict=True)]).sum()
        if not along.requires_grad:
            continue
        products = torch.autograd.grad(along, parameters, materialize_grads=True)
        total += torch.cat([p.detach().reshape(-1) for p in products]).to("cpu", torch.float64)
    return total


def _count_rows(batches: Sequence[MicroBatch]) -> int:
    rows = sum(batch.example_count for batch in batches)
    if not rows:
        raise DataError("the batches hold no rows; give at least one")
    return rows


def mean_gradient(
    engine: ClippedSumEngine,
    batches: Sequence[MicroBatch],
    clip: FlatClip | None = None,
    support: Support | None = None,
) -> Tensor:
    """The mean gradient over units as a d-vector, float64; clipped if a clip is given, zero off the support.

    TP-TopK calls it G (Sec. 5, clipped, all data) or the diagnostic gradient (Sec. 7.4, unclipped, held-out batches).
    """
    units = _count_units(batches)
    active = Support.full(engine.layout.dimension) if support is None else support
    total = engine.clipped_sum(batches, ClippedSumQuery(active, clip or UNCLIPPED)).cpu()
    return active.scatter(total / units)


@final
@dataclass(frozen=True, slots=True, eq=False)
class ClippingReport:
    """What clipping does to the gradients of some units on a support."""

    bias: float  # `||b||`, the norm of mean clipped less mean unclipped gradient (TP-TopK, Sec. 6.1)
    bias_bound: float  # what Lemma 6.4 bounds it by
    unit_variance: (
        float  # tau^2, the variance of one unit's clipped gradient; over B it is that of a batch's mean
    )
    energy: float  # squared norm of the mean unclipped gradient on the support
    norms: Tensor = field(repr=False)  # each unit's gradient norm on the support, before clipping


def clipping_report(
    engine: ClippedSumEngine, batches: Sequence[MicroBatch], support: Support, clip: FlatClip
) -> ClippingReport:
    """Clipping bias, its bound and the spread of clipped gradients, unit by unit.

    **Edge cases.** The engines clip to a little less than C (`ROUNDING_MARGIN`); so does the bound. Gradients that
    are not finite count as zero.
    """
    units = _count_units(batches)
    effective = clip.norm / (1 + ROUNDING_MARGIN)
    plain = torch.zeros(support.size, dtype=torch.float64)
    clipped, squares, norms = torch.zeros_like(plain), 0.0, []
    for gradient in _each_unit(engine, batches, support):
        norm = float(torch.linalg.vector_norm(gradient))
        kept = gradient * min(1.0, effective / norm) if norm else gradient
        plain += gradient
        clipped += kept
        squares += float(kept @ kept)
        norms.append(norm)
    plain, clipped, found = plain / units, clipped / units, torch.tensor(norms, dtype=torch.float64)
    return ClippingReport(
        bias=float(torch.linalg.vector_norm(clipped - plain)),
        bias_bound=clipping_bias_bound(found, effective),
        unit_variance=max(0.0, squares / units - float(clipped @ clipped)),
        energy=float(plain @ plain),
        norms=found,
    )


def projected_deviations(
    engine: ClippedSumEngine, batches: Sequence[MicroBatch], public: PublicRandomness
) -> Tensor:
    """Each unit's deviation from the mean gradient, on two random directions: `[units, 2]` (RS, App. F)."""
    full = Support.full(engine.layout.dimension)
    directions = torch.stack([public.normal(full.dimension, (axis,)) for axis in range(2)], dim=1)
    directions /= torch.linalg.vector_norm(directions, dim=0)
    each = _each_unit(engine, batches, full)
    points = torch.stack([gradient @ directions for gradient in each])
    return points - points.mean(dim=0)


def deviations(engine: ClippedSumEngine, batches: Sequence[MicroBatch], most: int) -> tuple[Tensor, Tensor]:
    """The mean gradient of the first `most` units and each one's deviation from it: a d-vector and `[units, d]`.

    It takes 8 bytes for each unit and coordinate.
    """
    full, few = Support.full(engine.layout.dimension), min(most, _count_units(batches))
    each = _each_unit(engine, batches, full)
    gradients = torch.stack(list(islice(each, few)))
    mean = gradients.mean(dim=0)
    return (mean, gradients - mean)


def asymmetry_p_value(points: Tensor, public: PublicRandomness, flips: int = 999) -> float:
    """A sign-flip test of symmetry about zero: small when the points' third moments are larger than flips give.

    Flipping the sign of each point at random leaves a symmetric distribution as it is, so the p-value is exact but
    for the centring of the points.
    """
    cubes, _ = _cubes(points)
    seen = float(torch.linalg.vector_norm(cubes.sum(dim=0)))
    return (1 + int((_flipped(cubes, public, 2, flips) >= seen).sum())) / (1 + flips)


def _each_unit(engine: ClippedSumEngine, batches: Sequence[MicroBatch], support: Support) -> Iterator[Tensor]:
    """One unclipped gradient per unit, on the support, float64, on the CPU."""
    query = ClippedSumQuery(support, UNCLIPPED)
    for batch in batches:
        for single in _single_units(batch):
            yield engine.clipped_sum([single], query).cpu()


def _single_units(batch: MicroBatch) -> Iterator[MicroBatch]:
    if batch.example_count == 0:
        return
    if batch.units is None:
        edges = list(range(batch.example_count + 1))
    else:
        edges = [0, *torch.bincount(batch.units).cumsum(0).tolist()]
    for start, stop in pairwise(edges):
        units = None if batch.units is None else torch.zeros(stop - start, dtype=torch.int64)
        yield MicroBatch(slice_batch(batch.rows, slice(start, stop)), units, batch.seed)


def _count_units(batches: Sequence[MicroBatch]) -> int:
    counts = [
        b.example_count if b.units is None or not b.example_count else int(b.units[-1]) + 1 for b in batches
    ]
    if not sum(counts):
        raise DataError("the batches hold no rows; give at least one")
    return sum(counts)


def held_out(split: Split, units: int, size: int, seed: int) -> list[MicroBatch]:
    """Random held-out units in micro-batches of `size`; a unit brings all its rows, and counts as their mean."""
    public = PublicRandomness(seed)
    if split.units is None:
        chosen = public.permutation(len(split), (HELD_OUT,))[:units]
        return [MicroBatch(split.rows_at(part)) for part in torch.split(chosen, size)]
    owner = torch.unique(split.units, return_inverse=True)[1]
    order = public.permutation(int(owner.max()) + 1, (HELD_OUT,))[:units]
    by_owner = torch.argsort(owner, stable=True)
    counts = torch.bincount(owner)
    ends = counts.cumsum(0)
    batches = []
    for part in torch.split(order, size):
        rows = torch.cat([by_owner[int(ends[u] - counts[u]) : int(ends[u])] for u in part])
        numbers = torch.repeat_interleave(torch.arange(len(part)), counts[part])
        batches.append(MicroBatch(split.rows_at(rows), numbers))
    return batches
