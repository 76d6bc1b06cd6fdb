"""Un-noised gradients, asked of the engines for looking only. Everything given back is `NonPrivate`.

The model is used as it is: call `model.eval()` first to leave dropout out.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice, pairwise
from typing import final

import torch
from torch import Tensor

from sparsedp.batch import MicroBatch, select_rows
from sparsedp.clipping import ROUNDING_MARGIN, Clip, FlatClip, NoClip
from sparsedp.errors import DataError
from sparsedp.grad_sample.query import Engine, Query
from sparsedp.parameters import Support
from sparsedp.randomness import PublicRandomness
from sparsedp_experiments.theory.convergence import clipping_bias_bound
from sparsedp_experiments.theory.criteria import energy_captured
from sparsedp_experiments.theory.nonprivate import NonPrivate

Progress = Callable[[int, int], None]
"""Called with (done, all) as work goes on."""


def mean_gradient(
    engine: Engine, batches: Sequence[MicroBatch], clip: Clip | None = None, support: Support | None = None
) -> NonPrivate[Tensor]:
    """The mean gradient over units as a d-vector, float64; clipped if a clip is given, zero off the support.

    TP-TopK calls it G (Sec. 5, clipped, all data) or the diagnostic gradient (Sec. 7.4, unclipped, held-out batches).
    """
    units = _count_units(batches)
    active = Support.full(engine.layout.dimension) if support is None else support
    total = engine.clipped_sum(batches, Query(active, clip or NoClip())).cpu()
    return NonPrivate(active.scatter(total / units), f"gradients of {units} units")


def oracle_capture(engine: Engine, batches: Sequence[MicroBatch], support: Support) -> NonPrivate[float]:
    """`alpha_oracle` (TP-TopK, Sec. 7.4): the share of true gradient energy on a support, on held-out batches."""
    return mean_gradient(engine, batches).map(lambda g: energy_captured(g**2, support))


@final
@dataclass(frozen=True, slots=True, eq=False)
class ClippingReport:
    """What clipping does to the gradients of some units on a support.

    Attributes:
        bias: `||b||`, the norm of mean clipped less mean unclipped gradient (TP-TopK, Sec. 6.1).
        bias_bound: what Lemma 6.4 bounds it by.
        unit_variance: tau^2, the variance of one unit's clipped gradient; over B it is that of a batch's mean.
        energy: squared norm of the mean unclipped gradient on the support.
        norms: each unit's gradient norm on the support, before clipping.
    """

    bias: float
    bias_bound: float
    unit_variance: float
    energy: float
    norms: Tensor = field(repr=False)


def clipping_report(
    engine: Engine,
    batches: Sequence[MicroBatch],
    support: Support,
    clip: FlatClip,
    progress: Progress | None = None,
) -> NonPrivate[ClippingReport]:
    """Clipping bias, its bound and the spread of clipped gradients, unit by unit.

    **Edge cases.** The engines clip to a little less than C (`ROUNDING_MARGIN`); so does the bound. Gradients that
    are not finite count as zero.
    """
    units = _count_units(batches)
    effective = clip.norm / (1 + ROUNDING_MARGIN)
    plain = torch.zeros(support.size, dtype=torch.float64)
    clipped, squares, norms = torch.zeros_like(plain), 0.0, []
    for gradient in _each_unit(engine, batches, support, progress):
        norm = float(torch.linalg.vector_norm(gradient))
        kept = gradient * min(1.0, effective / norm) if norm else gradient
        plain += gradient
        clipped += kept
        squares += float(kept @ kept)
        norms.append(norm)
    plain, clipped, found = plain / units, clipped / units, torch.tensor(norms, dtype=torch.float64)
    report = ClippingReport(
        bias=float(torch.linalg.vector_norm(clipped - plain)),
        bias_bound=clipping_bias_bound(found, effective),
        unit_variance=max(0.0, squares / units - float(clipped @ clipped)),
        energy=float(plain @ plain),
        norms=found,
    )
    return NonPrivate(report, f"gradients of {units} units")


def projected_deviations(
    engine: Engine,
    batches: Sequence[MicroBatch],
    public: PublicRandomness,
    progress: Progress | None = None,
) -> NonPrivate[Tensor]:
    """Each unit's deviation from the mean gradient, on two random directions: `[units, 2]` (RS, App. F)."""
    full = Support.full(engine.layout.dimension)
    directions = torch.stack([public.normal(full.dimension, (axis,)) for axis in range(2)], dim=1)
    directions /= torch.linalg.vector_norm(directions, dim=0)
    each = _each_unit(engine, batches, full, progress)
    points = torch.stack([gradient @ directions for gradient in each])
    return NonPrivate(points - points.mean(dim=0), f"gradients of {len(points)} units")


def deviations(
    engine: Engine, batches: Sequence[MicroBatch], most: int, progress: Progress | None = None
) -> NonPrivate[tuple[Tensor, Tensor]]:
    """The mean gradient of the first `most` units and each one's deviation from it: a d-vector and `[units, d]`.

    It takes 8 bytes for each unit and coordinate.
    """
    full, few = Support.full(engine.layout.dimension), min(most, _count_units(batches))
    each = _each_unit(engine, batches, full, None if progress is None else lambda i, _: progress(i, few))
    gradients = torch.stack(list(islice(each, few)))
    mean = gradients.mean(dim=0)
    return NonPrivate((mean, gradients - mean), f"gradients of {few} units")


def asymmetry_p_value(points: Tensor, public: PublicRandomness, flips: int = 999) -> float:
    """A sign-flip test of symmetry about zero: small when the points' third moments are larger than flips give.

    Flipping the sign of each point at random leaves a symmetric distribution as it is, so the p-value is exact but
    for the centring of the points.
    """
    cubes = points.double() * (points.double() ** 2).sum(dim=1, keepdim=True)
    seen = float(torch.linalg.vector_norm(cubes.sum(dim=0)))
    signs = torch.stack([public.normal(len(points), (2, flip)).sign() for flip in range(flips)])
    chance = torch.linalg.vector_norm(signs @ cubes, dim=1)
    return (1 + int((chance >= seen).sum())) / (1 + flips)


def _each_unit(
    engine: Engine, batches: Sequence[MicroBatch], support: Support, progress: Progress | None = None
) -> Iterator[Tensor]:
    """One unclipped gradient per unit, on the support, float64, on the CPU."""
    query, units = Query(support, NoClip()), _count_units(batches)
    singles = (single for batch in batches for single in _single_units(batch))
    for done, single in enumerate(singles, start=1):
        gradient = engine.clipped_sum([single], query).cpu()
        if progress is not None:
            progress(done, units)
        yield gradient


def _single_units(batch: MicroBatch) -> Iterator[MicroBatch]:
    if batch.row_count == 0:
        return
    if batch.units is None:
        edges = list(range(batch.row_count + 1))
    else:
        edges = [0, *torch.bincount(batch.units).cumsum(0).tolist()]
    for start, stop in pairwise(edges):
        units = None if batch.units is None else torch.zeros(stop - start, dtype=torch.int64)
        yield MicroBatch(select_rows(batch.rows, slice(start, stop)), units, batch.seed)


def _count_units(batches: Sequence[MicroBatch]) -> int:
    counts = [b.row_count if b.units is None or not b.row_count else int(b.units[-1]) + 1 for b in batches]
    if not sum(counts):
        raise DataError("the batches hold no rows; give at least one")
    return sum(counts)
