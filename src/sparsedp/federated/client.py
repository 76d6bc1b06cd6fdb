"""A client's part of a round: take the task, train at home, send a clipped vector of integers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import final

import torch
from torch import Tensor, nn

from sparsedp.core.errors import ModelError, SparseDPError
from sparsedp.core.layout import Layout
from sparsedp.core.support import Support
from sparsedp.federated.local import LocalCounting, LocalTraining
from sparsedp.federated.task import CountAsked, Task
from sparsedp.federated.weights import model_digest, write_weights
from sparsedp.grad_sample.query import Query, keep_largest
from sparsedp.privacy.updates import on_grid


class NothingHeldError(SparseDPError):
    """The client does not hold the weights that the task builds on: it was away, or has lost its state."""


@final
@dataclass(frozen=True, slots=True, eq=False)
class Held:
    """What a client keeps between rounds: public values from the server.

    Attributes:
        run: the run's plan.
        period: the support's number.
        weights: all d, as they stood when the period began.
        support: the period's.
    """

    run: str
    period: int
    weights: Tensor
    support: Support


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

    def answer(self, task: Task, held: Held | None) -> tuple[Tensor, Held]:
        """The update or count, a vector of integers, and what to keep for the next round.

        Raises:
            NothingHeldError: the task builds on weights that this client does not have.
            ModelError: the client's model is not the server's.
            SparseDPError: a count is asked for, and the client's training has none.
        """
        held = _up_to_date(task, held)
        model = self.make_model()
        layout = Layout.of(model)
        if model_digest(model, layout) != task.model:
            raise ModelError(
                "the client's model is not the server's: got other trainable parameters, or frozen weights or "
                "buffers of other values; build both by one function, and load frozen weights from one file"
            )
        write_weights(model, layout, Support.full(layout.dimension), held.weights)
        if task.active is not None:
            write_weights(model, layout, held.support, task.active)
        model.train()
        if task.asked is not None:
            counted = self._counted(model, layout, task.asked, task.step)
            return on_grid(counted, task.clip, task.grid).to(task.integers), held
        learned = self.training(model, layout, held.support, task.step)
        return self._clipped(task, held.support, learned).to(task.integers), held

    def _counted(self, model: nn.Module, layout: Layout, asked: CountAsked, step: int) -> Tensor:
        if not isinstance(self.training, LocalCounting):
            raise SparseDPError(
                f"the round asks for a count of rows, and {type(self.training).__name__} has none; give the client's "
                "training a method `count`, as LocalSGD has, or choose a method without a selection"
            )
        return self.training.count(model, layout, asked, step)

    def _clipped(self, task: Task, support: Support, learned: Tensor) -> Tensor:
        """Standardize, keep the largest, clip, round to the grid: a central step's order."""
        query = Query(support, task.clip, task.geometry, task.top)
        z = query.geometry.forward(learned.detach().to("cpu", torch.float64))
        z = keep_largest(z.unsqueeze(0), query.kept_per_unit).squeeze(0)
        return on_grid(z, task.clip, task.grid)


def _up_to_date(task: Task, held: Held | None) -> Held:
    if task.base is not None:
        return Held(task.run, task.period, task.base.weights, task.base.support)
    if held is None or (held.run, held.period) != (task.run, task.period):
        raise NothingHeldError(
            f"step {task.step} builds on weights of period {task.period}, which this client does not hold; it waits "
            "for the next round, when the server sends them"
        )
    if task.moved is not None:
        return replace(held, support=Support(task.moved, held.weights.numel()))
    return held
