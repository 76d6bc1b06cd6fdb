"""A client's part of a round: take the task, train at home, send a clipped vector of integers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor, nn

from sparsedp.errors import ModelError, SparseDPError
from sparsedp.federated.local import LocalCounting, LocalTraining
from sparsedp.federated.task import CountAsked, Task
from sparsedp.federated.weights import model_digest, write_weights
from sparsedp.grad_sample.query import Query, keep_largest
from sparsedp.parameters import Layout, Support
from sparsedp.privacy.queries import on_grid


@final
@dataclass(frozen=True, slots=True)
class Client:
    """Answers tasks.

    **Privacy.** It clips before it sends, so its own protection rests on no other client; the server clips again.

    Attributes:
        make_model: builds the model that the server trains; weights come from the server, frozen parts must be equal.
        training: what to do with the client's data. For methods that count rows it also has `count`, as
            `LocalSGD` does.
    """

    make_model: Callable[[], nn.Module]
    training: LocalTraining

    def answer(self, task: Task) -> Tensor:
        """The update or count, a vector of integers.

        Raises:
            ModelError: the client's model is not the server's.
            SparseDPError: a count is asked for, and the client's training has none.
        """
        model = self.make_model()
        layout = Layout.of(model)
        if model_digest(model, layout) != task.model:
            raise ModelError(
                "the client's model is not the server's: got other trainable parameters, or frozen weights or "
                "buffers of other values; build both by one function, and load frozen weights from one file"
            )
        write_weights(model, layout, Support.full(layout.dimension), task.weights)
        model.train()
        if task.asked is not None:
            counted = self._counted(model, layout, task.asked, task.step)
            return on_grid(counted, task.clip, task.grid).to(task.integers)
        learned = self.training(model, layout, task.support, task.step)
        return self._clipped(task, learned).to(task.integers)

    def _counted(self, model: nn.Module, layout: Layout, asked: CountAsked, step: int) -> Tensor:
        if not isinstance(self.training, LocalCounting):
            raise SparseDPError(
                f"the round asks for a count of rows, and {type(self.training).__name__} has none; give the client's "
                "training a method `count`, as LocalSGD has, or choose a method without a selection"
            )
        return self.training.count(model, layout, asked, step)

    def _clipped(self, task: Task, learned: Tensor) -> Tensor:
        """Standardize, keep the largest, clip, round to the grid: a central step's order."""
        query = Query(task.support, task.clip, task.geometry, task.top)
        z = query.geometry.forward(learned.detach().to("cpu", torch.float64))
        z = keep_largest(z.unsqueeze(0), query.kept_per_unit).squeeze(0)
        return on_grid(z, task.clip, task.grid)
