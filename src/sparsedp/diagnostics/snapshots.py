"""Snapshots of a run's weights, kept in its folder: what the energy captured along a run is measured from afterwards.

**Privacy.** The guarantee of DP-SGD is for all its iterates: every step's weights follow from the releases up to it.
So snapshots are post-processing, cost nothing, and are as public as the final weights.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, final

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load, save
from torch import Tensor, nn

from sparsedp.callbacks.reports import Callback, StepReport
from sparsedp.core.errors import DataError, SparseDPError
from sparsedp.core.files import write_atomically
from sparsedp.core.layout import Layout
from sparsedp.core.support import Support
from sparsedp.diagnostics.trajectory import Snapshot
from sparsedp.privacy.plan import Plan
from sparsedp.runs.folder import RunFolder
from sparsedp.runs.history import EpochReport
from sparsedp.runs.reader import Run

FORMAT = 1
COUNT = 20


def snapshot_steps(plan: Plan, count: int = COUNT) -> tuple[int, ...]:
    """At most `count` steps spread evenly over the last phase, its first and last step among them."""
    if count < 2:
        raise SparseDPError(f"count: got {count}, expected at least 2 snapshots")
    phase = plan.phases[-1]
    first, last = plan.first_step(phase.name), phase.steps - 1
    return tuple(sorted({first + round(i * last / (count - 1)) for i in range(count)}))


@final
class SnapshotFiles:
    """A callback for a run with `out=`: keeps the weights of some steps of the last phase in the run's folder.

    A snapshot takes 4 bytes a coordinate, and 4 more for each active one.
    **Edge cases.** A replayed step writes the same file again; a lost one has none.
    """

    def __init__(self, model: nn.Module, out: Path | str, count: int = COUNT) -> None:
        self._model, self._layout, self._count = model, Layout.of(model), count
        self._run = Path(out)
        self._steps: frozenset[int] | None = None

    def __call__(self, event: StepReport | EpochReport) -> None:
        """Keep the weights if it is time."""
        if not isinstance(event, StepReport):
            return
        if self._steps is None:
            self._steps = frozenset(snapshot_steps(Run.open(self._run).plan, self._count))
            RunFolder(self._run).snapshots.mkdir(exist_ok=True)
        if event.step in self._steps:
            weights = self._layout.flatten(self._model)
            write_snapshot(self._run, Snapshot(event.step, event.phase, event.released.support, weights))


def write_snapshot(folder: Path | str, snapshot: Snapshot) -> Path:
    """Write one snapshot into a run's folder."""
    path = RunFolder(Path(folder)).snapshots / f"step-{snapshot.step:08d}.safetensors"
    support = snapshot.support
    tensors = {"weights": snapshot.weights.cpu().contiguous()}
    if not support.is_full:
        tensors["support"] = support.indices.to(torch.int32)
    facts = {"format": FORMAT, "step": snapshot.step, "phase": snapshot.phase, "d": support.dimension}
    _write_facts(path, tensors, facts)
    return path


def read_snapshots(folder: Path | str) -> tuple[Snapshot, ...]:
    """The snapshots a run kept, in order; none if it kept none.

    Raises:
        DataError: one is damaged or of another format.
    """
    return tuple(_read(path) for path in sorted(RunFolder(Path(folder)).snapshots.glob("step-*.safetensors")))


def _read(path: Path) -> Snapshot:
    tensors, facts = _read_facts(path)
    if facts.get("format") != FORMAT:
        raise DataError(f"{path}: expected format {FORMAT}, got {facts.get('format')}")
    d = facts["d"]
    support = Support(tensors["support"], d) if "support" in tensors else Support.full(d)
    return Snapshot(facts["step"], facts["phase"], support, tensors["weights"])


def _write_facts(path: Path, tensors: Mapping[str, Tensor], facts: Mapping[str, Any]) -> None:
    """Write tensors, and facts as JSON beside them, as one safetensors file."""
    write_atomically(path, save(dict(tensors), {"facts": json.dumps(dict(facts))}))


def _read_facts(path: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """What `_write_facts` wrote.

    Raises:
        DataError: the file is damaged.
    """
    try:
        with safe_open(path, framework="pt") as file:
            facts = json.loads((file.metadata() or {}).get("facts", "{}"))
        return load(path.read_bytes()), facts
    except (SafetensorError, json.JSONDecodeError) as error:
        raise DataError(f"{path} is damaged ({error}); train again to make it anew") from error


def watching(folder: Path, snapshots: bool) -> Callable[[nn.Module], Sequence[Callback]]:
    """What looks at the model of a run: snapshots of its weights, if asked for now or when the run began."""
    wanted = snapshots or RunFolder(folder).snapshots.is_dir()
    return lambda model: [SnapshotFiles(model, folder)] if wanted else []
