"""Checkpoints: all of a run's public state in one safetensors file, and what it belongs to. No pickle."""

from __future__ import annotations

import hashlib
import json
import math
import struct
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load, save
from torch import Tensor, nn

from sparsedp._files import Json, parse_json
from sparsedp._serialization import from_json, json_diff, plain_json, short, to_json
from sparsedp.errors import DataError, ModelError, SparseDPError
from sparsedp.parameters import ParameterLayout, ParameterSlice, Support
from sparsedp.runs.record import EpochMetrics, History, RunSetup, SupportSpan, epochs_json, wrap_read_errors

FORMAT, VERSION = "sparsedp checkpoint", 2
_LENGTH = struct.Struct("<Q")
Tensors = dict[str, Tensor]


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


def checkpoint_of(
    step: int, identity: Mapping[str, Json], learner: Mapping[str, Any], history: History, in_blocks: bool
) -> Checkpoint:
    """Make the checkpoint of a run after some steps; `in_blocks` if its batches are cut for several ranks."""
    journal = {
        "epochs": epochs_json(history.epochs),
        "spans": to_json(history.spans),
        "support": history.support.indices,
    }
    cut = {"cut": "blocks"} if in_blocks else {}
    return Checkpoint(step, identity, {**learner, "journal": journal, **cut})


def history_of(checkpoint: Checkpoint, layout: ParameterLayout) -> History:
    """Read the history of a run so far from its checkpoint."""
    saved = checkpoint.state["journal"]
    return History(
        layout,
        from_json(list[EpochMetrics], saved["epochs"], "checkpoint, epochs"),
        from_json(list[SupportSpan], saved["spans"], "checkpoint, spans"),
        Support(saved["support"], layout.dimension),
    )


def checkpoint_bytes(checkpoint: Checkpoint) -> bytes:
    """Encode a checkpoint as a safetensors file; equal states have equal files."""
    tensors: Tensors = {}
    state = {name: pack(value, tensors, name) for name, value in checkpoint.state.items()}
    content = {"step": checkpoint.step, "identity": dict(checkpoint.identity), "state": state}
    document = json.dumps(content, allow_nan=False)
    # One key: safetensors writes the keys of its metadata in no fixed order.
    digest = _digest(document, tensors)
    header = {"format": FORMAT, "version": VERSION, "sha256": digest, "document": document}
    return save(tensors, {"checkpoint": json.dumps(header)})


def read_checkpoint(path: Path) -> Checkpoint:
    """Read a checkpoint and check every byte of it."""
    with wrap_read_errors(path):
        content = path.read_bytes()
        (length,) = _LENGTH.unpack_from(content)
        outer = parse_json(content[_LENGTH.size : _LENGTH.size + length], f"{path}, header")
        header = parse_json(outer.get("__metadata__", {}).get("checkpoint", "{}"), f"{path}, header")
        if header.get("format") != FORMAT:
            raise DataError(f"{path} is a safetensors file, but not a {FORMAT}")
        if header["version"] != VERSION:
            raise DataError(
                f"{path} has checkpoint format version {header['version']}, this sparsedp reads {VERSION}; use the "
                "version of sparsedp that wrote it (the record beside it names it)"
            )
        tensors, document = load(content), header["document"]
        if header["sha256"] != _digest(document, tensors):
            raise DataError(
                f"{path} is damaged (its checksum does not match); restore it, or start a new run elsewhere"
            )
        tree = parse_json(document, f"{path}, document")
        state = {name: unpack(value, tensors) for name, value in tree["state"].items()}
        return Checkpoint(step=tree["step"], identity=tree["identity"], state=state)


def _digest(document: str, tensors: Tensors) -> str:
    digest = hashlib.sha256(document.encode())
    for name in sorted(tensors):
        tensor = tensors[name]
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        digest.update(tensor.reshape(-1).view(torch.uint8).numpy().data if tensor.numel() else b"")
    return digest.hexdigest()


