"""The losses and gradients of any model's examples, slowly: the executable specification of the fast engine."""

from __future__ import annotations

from collections.abc import Iterable
from hashlib import blake2b

import torch
from torch import Tensor, nn

from sparsedp.batch import Batch, LossFunction, MicroBatch, example_count, slice_batch, to_device
from sparsedp.clipping import LayerClip
from sparsedp.grad_sample.isolation import Isolated, fork_draws, isolated_losses
from sparsedp.grad_sample.query import ClippedSumQuery, group_of_coordinates, mean_per_unit, sum_clipped_rows
from sparsedp.parameters import ParameterLayout, widest_dtype
from sparsedp.randomness import SEED_BYTES

AT_ONCE = 32
"""Examples whose losses are computed together."""


class ReferenceEngine:
    """Computes every example's gradient in full, then the query word for word.

    All examples at once, each with a copy of the parameters, where PyTorch can vectorise model and loss.
    """

    def __init__(self, model: nn.Module, loss: LossFunction) -> None:
        self._model, self._loss = model, loss
        self.layout = ParameterLayout.of(model)
        self._isolated = Isolated(model, loss)

    def clipped_sum(self, batches: Iterable[MicroBatch], query: ClippedSumQuery) -> Tensor:
        device = self.layout.parameters(self._model)[0].device
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
            counts = {name: len(places) for name, places in query.support.split(self.layout).items()}
            groups = group_of_coordinates(query.clip, counts, gradients.device)
        return sum_clipped_rows(mean_per_unit(gradients, units), query, groups)

    def gradients(self, rows: Batch) -> Tensor:
        """The [n, d] matrix of per-example gradients, in float32 or wider."""
        with torch.enable_grad():
            parameters = self.layout.parameters(self._model)
            if self._isolated.in_turn(rows):
                return torch.cat([_in_one(parameters, one, 1) for one in self._isolated.losses_in_turn(rows)])
            count = example_count(rows)
            copies = {
                slot.name: p.detach().expand(count, *p.shape).requires_grad_()
                for slot, p in zip(self.layout, parameters, strict=True)
            }
            losses = isolated_losses(self._model, self._loss, rows, copies)
            return _in_one([*copies.values()], losses, count)


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


class ExampleLosses:
    """Computes the losses of a micro-batch, [n], which a private training loss is summed from. Private.

    Formal guarantees: the loss of an example is a function of the example, the parameters and the random numbers
    drawn for it, which are not those of its gradient: in chunks of another size, those would be another example's.
    """

    def __init__(self, model: nn.Module, loss: LossFunction) -> None:
        self._model, self._loss = model, loss
        self._isolated = Isolated(model, loss)

    def __call__(self, batch: MicroBatch) -> Tensor:
        device = next(self._model.parameters()).device
        key = batch.seed
        seed = None if key is None else blake2b(b"losses", key=key, digest_size=SEED_BYTES).digest()
        # With gradients, as in a step: without, some of PyTorch's layers run kernels that cannot be vectorised.
        with fork_draws(seed, device), torch.enable_grad():
            rows = to_device(batch.rows, device)
            if self._isolated.in_turn(rows):
                found = [one.detach() for one in self._isolated.losses_in_turn(rows)]
            else:
                starts = range(0, batch.example_count, AT_ONCE)
                parts = (slice_batch(rows, slice(start, start + AT_ONCE)) for start in starts)
                found = [isolated_losses(self._model, self._loss, part).detach() for part in parts]
            return torch.cat(found)
