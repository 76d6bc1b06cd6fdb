"""Tasks, updates and what a client holds, as Flower's records."""

from __future__ import annotations

from collections.abc import Mapping
from typing import final

import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, RecordDict
from torch import Tensor

from sparsedp.core.support import Support
from sparsedp.federated import Held
from sparsedp.federated.task import Task, Wire

_ARRAYS, _VALUES = "sparsedp.arrays", "sparsedp.values"
_UPDATE, _REASON = "update", "reason"
_HELD, _HELD_VALUES = "sparsedp.held", "sparsedp.held.values"
LONGEST = 300
"""Characters of a client's words that reach the server's log, in one line."""


def to_records(wire: Wire) -> RecordDict:
    """A message's content."""
    arrays = ArrayRecord({name: Array(array) for name, array in wire.arrays.items()})
    return RecordDict({_ARRAYS: arrays, _VALUES: ConfigRecord(dict(wire.values))})


def from_records(content: RecordDict) -> Wire:
    """What `to_records` was given."""
    arrays = {name: array.numpy() for name, array in content.array_records[_ARRAYS].items()}
    return Wire(arrays, dict(content.config_records[_VALUES]))


def count_bytes(content: RecordDict) -> int:
    """Bytes of a message's content, as Flower counts them."""
    return sum(record.count_bytes() for record in content.values())


@final
class FlowerBytes:
    """How many bytes a round's messages have on Flower."""

    def task(self, task: Task) -> int:
        """Of a task."""
        return count_bytes(to_records(task.to_wire()))

    def answer(self, task: Task) -> int:
        """Of an update or count."""
        return count_bytes(to_records(update_wire(torch.zeros(task.size, dtype=task.integers))))


def update_wire(update: Tensor) -> Wire:
    """A client's update."""
    return Wire({_UPDATE: update.numpy()}, {})


def refusal_wire(reason: str) -> Wire:
    """Why a client has none."""
    return Wire({}, {_REASON: reason})


def read_answer(content: RecordDict) -> Tensor | str:
    """An update, or why there is none. Nothing that a client can send makes it raise."""
    try:
        wire = from_records(content)
        if _REASON in wire.values:
            return in_one_line(str(wire.values[_REASON]))
        return torch.from_numpy(wire.arrays[_UPDATE].copy())
    except Exception as error:
        return f"its answer cannot be read ({type(error).__name__})"


def in_one_line(words: str) -> str:
    """Words from elsewhere as they may stand in the log: short, and no line of their own."""
    return " ".join(words.split())[:LONGEST]


def keep(state: RecordDict, held: Held) -> None:
    """Put what a client holds into its Flower context."""
    arrays = {"weights": held.weights} | ({} if held.support.is_full else {"support": held.support.indices})
    state[_HELD] = ArrayRecord({name: Array(tensor.numpy()) for name, tensor in arrays.items()})
    state[_HELD_VALUES] = ConfigRecord({"run": held.run, "period": held.period})


def kept(state: RecordDict) -> Held | None:
    """What a client's Flower context holds, if anything."""
    if _HELD not in state:
        return None
    arrays: Mapping[str, Array] = state.array_records[_HELD]
    values = state.config_records[_HELD_VALUES]
    weights = torch.from_numpy(arrays["weights"].numpy().copy())
    d = weights.numel()
    support = Support(torch.from_numpy(arrays["support"].numpy().copy()), d) if "support" in arrays else None
    return Held(str(values["run"]), int(values["period"]), weights, support or Support.full(d))
