"""A client's part of a round: take the task, train on its own data, send a clipped vector of integers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol, cast, final, runtime_checkable

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

from sparsedp.batch import PerExampleLoss, example_count, per_sample_loss, to_device, validate_losses
from sparsedp.errors import ModelError, SparseDPError
from sparsedp.federated.messages import ClientTask, model_digest
from sparsedp.grad_sample.query import ClippedSumQuery, keep_largest
from sparsedp.grad_sample.selection import EmbeddingRowCounter
from sparsedp.loading import Collate, fetch_rows, rows_in_order
from sparsedp.methods.ranking import TableRows
from sparsedp.optimizers.places import places_in
from sparsedp.parameters import ParameterLayout, Support
from sparsedp.privacy.queries import on_grid
from sparsedp.randomness import PublicRandomness, fork_generators

ROWS_AT_ONCE = 256
"""Examples that a count looks at together."""


class LocalTraining(Protocol):
    """What a client does with its data: anything, as only the clipped, noised sum over clients is released."""

    def __call__(self, model: nn.Module, layout: ParameterLayout, support: Support, step: int) -> Tensor:
        """Return k numbers in the place of a gradient, along which the server *descends*. Private."""
        ...


@runtime_checkable
class LocalCounting(Protocol):
    """What a client answers in a round that counts, for methods that choose rows by it (`fest`, `adafest`)."""

    def count(self, model: nn.Module, layout: ParameterLayout, tables: tuple[str, ...], step: int) -> Tensor:
        """Return for each row of the tables 1 if the client uses it, else 0. Private."""
        ...


@final
@dataclass(frozen=True, slots=True)
class Client:
    """Answers tasks, and keeps nothing between them.

    Formal guarantees:
        It clips before it sends, so its own protection rests on no other client; the server clips again.

    Attributes:
        make_model: builds the model that the server trains; weights come from the server, frozen parts must be equal.
        training: what to do with the client's data. For methods that count rows it also has `count`, as `LocalSGD`
            does.
    """

    make_model: Callable[[], nn.Module]
    training: LocalTraining

    def answer(self, task: ClientTask) -> Tensor:
        """Return the update or count, a vector of integers."""
        model = self.make_model()
        layout = ParameterLayout.of(model)
        if model_digest(model, layout) != task.model:
            raise ModelError(
                "the client's model is not the server's: got other trainable parameters, or frozen weights or "
                "buffers of other values; build both by one function, and load frozen weights from one file"
            )
        write_weights(model, layout, Support.full(layout.dimension), task.weights)
        model.train()
        if task.count is not None:
            return on_grid(self._counted(model, layout, task.count, task.step), task.clip, task.grid).to(
                task.dtype
            )
        learned = self.training(model, layout, task.support, task.step)
        return self._clipped(task, learned).to(task.dtype)

    def _counted(
        self, model: nn.Module, layout: ParameterLayout, tables: tuple[str, ...], step: int
    ) -> Tensor:
        if not isinstance(self.training, LocalCounting):
            raise SparseDPError(
                f"the round asks for a count of rows, and {type(self.training).__name__} has none; give the client's "
                "training a method `count`, as LocalSGD has, or choose a method without a selection"
            )
        return self.training.count(model, layout, tables, step)

    def _clipped(self, task: ClientTask, learned: Tensor) -> Tensor:
        """Standardize, keep the largest, clip, round to the grid: in the order of a central step."""
        query = ClippedSumQuery(task.support, task.clip, task.geometry, task.top)
        z = query.geometry.forward(learned.detach().to("cpu", torch.float64))
        z = keep_largest(z.unsqueeze(0), query.kept_per_unit).squeeze(0)
        return on_grid(z, task.clip, task.grid)


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class LocalSGD:
    """Plain SGD on the client's data, whose update is the mean of the gradients on its way.

    So the server's learning rate means what it means centrally, and one step on all examples is one central step.

    Formal guarantees:
        It needs none of its own: the client is the unit, and what it sends is clipped as a whole.

    Edge cases:
        A client without examples sends zero. Buffers (running statistics) that move are thrown away.

    Attributes:
        dataset: the client's own examples, map-style.
        loss: a criterion on (output, target) with `reduction="none"`, or `PerExampleLoss(...)`.
        steps: how many.
        lr: the learning rate of those.
        batch_size: examples of each step, in a new random order each pass; None for all.
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

    def __call__(self, model: nn.Module, layout: ParameterLayout, support: Support, step: int) -> Tensor:
        """Return the mean gradient along the way, on the support, in float64."""
        total = torch.zeros(support.size, dtype=torch.float64)
        rows = len(cast("Any", self.dataset))
        if rows == 0:
            return total
        public = PublicRandomness.fresh() if self.seed is None else PublicRandomness(self.seed)
        device = next(model.parameters()).device
        weights = support.gather(layout.flatten(model).cpu())
        with fork_generators(public.generator_seed((step,)), device):
            for number in range(self.steps):
                gradient = self._gradient(model, layout, self._batch(rows, number, step, public), support)
                total += gradient
                if number + 1 < self.steps:
                    weights = weights - self.lr * gradient.to(weights)
                    write_weights(model, layout, support, weights)
        return total / self.steps

    def count(self, model: nn.Module, layout: ParameterLayout, tables: tuple[str, ...], step: int) -> Tensor:
        """Return the rows of tables that any of its examples uses."""
        slots = {slot.name: slot for slot in layout}
        total = TableRows(tuple(slots[name] for name in tables)).total
        found = torch.zeros(total, dtype=torch.float64)
        rows = len(cast("Any", self.dataset))
        if rows == 0 or total == 0:
            return found
        public = PublicRandomness.fresh() if self.seed is None else PublicRandomness(self.seed)
        parts = rows_in_order(self.dataset, rows, ROWS_AT_ONCE, self.collate)
        with fork_generators(public.generator_seed((step, 1)), next(model.parameters()).device):
            used = EmbeddingRowCounter(model, per_sample_loss(self.loss), tables)
            for part in parts:
                found[used.pairs(part)[1]] = 1
        return found

    def _batch(self, rows: int, number: int, step: int, public: PublicRandomness) -> Any:
        size = min(self.batch_size or rows, rows)
        a_pass = rows // size
        order = public.permutation(rows, (step, number // a_pass)) if size < rows else torch.arange(rows)
        start = number % a_pass * size
        return fetch_rows(self.dataset, order[start : start + size].numpy(), self.collate)

    def _gradient(self, model: nn.Module, layout: ParameterLayout, rows: Any, support: Support) -> Tensor:
        parameters = layout.parameters(model)
        rows = to_device(rows, parameters[0].device)
        with torch.enable_grad():
            losses = validate_losses(per_sample_loss(self.loss)(model, rows), example_count(rows))
            found = torch.autograd.grad(losses.mean(), parameters, allow_unused=True, materialize_grads=True)
        flat = torch.cat([one.detach().reshape(-1).cpu().to(torch.float64) for one in found])
        return support.gather(flat)


@torch.no_grad()
def write_weights(model: nn.Module, layout: ParameterLayout, support: Support, values: Tensor) -> None:
    """Put k values into the support's weights, and leave every other one alone."""
    split, start = support.split(layout), 0
    for slot, parameter in zip(layout, layout.parameters(model), strict=True):
        places = places_in(split[slot.name], slot.shape, parameter.device)
        count = split[slot.name].numel()
        own = values[start : start + count].to(parameter)
        places.write(parameter, own.reshape(places.shape))
        start += count
