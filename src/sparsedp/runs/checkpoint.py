"""Checkpoints: one safetensors file, its JSON inside, written atomically and checked when read."""

from __future__ import annotations

import hashlib
import json
import struct
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load, save
from torch import Tensor, nn

from sparsedp._files import Json, parse_json, write_atomically
from sparsedp.errors import DataError, ModelError
from sparsedp.parameters import Layout, Slot
from sparsedp.runs.documents import intact
from sparsedp.runs.packing import Tensors, pack, unpack

FORMAT = "sparsedp checkpoint"
VERSION = 1
_LENGTH = struct.Struct("<Q")


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """All of a run's public state after some steps.

    Attributes:
        step: how many steps the state has seen: the next step's index.
        identity: what the state belongs to (plan, method, model layout, ...); a resume compares it.
        state: nested dicts, lists, numbers and tensors.
    """

    step: int
    identity: Mapping[str, Json]
    state: Mapping[str, Any] = field(repr=False)


def checkpoint_bytes(checkpoint: Checkpoint) -> bytes:
    """A checkpoint as a file: one state has one text."""
    tensors: Tensors = {}
    document = json.dumps(
        {
            "step": checkpoint.step,
            "identity": dict(checkpoint.identity),
            "state": {name: pack(value, tensors, name) for name, value in checkpoint.state.items()},
        },
        allow_nan=False,
    )
    metadata = {
        "document": document,
        "format": FORMAT,
        "sha256": _digest(document, tensors),
        "version": str(VERSION),
    }
    return _in_order(save(tensors, metadata))


def write_checkpoint(path: Path, checkpoint: Checkpoint) -> None:
    """Write a checkpoint atomically: a kill leaves the old one or the new one."""
    write_atomically(path, checkpoint_bytes(checkpoint))


def read_checkpoint(path: Path) -> Checkpoint:
    """Read a checkpoint and check every byte of it.

    Raises:
        DataError: it is missing, damaged, or of another format or version.
    """
    try:
        content = path.read_bytes()
    except FileNotFoundError as error:
        raise DataError(f"{path} is missing; there is nothing to resume or load") from error
    return parse_checkpoint(content, path)


def parse_checkpoint(content: bytes, path: Path) -> Checkpoint:
    """The checkpoint in a file, every byte of it checked.

    Raises:
        DataError: it is damaged, or of another format or version.
    """
    with intact(path):
        return _parse(content, path)


def _parse(content: bytes, path: Path) -> Checkpoint:
    metadata = _metadata(content, path)
    if metadata.get("format") != FORMAT:
        raise DataError(f"{path} is a safetensors file, but not a {FORMAT}")
    if metadata.get("version") != str(VERSION):
        raise DataError(
            f"{path} has checkpoint format version {metadata.get('version')}, this sparsedp reads {VERSION}; "
            "use the version of sparsedp that wrote it (the record and the plan beside it name it)"
        )
    tensors, document = load(content), metadata.get("document", "")
    if metadata.get("sha256") != _digest(document, tensors):
        raise _damaged(path, "its checksum does not match")
    tree = parse_json(document, f"{path}, document")
    state = {name: unpack(value, tensors) for name, value in tree["state"].items()}
    return Checkpoint(step=tree["step"], identity=tree["identity"], state=state)


def describe_layout(layout: Layout) -> Json:
    """The layout as JSON, to tell one model from another."""
    return [[slot.name, list(slot.shape)] for slot in layout]


def read_layout(described: Json) -> Layout:
    """The layout that `describe_layout` described, as a checkpoint's identity holds it."""
    slots: list[Slot] = []
    for name, shape in described:
        slots.append(Slot(name, tuple(shape), slots[-1].span.stop if slots else 0))
    return Layout(tuple(slots))


def check_same_parameters(saved: Json, now: Json) -> None:
    """Refuse a layout with other trainable parameters than were saved, by name or shape; both as JSON, in any order.

    Raises:
        ModelError: which ones differ.
    """
    differing = sorted({str(slot[0]) for slot in (*saved, *now) if slot not in saved or slot not in now})
    if differing:
        raise ModelError(
            "the checkpoint belongs to another model: they differ in the trainable parameters "
            f"{differing[:6]}; build the model as it was when the run started"
        )


def load_model_state(model: nn.Module, checkpoint: Checkpoint) -> None:
    """Load a checkpoint's raw weights and buffers, or say how the model differs."""
    actual = Layout.of(model)
    check_same_parameters(checkpoint.identity["layout"], describe_layout(actual))
    state, trained = checkpoint.state["model"], {slot.name for slot in actual}
    frozen = {name: value for name, value in model.state_dict().items() if name not in trained}
    try:
        # What a run with kept features never held, because it was frozen below them, stays as the model has it.
        model.load_state_dict({**(frozen if _is_above(state, model) else {}), **state})
    except RuntimeError as error:
        raise ModelError(f"the checkpoint belongs to another model: {error}") from error


def _is_above(state: Mapping[str, Tensor], model: nn.Module) -> bool:
    """Whether a state is that of a row's last parts, complete."""
    if not isinstance(model, nn.Sequential):
        return False
    parts = {name.split(".")[0] for name in state}
    held = [name in parts for name, part in model.named_children() if part.state_dict()]
    return held == sorted(held)


def _digest(document: str, tensors: Tensors) -> str:
    digest = hashlib.sha256(document.encode())
    for name in sorted(tensors):
        tensor = tensors[name]
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        digest.update(tensor.reshape(-1).view(torch.uint8).numpy().data if tensor.numel() else b"")
    return digest.hexdigest()


def _metadata(content: bytes, path: Path) -> dict[str, str]:
    """The text in a safetensors header."""
    return dict(_header(content, path).get("__metadata__", {}))


def _header(content: bytes, path: Path) -> dict[str, Json]:
    (length,) = _LENGTH.unpack_from(content)
    header = parse_json(content[_LENGTH.size : _LENGTH.size + length], f"{path}, header")
    if not isinstance(header, dict):
        raise _damaged(path, "its header is not a JSON object")
    return header


def _in_order(content: bytes) -> bytes:
    """The same safetensors file with its header's keys in order: the library writes them in any."""
    (length,) = _LENGTH.unpack_from(content)
    header = json.loads(content[_LENGTH.size : _LENGTH.size + length])
    text = json.dumps(header, sort_keys=True, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return _LENGTH.pack(len(text)) + text + content[_LENGTH.size + length :]


def _damaged(path: Path, why: str) -> DataError:
    return DataError(f"{path} is damaged ({why}); restore it from a copy, or start a new run elsewhere")
