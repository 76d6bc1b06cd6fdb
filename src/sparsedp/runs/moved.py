"""A state between two full checkpoints: the values that moved since the last one, and what is small anyway."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from sparsedp.core.files import Json
from sparsedp.methods import ControllerState
from sparsedp.runs.checkpoint import Checkpoint
from sparsedp.runs.history import History
from sparsedp.runs.state import history_state

BASE = "base"
"""In the state: SHA-256 of the full checkpoint that the rest is to be put on."""


@dataclass(frozen=True, slots=True)
class Entries:
    """Some entries of named tensors: sorted flat places, and the values there."""

    places: Mapping[str, Tensor]
    values: Mapping[str, Tensor]

    def to_state(self) -> dict[str, Any]:
        """As a checkpoint keeps them."""
        return {"places": dict(self.places), "values": dict(self.values)}

    def put_on(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The tensors with these entries in them; the others are as they were, to the bit."""
        found = dict(tensors)
        for name, places in self.places.items():
            whole = tensors[name].clone()
            whole.view(-1)[places] = self.values[name].to(whole).reshape(-1)
            found[name] = whole
        return found


@dataclass(frozen=True, slots=True)
class MovedState:
    """What a learner has moved since the last full checkpoint.

    Attributes:
        model: entries of parameters.
        optimizer: its own, whatever that holds.
        scheduler: its own; None without one.
        average: entries of the average of the weights, how often it was moved, and all coordinates it ever held; None
            if none is kept.
        controller: the method's, without the tensors in `kept`.
        kept: names of the controller's tensors that are as they were.
    """

    model: Entries
    optimizer: Mapping[str, Any]
    scheduler: Mapping[str, Any] | None
    average: tuple[Entries, int, Tensor] | None
    controller: ControllerState
    kept: tuple[str, ...]


def moved_checkpoint(
    step: int, identity: Mapping[str, Json], learner: MovedState, history: History
) -> Checkpoint:
    """The state of a run after some steps, to be put on its last full one."""
    average = learner.average
    state = {
        "model": learner.model.to_state(),
        "optimizer": learner.optimizer,
        "scheduler": learner.scheduler,
        "average": average and {"weights": average[0].to_state(), "updates": average[1], "moved": average[2]},
        "controller": {
            "tensors": dict(learner.controller.tensors),
            "values": dict(learner.controller.values),
            "kept": list(learner.kept),
        },
        "journal": history_state(history),
    }
    return Checkpoint(step, identity, state)


def merged(full: Checkpoint, digest: str, moved: Checkpoint) -> Checkpoint:
    """The newest state: a full checkpoint, of that SHA-256, and what moved since.

    **Edge cases.** What moved since an earlier full checkpoint is old: the run was stopped before it was removed.
    """
    before, after = full.state, moved.state
    if after[BASE] != digest:
        return full
    average, controller = after["average"], after["controller"]
    tensors = before["controller"]["tensors"]
    state = {
        **{name: value for name, value in after.items() if name != BASE},
        "model": Entries(**after["model"]).put_on(before["model"]),
        "average": average
        and {
            "weights": Entries(**average["weights"]).put_on(_averaged(before, after)),
            "updates": average["updates"],
            "moved": average["moved"],
        },
        "controller": {
            "tensors": {**{name: tensors[name] for name in controller["kept"]}, **controller["tensors"]},
            "values": controller["values"],
        },
    }
    return Checkpoint(moved.step, moved.identity, state)


def _averaged(before: Mapping[str, Any], after: Mapping[str, Any]) -> Mapping[str, Tensor]:
    """Where the average holds nothing it is the weight itself, as that is now."""
    weights = Entries(**after["model"]).put_on(before["model"])
    return {name: weights[name] for name in before["average"]["weights"]}
