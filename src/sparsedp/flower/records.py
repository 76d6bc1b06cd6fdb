"""Tasks and updates as Flower's records."""

from __future__ import annotations

import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, RecordDict
from torch import Tensor

from sparsedp.federated.task import Wire

_ARRAYS, _VALUES = "sparsedp.arrays", "sparsedp.values"
_UPDATE, _REASON = "update", "reason"
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