def pack(value: Any, tensors: Tensors, path: str) -> Json:
    """Convert `value` to JSON, and put its tensors into `tensors` under names starting with `path`."""
    if value is None or isinstance(value, (bool, int, str)):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else {"$float": repr(value)}
    if isinstance(value, Tensor):
        tensors[path] = value.detach().to("cpu", copy=True).contiguous()
        return {"$tensor": path}
    if isinstance(value, list):
        return [pack(item, tensors, f"{path}/{i}") for i, item in enumerate(value)]
    if isinstance(value, tuple):
        return {"$tuple": pack(list(value), tensors, path)}
    if isinstance(value, Counter):  # of a MultiStepLR
        return {"$counter": pack(dict(value), tensors, path)}
    if isinstance(value, dict):
        packed = [(key, pack(item, tensors, f"{path}/{key}")) for key, item in value.items()]
        if all(isinstance(key, str) and not key.startswith("$") for key, _ in packed):
            return dict(packed)
        return {"$items": [[_scalar_key(key), item] for key, item in packed]}
    raise SparseDPError(
        f"cannot save {path}: it holds a {type(value).__name__}, and checkpoints keep only tensors, numbers, "
        "strings, lists and dicts (never pickle)"
    )


def unpack(tree: Json, tensors: Tensors) -> Any:
    """Convert JSON and tensors back to the value that `pack` was given."""
    if isinstance(tree, list):
        return [unpack(item, tensors) for item in tree]
    if not isinstance(tree, dict):
        return tree
    match tree:
        case {"$tensor": name}:
            return tensors[name]
        case {"$float": text}:
            return float(text)
        case {"$tuple": items}:
            return tuple(unpack(items, tensors))
        case {"$counter": counts}:
            return Counter(unpack(counts, tensors))
        case {"$items": pairs}:
            return {_scalar_key(key): unpack(item, tensors) for key, item in pairs}
    return {key: unpack(item, tensors) for key, item in tree.items()}


def _scalar_key(key: Any) -> Any:
    if isinstance(key, bool) or not isinstance(key, (int, str)):
        raise SparseDPError(f"cannot save a dict with the key {key!r}; keys must be strings or whole numbers")
    return key


def describe_layout(layout: ParameterLayout) -> Json:
    """Describe a layout as JSON, to tell one model from another."""
    return [[slot.name, list(slot.shape)] for slot in layout]


def read_layout(described: Json) -> ParameterLayout:
    """Make the layout that `describe_layout` described."""
    slots: list[ParameterSlice] = []
    for name, shape in described:
        slots.append(ParameterSlice(name, tuple(shape), slots[-1].span.stop if slots else 0))
    return ParameterLayout(tuple(slots))


def load_model_state(model: nn.Module, checkpoint: Checkpoint) -> None:
    """Load a checkpoint's raw weights and buffers."""
    try:
        model.load_state_dict(checkpoint.state["model"])
    except RuntimeError as error:
        raise ModelError(f"the checkpoint belongs to another model: {error}") from error


def setup_names(identity: Mapping[str, Json]) -> tuple[str, ...]:
    """The trainer's own choices (optimizer, engine, ...): in the record's settings and in the identity alike."""
    apart = ("plan", "method", "layout", "seed", "public_seed", "details")
    return tuple(name for name in identity if name not in apart)


def identity_of(setup: RunSetup) -> dict[str, Json]:
    """Everything that decides what a run computes, and so must stay the same when it is resumed."""
    return {
        "plan": setup.plan.fingerprint,
        "method": setup.method.to_json(),
        "layout": describe_layout(setup.layout),
        "seed": setup.seed,
        "public_seed": setup.public_seed,
        **setup.settings,
        "details": dict(setup.details),
    }


def check_identity(saved: Mapping[str, Json], now: Mapping[str, Json]) -> None:
    """Refuse a checkpoint of another run, naming what differs."""
    same = plain_json(dict(now))
    differing = list(json_diff({name: saved.get(name) for name in same}, same))
    if [name for name, _, _ in differing] == ["plan"]:
        raise SparseDPError(
            "this is not the run that was saved: its plan was made for other data or other settings (another number "
            "of rows or units, epsilon, epochs or batch size). Resume with the data and settings it was started with"
        )
    if differing:
        words = "; ".join(f"{name} was {short(old)} and is {short(new)}" for name, old, new in differing[:6])
        raise SparseDPError(
            f"this is not the run that was saved: {words}. Resume with what it was started with"
        )
