"""What a run's warm-up shows about its coordinates, kept by a callback. Post-processing of releases, so free.

The first half of the warm-up ranks, by every score in `RANKINGS`; the even and odd steps of the second half estimate
energies by sample splitting (`methods/autoratio.py` does the same to choose a ratio while training).
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import final

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load, save
from torch import Tensor

from sparsedp.core.errors import DataError
from sparsedp.diagnostics.criteria import SplitEnergies
from sparsedp.methods.autoratio import MINIMUM_WARMUP, AutoRatio
from sparsedp.methods.observation import observe_dense
from sparsedp.methods.scores import Coherent, Energy, Score
from sparsedp.methods.timeline import WARM_UP, noise_on_mean
from sparsedp.privacy.plan import Phase, Plan
from sparsedp.training.files import write_atomically
from sparsedp.training.folder import RunFolder
from sparsedp.training.reports import EpochReport, StepReport

FILE = "warmup.safetensors"
FORMAT = 1
RANKINGS: tuple[Score, ...] = (Energy(), Coherent())
DENSE_SHARE = 0.3
"""The share of a run without a warm-up that is looked at as if it were one."""


@final
@dataclass(frozen=True, slots=True, eq=False)
class WarmupStatistics:
    """Split energies of one warm-up, for each ranking.

    Attributes:
        splits: by name of the ranking; they differ in the order only.
        steps: how many steps were seen.
        planned: how many there were to see.
        noise_std: nu_1, on each coordinate of a released mean gradient.
    """

    splits: Mapping[str, SplitEnergies] = field(repr=False)
    steps: int
    planned: int
    noise_std: float


@final
class WarmupRecorder:
    """A callback for a run with `out=`: writes the statistics to the run's folder when the warm-up is over.

    A run without a warm-up counts as having one for the first 30 % of its steps, if they are dense.

    **Privacy.** It is given released values only, so its file is as public as the run.
    **Edge cases.** A resumed run shows only the steps since; without one of each part nothing is written.
    """

    def __init__(self, out: Path | str) -> None:
        self._out = Path(out)
        self._plan: Plan | None = None
        self._states: list[tuple[AutoRatio, Mapping[str, Tensor]]] = []
        self._first = self._planned = self._seen = 0
        self._dense = True

    def __call__(self, event: StepReport | EpochReport) -> None:
        """Take in a step of the warm-up; at its last, write the file."""
        if not isinstance(event, StepReport):
            return
        if self._plan is None:
            self._begin(event.released.support.dimension)
        step = event.step - self._first
        if not 0 <= step < self._planned or not self._states:
            return
        self._dense = self._dense and event.released.support.is_full
        if self._dense:
            seen = observe_dense(event.released)
            self._states = [(auto, auto.update(state, step, seen)) for auto, state in self._states]
            self._seen += 1
        if step == self._planned - 1:
            self._finish()

    def _begin(self, dimension: int) -> None:
        self._plan = RunFolder.open(self._out).plan()
        phase = looked_at(self._plan)
        whole = phase.name == WARM_UP
        self._first = self._plan.first_step(phase.name)
        self._planned = phase.steps if whole else round(DENSE_SHARE * phase.steps)
        if self._planned >= MINIMUM_WARMUP:
            autos = [AutoRatio(score, self._planned) for score in RANKINGS]
            self._states = [(auto, auto.init(dimension)) for auto in autos]

    def _finish(self) -> None:
        if self._plan is None or not self._dense or not self._states[0][0].is_complete(self._states[0][1]):
            return
        noise = noise_on_mean(self._plan, looked_at(self._plan))
        splits = {auto.score.name: _split(auto, state, noise) for auto, state in self._states}
        write_statistics(self._out, WarmupStatistics(splits, self._seen, self._planned, noise))


def looked_at(plan: Plan) -> Phase:
    """The phase the statistics are of: the warm-up, or the first training phase if there is none."""
    return next(phase for phase in plan.phases if phase.trains)


def write_statistics(folder: Path | str, found: WarmupStatistics) -> Path:
    """Write the statistics into a run's folder."""
    one = next(iter(found.splits.values()))
    tensors = {f"order.{name}": split.order.contiguous() for name, split in found.splits.items()}
    tensors |= {"first": one.first.contiguous(), "second": one.second.contiguous()}
    facts = {
        "format": FORMAT,
        "rankings": list(found.splits),
        "steps": found.steps,
        "planned": found.planned,
        "noise_std": found.noise_std,
        "first_variance": one.first_variance,
        "second_variance": one.second_variance,
    }
    path = Path(folder) / FILE
    write_atomically(path, save(tensors, {"facts": json.dumps(facts)}))
    return path


def read_statistics(folder: Path | str) -> WarmupStatistics:
    """The statistics a run kept.

    Raises:
        DataError: it kept none, or the file is damaged or of another format.
    """
    path = Path(folder) / FILE
    if not path.is_file():
        raise DataError(
            f"{path.parent} kept no warm-up statistics (no {FILE}); train with the callback WarmupRecorder(out)"
        )
    try:
        with safe_open(path, framework="pt") as file:
            facts = json.loads((file.metadata() or {}).get("facts", "{}"))
        tensors = load(path.read_bytes())
    except (SafetensorError, json.JSONDecodeError) as error:
        raise DataError(f"{path} is damaged ({error}); train again to make it anew") from error
    if facts.get("format") != FORMAT:
        raise DataError(f"{path}: expected format {FORMAT}, got {facts.get('format')}")
    splits = {
        name: SplitEnergies(
            tensors[f"order.{name}"],
            tensors["first"],
            tensors["second"],
            facts["first_variance"],
            facts["second_variance"],
        )
        for name in facts["rankings"]
    }
    return WarmupStatistics(splits, facts["steps"], facts["planned"], facts["noise_std"])


def _split(auto: AutoRatio, state: Mapping[str, Tensor], noise_std: float) -> SplitEnergies:
    order = torch.sort(auto.ranking_scores(state), descending=True, stable=True).indices
    even, odd = int(state["even_steps"]), int(state["odd_steps"])
    return SplitEnergies(
        order, state["even_sum"] / even, state["odd_sum"] / odd, noise_std**2 / even, noise_std**2 / odd
    )
