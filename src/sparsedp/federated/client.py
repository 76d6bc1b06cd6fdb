"""A client's part of a round: take the task, train on its own data, send a clipped vector of integers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast, final

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

from sparsedp.batch import PerExampleLoss, example_count, per_sample_loss, to_device, validate_losses
from sparsedp.errors import ModelError, SparseDPError
from sparsedp.federated.messages import ClientTask, model_digest
from sparsedp.grad_sample.query import ClippedSumQuery, keep_largest
from sparsedp.loading import Collate, fetch_rows
from sparsedp.parameters import ParameterLayout, Support
from sparsedp.privacy.queries import on_grid
from sparsedp.randomness import PublicRandomness, fork_generators

LocalTraining = Callable[[nn.Module, ParameterLayout, Support, int], Tensor]
"""What a client does with its data, of model, layout, support and step: anything, as only the clipped, noised sum is
released. It returns k numbers in the place of a gradient, along which the server *descends*. Private."""


@final
@dataclass(frozen=True, slots=True)
class Client:
    """Answers tasks, and keeps nothing between them.

    Formal guarantees:
        It clips before it sends, so its own protection rests on no other client; the server clips again.

    Attributes:
        make_model: builds the model that the server trains; weights come from the server, frozen parts must be equal.
        training: what to do with the client's data.
    """

    make_model: Callable[[], nn.Module]
    training: LocalTraining

    def answer(self, task: ClientTask) -> Tensor:
        """Train, and return the update: standardized, cut to the largest, clipped, rounded to the grid."""
        model = self.make_model()
        layout = ParameterLayout.of(model)
        if model_digest(model, layout) != task.model:
            raise ModelError(
                "the client's model is not the server's: got other trainable parameters, or frozen weights or "
                "buffers of other values; build both by one function, and load frozen weights from one file"
            )
        layout.write(model, task.weights)
        model.train()
        learned = self.training(model, layout, task.support, task.step)
        query = ClippedSumQuery(task.support, task.clip, task.geometry, task.top)
        z = task.geometry.forward(learned.detach().to("cpu", torch.float64))
        z = keep_largest(z.unsqueeze(0), query.kept_per_unit).squeeze(0)
        return on_grid(z, task.clip, task.grid).to(task.dtype)


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class LocalSGD:
    """Plain SGD on the client's data, whose update is the mean of the gradients on its way.

    So the server's learning rate means what it means centrally, and one step on all examples is one central step.

    Edge cases:
        A client without examples sends zero. Buffers (running statistics) that move are thrown away.

    Attributes:
        dataset: the client's own examples, map-style.
        loss: a criterion on (output, target) with `reduction="none"`, or `PerExampleLoss(...)`.
        steps: how many.
        lr: their learning rate.
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
        if self.steps < 1:
            raise SparseDPError(f"LocalSGD: got steps={self.steps}, expected 1 or more")

    def __call__(self, model: nn.Module, layout: ParameterLayout, support: Support, step: int) -> Tensor:
        """Return the mean gradient along the way, on the support, in float64."""
        total = torch.zeros(support.size, dtype=torch.float64)
        rows = len(cast("Any", self.dataset))
        if rows == 0:
            return total
        public = PublicRandomness.fresh() if self.seed is None else PublicRandomness(self.seed)
        device = next(model.parameters()).device
        weights = layout.flatten(model).cpu()
        with fork_generators(public.generator_seed((step,)), device):
            for number in range(self.steps):
                gradient = self._gradient(model, layout, self._batch(rows, number, step, public), support)
                total += gradient
                if number + 1 < self.steps:
                    weights.index_add_(0, support.indices, -self.lr * gradient.to(weights))
                    layout.write(model, weights)
        return total / self.steps

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
