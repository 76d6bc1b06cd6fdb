"""What is simulated, and the records of it: one line of JSON for each table, budget, batch size and seed."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

from sparsedp.methods.plan_config import PlanSpec
from sparsedp_experiments.data.table import load
from sparsedp_experiments.rates.simulate import People, Setting, auc, bundle_for, simulate

RECORDS = Path(__file__).parents[3] / "experiments" / "results" / "table-rates.jsonl"
TABLES = ("compas", "adult", "census-income", "diabetes130-pooled")
EPSILONS = (0.5, 1.0, 3.0)
CLIPS = (0.1, 0.3, 1.0)
RATIOS = (0.2, 0.4, 0.7)
EPOCHS, DELTA, MOST_ROWS, VALIDATION = 20, 1e-5, 40_000, 0.2

DENSE = tuple(Setting(0.05 * 2**power, clip) for clip in CLIPS for power in range(13))
"""Thirteen rates and three clip norms."""
SPARSE = tuple(
    Setting(0.05 * 2**power, clip, ratio) for ratio in RATIOS for clip in CLIPS for power in range(4, 9)
)
"""Five rates, three clip norms and three ratios, for the larger batches."""


def usual_batch(units: int) -> int:
    """What `fit` takes if no batch size is given."""
    return int(2 ** round(math.log2(4 * math.sqrt(units))))


@lru_cache(maxsize=2)
def sides(table: str, unit_norm: bool, stage: str) -> tuple[People, People]:
    """Training data, and the validation split for tuning or the test set after it."""
    return bundle_for(load(table, unit_norm=unit_norm), VALIDATION if stage == "tune" else None, MOST_ROWS)


def batch_of(table: str, unit_norm: bool, stage: str) -> int:
    """The usual batch size there."""
    return usual_batch(sides(table, unit_norm, stage)[0].units)


def run(
    stage: str,
    table: str,
    unit_norm: bool,
    epsilon: float,
    larger: int,
    settings: Sequence[Setting],
    seed: int,
) -> dict[str, Any]:
    """One simulation of all settings: on a validation split for tuning, on the test set after it."""
    train, held_out = sides(table, unit_norm, stage)
    batch = larger * usual_batch(train.units)
    plan = PlanSpec.asked(
        "dp-sgd",
        units=train.units,
        epsilon=epsilon,
        delta=DELTA,
        epochs=EPOCHS,
        batch_size=batch,
        max_grad_norm=1.0,
    ).plan()
    phase = plan.phases[-1]
    return {
        "stage": stage, "table": table, "unit_norm": unit_norm, "epsilon": epsilon, "batch_size": batch,
        "seed": seed, "units": train.units, "coordinates": train.rows.shape[1] + 1,
        "noise_multiplier": phase.noise_multiplier, "steps": phase.steps,
        "settings": [[one.step, one.clip_norm, one.ratio] for one in settings],
        "auc": [round(one, 5) for one in auc(held_out, simulate(train, plan, settings, seed, stage == "final"))],
    }  # fmt: skip


def records(path: Path = RECORDS) -> Iterator[dict[str, Any]]:
    """Every line there is."""
    if path.exists():
        for line in path.read_text(encoding="utf-8").splitlines():
            yield json.loads(line)


def add(record: dict[str, Any], path: Path = RECORDS) -> None:
    """One more line."""
    with path.open("a", encoding="utf-8") as stream:
        stream.write(json.dumps(record) + "\n")
