"""What a checkpoint holds of a run, typed: the one place that knows its names there."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Self

from torch import Tensor

from sparsedp._files import Json
from sparsedp.methods import ControllerState
from sparsedp.parameters import Layout, Support
from sparsedp.runs.checkpoint import Checkpoint
from sparsedp.runs.history import EpochReport, History, SupportSpan


@dataclass(frozen=True, slots=True)
class AverageState:
    """A running average of the weights.

    Attributes:
        weights: of every trainable parameter.
        updates: how often it was moved.
        moved: the coordinates in which it may differ from the weights; None for all.
    """

    weights: Mapping[str, Tensor]
    updates: int
    moved: Tensor | None


@dataclass(frozen=True, slots=True)
class LearnerState:
    """Everything that a release moves, between two steps.

    Attributes:
        model: parameters and buffers.
        optimizer: its own, whatever that holds.
        scheduler: its own; None without one.
        average: of the weights; None if none is kept.
        controller: the method's.
    """

    model: Mapping[str, Tensor]
    optimizer: Mapping[str, Any]
    scheduler: Mapping[str, Any] | None
    average: AverageState | None
    controller: ControllerState

    @classmethod
    def of(cls, checkpoint: Checkpoint) -> Self:
        """What a checkpoint kept."""
        state = checkpoint.state
        average, controller = state["average"], state["controller"]
        return cls(
            state["model"],
            state["optimizer"],
            state["scheduler"],
            None if average is None else AverageState(**average),
            ControllerState(controller["tensors"], controller["values"]),
        )


def checkpoint_of(
    step: int, identity: Mapping[str, Json], learner: LearnerState, history: History
) -> Checkpoint:
    """The state of a run after some steps."""
    average, controller = learner.average, learner.controller
    state = {
        "model": dict(learner.model),
        "optimizer": learner.optimizer,
        "scheduler": learner.scheduler,
        "average": average and {name: getattr(average, name) for name in average.__slots__},
        "controller": {"tensors": dict(controller.tensors), "values": dict(controller.values)},
        "journal": history_state(history),
    }
    return Checkpoint(step, identity, state)


def cut_in_blocks(checkpoint: Checkpoint) -> Checkpoint:
    """The same with a word that batches are cut for several ranks: a run goes on as it was begun."""
    return replace(checkpoint, state={**checkpoint.state, "cut": "blocks"})


def is_cut_in_blocks(checkpoint: Checkpoint) -> bool:
    """Whether its run's batches are cut for several ranks."""
    return checkpoint.state.get("cut") == "blocks"


def history_state(history: History) -> dict[str, Any]:
    """What a checkpoint keeps of a run so far."""
    return {
        "epochs": [report.to_json() for report in history.epochs],
        "spans": [span.to_json() for span in history.spans],
        "support": history.support.indices,
    }


def history_of(checkpoint: Checkpoint, layout: Layout) -> History:
    """What a checkpoint knows of its run so far."""
    saved = checkpoint.state["journal"]
    return History(
        layout,
        [EpochReport.from_json(value) for value in saved["epochs"]],
        [SupportSpan.from_json(value) for value in saved["spans"]],
        Support(saved["support"], layout.dimension),
    )
