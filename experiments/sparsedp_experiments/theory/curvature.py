"""Smoothness by power iteration on Hessian-vector products of the mean loss. All results are `NonPrivate`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor, nn

from sparsedp.batch import MicroBatch, PerSampleLoss, check_losses, to_device
from sparsedp.errors import DataError, SparseDPError
from sparsedp.parameters import Layout
from sparsedp.randomness import PublicRandomness
from sparsedp_experiments.theory.nonprivate import NonPrivate


def mean_loss(model: nn.Module, loss: PerSampleLoss, batches: Sequence[MicroBatch]) -> NonPrivate[float]:
    """The mean loss over rows, without noise."""
    rows = _count_rows(batches)
    device = next(model.parameters()).device
    with torch.no_grad():
        total = sum(
            float(check_losses(loss(model, to_device(b.rows, device)), b.row_count).double().sum())
            for b in batches
            if b.row_count
        )
    return NonPrivate(total / rows, f"the loss of {rows} rows")


def hessian_vector(
    model: nn.Module, loss: PerSampleLoss, batches: Sequence[MicroBatch], vector: Tensor
) -> NonPrivate[Tensor]:
    """The Hessian of the mean loss over rows, times a d-vector; float64."""
    rows = _count_rows(batches)
    return NonPrivate(_product(model, loss, batches, vector, rows), f"second derivatives over {rows} rows")


@final
@dataclass(frozen=True, slots=True)
class Smoothness:
    """The largest magnitude of a Hessian eigenvalue at one point: the smoothness the loss shows there.

    Attributes:
        value: the estimate; from below, so the true one may be larger.
        residual: `||Hv - (v.Hv) v||`: some eigenvalue lies within it of the Rayleigh quotient.
        iterations: how many products it took.
    """

    value: float
    residual: float
    iterations: int


def smoothness(
    model: nn.Module,
    loss: PerSampleLoss,
    batches: Sequence[MicroBatch],
    public: PublicRandomness,
    *,
    iterations: int = 50,
    tolerance: float = 1e-3,
    progress: Callable[[int, int], None] | None = None,
) -> NonPrivate[Smoothness]:
    """Power iteration from a random start, until the estimate moves by less than `tolerance` of itself.

    `progress` is called with (done, at most) after each product.

    **Edge cases.** A loss without curvature has smoothness 0.
    """
    if iterations < 1:
        raise SparseDPError(f"iterations: got {iterations}, expected at least 1")
    rows = _count_rows(batches)
    vector = public.normal(Layout.of(model).dimension, (0,))
    vector /= torch.linalg.vector_norm(vector)
    value, residual, done = 0.0, 0.0, 0
    while done < iterations:
        done += 1
        product = _product(model, loss, batches, vector, rows)
        before, value = value, float(torch.linalg.vector_norm(product))
        residual = float(torch.linalg.vector_norm(product - (vector @ product) * vector))
        if progress is not None:
            progress(done, iterations)
        if value == 0 or abs(value - before) <= tolerance * value:
            break
        vector = product / value
    return NonPrivate(Smoothness(value, residual, done), f"second derivatives over {rows} rows")


def _product(
    model: nn.Module, loss: PerSampleLoss, batches: Sequence[MicroBatch], vector: Tensor, rows: int
) -> Tensor:
    layout = Layout.of(model)
    if vector.shape != (layout.dimension,):
        raise SparseDPError(f"vector: got shape {tuple(vector.shape)}, expected d={layout.dimension} numbers")
    parameters = layout.parameters(model)
    direction = [
        vector[slot.span].reshape(slot.shape).to(p) for slot, p in zip(layout, parameters, strict=True)
    ]
    total = torch.zeros(layout.dimension, dtype=torch.float64)
    for batch in batches:
        if not batch.row_count:
            continue
        losses = check_losses(loss(model, to_device(batch.rows, parameters[0].device)), batch.row_count)
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
    rows = sum(batch.row_count for batch in batches)
    if not rows:
        raise DataError("the batches hold no rows; give at least one")
    return rows
