"""The reference engine: per-example gradients, any model, slow. The executable specification of the fast one."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn

from sparsedp.batch import (
    Batch,
    LossFunction,
    MicroBatch,
    example_count,
    slice_batch,
    to_device,
    validate_losses,
)
from sparsedp.clipping import LayerClip
from sparsedp.grad_sample.isolation import (
    fixed_draws,
    fork_draws,
    isolated_losses,
    modes_of,
    why_not_isolated,
)
from sparsedp.grad_sample.query import ClippedSumQuery, group_of_coordinates, mean_per_unit, sum_clipped_rows
from sparsedp.parameters import ParameterLayout, widest_dtype


class ReferenceEngine:
    """Computes every example's gradient in full, then the query word for word.

    All examples at once, each alone with a copy of the parameters, where PyTorch can vectorise model and loss; else a
    loop over single examples. Which of the two is decided on made-up examples.
    """

    def __init__(self, model: nn.Module, loss: LossFunction) -> None:
        self._model, self._loss = model, loss
        self._layout = ParameterLayout.of(model)
        self._in_turn: dict[tuple[bool, ...], bool] = {}

    @property
    def layout(self) -> ParameterLayout:
        return self._layout

    def clipped_sum(self, batches: Iterable[MicroBatch], query: ClippedSumQuery) -> Tensor:
        device = self._layout.parameters(self._model)[0].device
        total = torch.zeros(query.support.size, dtype=torch.float64, device=device)
        for batch in batches:
            if batch.example_count:
                with fork_draws(batch.seed, device):
                    total += self.sum_of(to_device(batch.rows, device), batch.units, query)
        return total

    def sum_of(self, rows: Batch, units: Tensor | None, query: ClippedSumQuery) -> Tensor:
        """The clipped sum of some examples on the model's device, in draws of the caller's."""
        gradients = query.support.gather(self.gradients(rows))
        units = None if units is None else units.to(gradients.device)
        groups = None
        if isinstance(query.clip, LayerClip):
            counts = {name: len(places) for name, places in query.support.split(self._layout).items()}
            groups = group_of_coordinates(query.clip, counts, gradients.device)
        return sum_clipped_rows(mean_per_unit(gradients, units), query, groups)

    def gradients(self, rows: Batch) -> Tensor:
        """The [n, d] matrix of per-example gradients, in float32 or wider."""
        if (modes := modes_of(self._model)) not in self._in_turn:
            self._in_turn[modes] = why_not_isolated(self._model, self._loss, rows) is not None
        with torch.enable_grad():
            return self._one_by_one(rows) if self._in_turn[modes] else self._all_at_once(rows)

    def _all_at_once(self, rows: Batch) -> Tensor:
        count = example_count(rows)
        parameters = self._layout.parameters(self._model)
        copies = {
            slot.name: p.detach().expand(count, *p.shape).requires_grad_()
            for slot, p in zip(self._layout, parameters, strict=True)
        }
        losses = isolated_losses(self._model, self._loss, rows, copies)
        return _in_one([*copies.values()], losses, count)

    def _one_by_one(self, rows: Batch) -> Tensor:
        found = []
        for i in range(example_count(rows)):
            with fixed_draws(next(self._model.parameters()).device):
                losses = validate_losses(self._loss(self._model, slice_batch(rows, slice(i, i + 1))), 1)
            found.append(_in_one(self._layout.parameters(self._model), losses, 1))
        return torch.cat(found)


def _in_one(parameters: list[Tensor] | list[nn.Parameter], losses: Tensor, count: int) -> Tensor:
    """The gradients by these parameters, side by side [count, d]; zero where the loss does not depend on one."""
    found: list[Tensor | None] = [None] * len(parameters)
    if losses.requires_grad:
        found = list(torch.autograd.grad(losses.sum(), parameters, allow_unused=True))
    dtype, parts = widest_dtype(parameters), []
    for parameter, gradient in zip(parameters, found, strict=True):
        part = torch.zeros_like(parameter) if gradient is None else gradient.detach()
        parts.append((part.to_dense() if part.is_sparse else part).reshape(count, -1).to(dtype))
    return torch.cat(parts, dim=1)
