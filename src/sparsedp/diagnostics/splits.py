"""What a warm-up showed, as a file of the run's folder: a ranking by its first half, energies by its second.

The even and odd steps of the second half estimate energies by sample splitting (`methods/autoratio.py` does the same
to choose a ratio while training). Post-processing of releases, so free.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, final

from safetensors import SafetensorError, safe_open
from safetensors.torch import load, save
from torch import Tensor

from sparsedp.core.errors import DataError
from sparsedp.core.files import write_atomically
from sparsedp.diagnostics.criteria import SplitEnergies
from sparsedp.methods.autoratio import MINIMUM_WARMUP
from sparsedp.methods.timeline import WARM_UP
from sparsedp.privacy.plan import Phase, Plan
from sparsedp.runs.reader import Run

FILE = "warmup.safetensors"
STATE = "warmup-state.safetensors"
"""What a recorder has seen so far; gone when the warm-up is over."""
FORMAT = 1
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


def looked_at(plan: Plan) -> Phase:
    """The phase the statistics are of: the warm-up, or the first training phase if there is none."""
    return next(phase for phase in plan.phases if phase.trains)


def steps_looked_at(plan: Plan) -> int:
    """How many steps of that phase: the whole warm-up, or 30 % of a phase that is none."""
    phase = looked_at(plan)
    return phase.steps if phase.name == WARM_UP else round(DENSE_SHARE * phase.steps)


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
    write_facts(path, tensors, facts)
    return path


def read_statistics(folder: Path | str) -> WarmupStatistics:
    """The statistics a run kept.

    Raises:
        DataError: it kept none, and why; or the file is damaged or of another format.
    """
    path = Path(folder) / FILE
    if not path.is_file():
        raise DataError(why_nothing(path.parent))
    tensors, facts = read_facts(path)
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


def write_facts(path: Path, tensors: Mapping[str, Tensor], facts: Mapping[str, Any]) -> None:
    """Write tensors, and facts as JSON beside them, as one safetensors file."""
    write_atomically(path, save(dict(tensors), {"facts": json.dumps(dict(facts))}))


def read_facts(path: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """What `write_facts` wrote.

    Raises:
        DataError: the file is damaged.
    """
    try:
        with safe_open(path, framework="pt") as file:
            facts = json.loads((file.metadata() or {}).get("facts", "{}"))
        return load(path.read_bytes()), facts
    except (SafetensorError, json.JSONDecodeError) as error:
        raise DataError(f"{path} is damaged ({error}); train again to make it anew") from error


def why_nothing(folder: Path) -> str:
    """Why a run has no statistics, and what to do."""
    run = Run.open(folder)
    plan, record = run.plan, run.record
    steps, first = steps_looked_at(plan), plan.first_step(looked_at(plan).name)
    nothing = f"{folder} has no warm-up statistics (no {FILE}): "
    if not plan.is_private:
        return f"{nothing}{plan.method} is not private, so its gradients are no releases; train by a private method"
    if steps < MINIMUM_WARMUP:
        return f"{nothing}{steps} steps are too few to split, {MINIMUM_WARMUP} are the least; train longer"
    if record["status"] != "finished" and (folder / STATE).is_file():
        return f"{nothing}its warm-up is not over; go on with `sparsedp train --resume {folder}`"
    if any(
        span["active"] < record["d"] and span["step"] < first + steps for span in record["supports"] or ()
    ):
        return (
            f"{nothing}{plan.method} has no warm-up and does not train every coordinate for its first {steps} steps, "
            "so nothing shows what the others would have held; train by a method with a warm-up, or by dp-sgd"
        )
    return (
        f"{nothing}nothing kept them, or too many steps were lost; `sparsedp train` keeps them, and in Python the "
        "callback WarmupRecorder(out)"
    )
