"""Weights along a run, kept in its folder, one safetensors file a step with facts as JSON beside the tensors.

Formal guarantees:
    The guarantee of DP-SGD is for all its iterates: every step's weights follow from the releases up to it. So
    snapshots are post-processing, cost nothing, and are as public as the final weights.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, final

import torch
from safetensors import safe_open
from safetensors.torch import load, save
from torch import Tensor

from sparsedp._files import write_atomically
from sparsedp.errors import DataError
from sparsedp.parameters import Support
from sparsedp.runs.directory import SNAPSHOTS
from sparsedp.runs.record import wrap_read_errors

FORMAT = 1


@final
@dataclass(frozen=True, slots=True, eq=False)
class Snapshot:
    """The weights after a step, and the support it moved."""

    step: int
    phase: str
    support: Support
    weights: Tensor = field(repr=False)


def write_snapshot(folder: Path | str, snapshot: Snapshot) -> Path:
    """Write one snapshot into a run's folder."""
    path = Path(folder) / SNAPSHOTS / f"step-{snapshot.step:08d}.safetensors"
    support = snapshot.support
    tensors = {"weights": snapshot.weights.cpu().contiguous()}
    if not support.is_full:
        tensors["support"] = support.indices.to(torch.int32)
    facts = {"format": FORMAT, "step": snapshot.step, "phase": snapshot.phase, "d": support.dimension}
    write_atomically(path, save(tensors, {"facts": json.dumps(facts)}))
    return path


def read_snapshots(folder: Path | str) -> tuple[Snapshot, ...]:
    """The snapshots a run kept, in order; none if it kept none."""
    return tuple(_read(path) for path in sorted((Path(folder) / SNAPSHOTS).glob("step-*.safetensors")))


def _read(path: Path) -> Snapshot:
    with wrap_read_errors(path):
        tensors, facts = read_facts(path)
        if facts.get("format") != FORMAT:
            raise DataError(f"{path}: expected format {FORMAT}, got {facts.get('format')}")
        d = facts["d"]
        support = Support(tensors["support"], d) if "support" in tensors else Support.full(d)
        return Snapshot(facts["step"], facts["phase"], support, tensors["weights"])


def read_facts(path: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """The tensors of a safetensors file, and the facts beside them."""
    with safe_open(path, framework="pt") as file:
        facts = json.loads((file.metadata() or {}).get("facts", "{}"))
    return load(path.read_bytes()), facts
