"""Callbacks that keep a run's weights: what the energy captured along it is measured from afterwards."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import final

from torch import nn

from sparsedp.errors import SparseDPError
from sparsedp.parameters import Layout
from sparsedp.privacy.plan import Plan
from sparsedp.results import Callback, StepReport
from sparsedp.runs.directory import SNAPSHOTS
from sparsedp.runs.record import EpochMetrics
from sparsedp.runs.run import Run
from sparsedp.runs.snapshots import Snapshot, write_snapshot

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

    def __call__(self, event: StepReport | EpochMetrics) -> None:
        """Keep the weights if it is time."""
        if not isinstance(event, StepReport):
            return
        if self._steps is None:
            self._steps = frozenset(snapshot_steps(Run.open(self._run).plan, self._count))
            (self._run / SNAPSHOTS).mkdir(exist_ok=True)
        if event.step in self._steps:
            weights = self._layout.flatten(self._model)
            write_snapshot(self._run, Snapshot(event.step, event.phase, event.released.support, weights))


def watching(folder: Path, snapshots: bool) -> Callable[[nn.Module], Sequence[Callback]]:
    """What looks at the model of a run: snapshots of its weights, if asked for now or when the run began."""
    wanted = snapshots or (Path(folder) / SNAPSHOTS).is_dir()
    return lambda model: [SnapshotFiles(model, folder)] if wanted else []
