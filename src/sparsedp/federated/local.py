"""Training at a client: a few steps of SGD on its own data, on the support; and what its data has to do with."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol, cast, final, runtime_checkable

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

from sparsedp.batch import PerExampleLoss, check_losses, per_sample_loss, row_count, to_device
from sparsedp.errors import SparseDPError
from sparsedp.federated.task import CountAsked
from sparsedp.federated.weights import write_weights
from sparsedp.grad_sample.selection import EmbeddingRowCounter
from sparsedp.loading import Collate, fetch_rows, rows_in_order
from sparsedp.methods.ranking import TableRows
from sparsedp.parameters import Layout, Support
from sparsedp.randomness import PublicRandomness, own_generators

ROWS_AT_ONCE = 256
"""Rows that a count looks at together."""


class LocalTraining(Protocol):
    """What a client does with its data: anything, as only the clipped, noised sum over clients is released."""

    def __call__(self, model: nn.Module, layout: Layout, support: Support, step: int) -> Tensor:
        """What was learned, in the place of a gradient: k numbers along which the server *descends*. Private."""
        ...


@runtime_checkable
class LocalCounting(Protocol):
    """What a client says in a round that counts, for methods that choose rows by it (`fest`, `adafest`)."""

    def count(self, model: nn.Module, layout: Layout, asked: CountAsked, step: int) -> Tensor:
        """For each row that is asked for 1 if the client touches it, else 0. Private."""
        ...


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class LocalSGD:
    """Plain SGD, whose update is the mean of the gradients on its way: how far it went, over `steps * lr`.

    So the server's learning rate means what it means centrally, and one step on all rows is one central step.

    **Privacy.** Needs none of its own: the client is the unit, and what it sends is clipped as a whole.
    **Edge cases.** A client without rows sends zero. Buffers (running statistics) that move are thrown away.

    Attributes:
        dataset: the client's own rows, map-style.
        loss: a criterion on (output, target) with `reduction="none"`, or `PerExampleLoss(...)`.
        steps: how many.
        lr: the learning rate of those.
        batch_size: rows of each step, in a new random order each pass; None for all.
        collate: as in a `DataLoader`.
        seed: of the order and of dropout; reproducible experiments only.
    """

    dataset: Dataset[Any]
    loss: Callable[[Any, Tensor], Tensor] | PerExampleLoss
    steps: int = 1
    lr: float = 0.1
    batch_size: int | None = None
    collate: Collate | None = None
    seed: int | None = None

    def __post_init__(self) -> None:
        if self.steps < 1 or not self.lr > 0 or (self.batch_size is not None and self.batch_size < 1):
            raise SparseDPError(
                f"LocalSGD: got steps={self.steps}, lr={self.lr}, batch_size={self.batch_size}, expected steps and "
                "batch_size >= 1 and lr > 0"
            )

    def __call__(self, model: nn.Module, layout: Layout, support: Support, step: int) -> Tensor:
        """The mean gradient along the way, on the support, in float64."""
        total = torch.zeros(support.size, dtype=torch.float64)
        rows = len(cast("Any", self.dataset))
        if rows == 0:
            return total
        public = PublicRandomness.fresh() if self.seed is None else PublicRandomness(self.seed)
        device = next(model.parameters()).device
        weights = support.gather(layout.flatten(model).cpu())
        with own_generators(public.generator_seed((step,)), device):
            for number in range(self.steps):
                gradient = self._gradient(model, layout, self._rows(rows, number, step, public), support)
                total += gradient
                if number + 1 < self.steps:
                    weights = weights - self.lr * gradient.to(weights)
                    write_weights(model, layout, support, weights)
        return total / self.steps

    def count(self, model: nn.Module, layout: Layout, asked: CountAsked, step: int) -> Tensor:
        """The rows of tables that any of its rows touches."""
        slots = {slot.name: slot for slot in layout}
        tables = TableRows(tuple(slots[name] for name in asked.parameters))
        found = torch.zeros(tables.total, dtype=torch.float64)
        rows = len(cast("Any", self.dataset))
        if rows == 0 or tables.total == 0:
            return found
        public = PublicRandomness.fresh() if self.seed is None else PublicRandomness(self.seed)
        parts = rows_in_order(self.dataset, rows, ROWS_AT_ONCE, self.collate)
        with own_generators(public.generator_seed((step, 1)), next(model.parameters()).device):
            look = EmbeddingRowCounter(model, per_sample_loss(self.loss), asked.parameters)
            for part in parts:
                found[look.pairs(part)[1]] = 1
        return found

    def _rows(self, rows: int, number: int, step: int, public: PublicRandomness) -> Any:
        size = min(self.batch_size or rows, rows)
        a_pass = rows // size
        order = public.permutation(rows, (step, number // a_pass)) if size < rows else torch.arange(rows)
        start = number % a_pass * size
        return fetch_rows(self.dataset, order[start : start + size].numpy(), self.collate)

    def _gradient(self, model: nn.Module, layout: Layout, rows: Any, support: Support) -> Tensor:
        parameters = layout.parameters(model)
        rows = to_device(rows, parameters[0].device)
        with torch.enable_grad():
            losses = check_losses(per_sample_loss(self.loss)(model, rows), row_count(rows))
            found = torch.autograd.grad(losses.mean(), parameters, allow_unused=True, materialize_grads=True)
        flat = torch.cat([one.detach().reshape(-1).cpu().to(torch.float64) for one in found])
        return support.gather(flat)
