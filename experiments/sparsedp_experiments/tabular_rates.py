"""Which learning rate a private logistic regression on a table wants, by simulating many rates at once.

The simulation is in NumPy and written apart from the library, which it takes the plan's noise and number of steps
from: the same sampling of units, clip, noise, momentum and average. All settings share the batches.

`sweep table-rates` tunes rates, clip norms and sparse supports on four tables, then holds the classifier's rule
against the best (`results/table-rates.jsonl`).
"""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt
from scipy import sparse
from sklearn.metrics import roc_auc_score

from sparsedp.methods.plan_config import PlanConfig
from sparsedp.privacy.plan import Plan
from sparsedp_experiments.data.bundle import Sparse, Split
from sparsedp_experiments.data.registry import load
from sparsedp_experiments.runs.execute import rate_for_table
from sparsedp_experiments.runs.grid import RESULTS
from sparsedp_experiments.runs.results import append_row, estimate, read_rows
from sparsedp_experiments.runs.text import markdown_table

RECORDS = RESULTS / "table-rates.jsonl"
MOMENTUM, WARM_UP = np.float32(0.9), 0.3
EPOCHS, DELTA, CLIP = 20, 1e-5, 1.0
Array = npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class Setting:
    """A rate times the clip norm, the clip norm, and for tp-coherent the share of coordinates that stay."""

    step: float
    clip_norm: float
    ratio: float | None = None


@dataclass(frozen=True, slots=True, eq=False)
class People:
    """Rows, targets, and the unit of each row, counted from 0."""

    rows: sparse.csr_matrix
    targets: Array
    owner: npt.NDArray[np.int64]

    @property
    def units(self) -> int:
        return int(self.owner.max()) + 1


def people(split: Split) -> People:
    """A side of a data set."""
    features = split.features
    assert isinstance(features, Sparse)
    owner = np.arange(len(split)) if split.units is None else np.unique(split.units, return_inverse=True)[1]
    return People(sparse.csr_matrix(features.matrix), split.targets.numpy().astype(np.float32), owner)


def simulate(
    train: People, plan: Plan, settings: Sequence[Setting], seed: int, paired: bool = False
) -> tuple[Array, Array]:
    """The last weights of every setting and their average, step t counting t times: [features + 1, settings].

    The intercept is last. `paired` gives all settings the same noise in units of its scale, as runs of the library
    with one seed have.
    """
    phase = plan.phases[-1]
    steps, rng = sum(one.steps for one in plan.phases), np.random.default_rng(seed)
    clip = np.array([one.clip_norm for one in settings], np.float32)
    rate = np.array([one.step / one.clip_norm for one in settings], np.float32)
    weights = np.zeros((train.rows.shape[1] + 1, len(settings)), np.float32)
    speed, seen, active = np.zeros_like(weights), np.zeros_like(weights), np.ones_like(weights)
    average = np.zeros_like(weights)
    sparse_ones = any(one.ratio is not None for one in settings)
    order, counts = np.argsort(train.owner, kind="stable"), np.bincount(train.owner)
    first = np.cumsum(counts) - counts
    for step in range(steps):
        chosen = np.flatnonzero(rng.random(train.units) < phase.sampling_rate)
        if train.units < len(order):
            chosen = order[first[chosen] + (rng.random(len(chosen)) * counts[chosen]).astype(np.int64)]
        total = _clipped_sum(train.rows[chosen], train.targets[chosen], weights, active, clip, sparse_ones)
        noise = rng.standard_normal((len(weights), 1 if paired else len(settings)), dtype=np.float32)
        total += noise * (phase.noise_multiplier * clip)
        released = total / np.float32(phase.sampling_rate * train.units) * active
        if sparse_ones and step < WARM_UP * steps:
            seen += released
            if step + 1 >= WARM_UP * steps:
                active = _supports(seen, settings)
                speed *= active
        speed = MOMENTUM * speed + released
        weights = weights - rate * speed * active
        average += (weights - average) * np.float32(2 / (step + 2))
    return weights, average


def auc(held_out: People, weights: Array) -> list[float]:
    """Of every setting."""
    scores = held_out.rows @ weights[:-1] + weights[-1]
    return [float(roc_auc_score(held_out.targets, one)) for one in scores.T]


def _clipped_sum(
    rows: sparse.csr_matrix, targets: Array, weights: Array, active: Array, clip: Array, sparse_ones: bool
) -> Array:
    """The sum of the clipped gradients of every setting."""
    squares = rows.multiply(rows)
    if sparse_ones:
        norms = np.sqrt(squares @ active[:-1] + active[-1])
    else:
        norms = np.sqrt(np.asarray(squares.sum(axis=1)) + 1).astype(np.float32)
    logits = np.clip(rows @ weights[:-1] + weights[-1], -30, 30)
    residual = 1 / (1 + np.exp(-logits)) - targets[:, None]
    residual *= np.minimum(1, clip / (np.abs(residual) * norms + 1e-12))
    return np.concatenate([rows.T @ residual, residual.sum(axis=0, keepdims=True)]).astype(np.float32)


def _supports(seen: Array, settings: Sequence[Setting]) -> Array:
    """Ones where a setting goes on: the coordinates with the largest summed release (the coherent score)."""
    found = np.ones_like(seen)
    for one, setting in enumerate(settings):
        if setting.ratio is not None:
            kept = round(setting.ratio * len(seen))
            found[np.argsort(-np.abs(seen[:, one]), kind="stable")[kept:], one] = 0
    return found


def usual_batch(units: int) -> int:
    """What `fit` takes if no batch size is given."""
    return int(2 ** round(math.log2(4 * math.sqrt(units))))


def plan_for(units: int, epsilon: float, batch: int) -> Plan:
    """Dense DP-SGD with the classifier's clip norm and number of epochs."""
    return PlanConfig.asked(
        "dp-sgd", units=units, epsilon=epsilon, delta=DELTA, epochs=EPOCHS, batch_size=batch, max_grad_norm=CLIP,
    ).plan()  # fmt: skip


# The rule, the best rate and sparse supports on four tables.

MOST_ROWS, VALIDATION = 40_000, 0.2
TABLES = ("compas", "adult", "census-income", "diabetes130-pooled")
EPSILONS = (0.5, 1.0, 3.0)
CLIPS = (0.1, 0.3, 1.0)
TUNING_SEEDS, FINAL_SEEDS = range(2), range(100, 110)
DENSE = tuple(Setting(0.05 * 2**power, clip) for clip in CLIPS for power in range(13))
"""Thirteen rates and three clip norms."""
SPARSE = tuple(
    Setting(0.05 * 2**power, clip, ratio)
    for ratio in (0.2, 0.4, 0.7)
    for clip in CLIPS
    for power in range(4, 9)
)
"""Five rates, three clip norms and three ratios, for the larger batches."""
Key = tuple[str, bool, float]
"""Table, whether records have length one, and epsilon."""


@lru_cache(maxsize=2)
def sides(table: str, unit_norm: bool, stage: str) -> tuple[People, People]:
    """At most so many rows of training data, and the validation split for tuning or the test set after it."""
    bundle = load(table, unit_norm=unit_norm)
    used = bundle.validated(VALIDATION, 0) if stage == "tune" else bundle
    train = people(used.train)
    if len(train.targets) > MOST_ROWS and train.units == len(train.targets):
        kept = np.random.default_rng(5).permutation(len(train.targets))[:MOST_ROWS]
        train = People(train.rows[kept], train.targets[kept], np.arange(MOST_ROWS))
    return train, people(used.test)


def run_rates(
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
    plan = plan_for(train.units, epsilon, batch)
    weights, _ = simulate(train, plan, settings, seed, stage == "final")
    return {
        "stage": stage, "table": table, "unit_norm": unit_norm, "epsilon": epsilon, "batch_size": batch,
        "seed": seed, "units": train.units, "coordinates": train.rows.shape[1] + 1,
        "noise_multiplier": plan.phases[-1].noise_multiplier, "steps": plan.phases[-1].steps,
        "settings": [[one.step, one.clip_norm, one.ratio] for one in settings],
        "auc": [round(one, 5) for one in auc(held_out, weights)],
    }  # fmt: skip


def key_of(record: Mapping[str, Any]) -> Key:
    """What a record is of."""
    return record["table"], record["unit_norm"], record["epsilon"]


def tuned(found: Iterable[Mapping[str, Any]], clip: float | None) -> dict[Key, Setting]:
    """The dense setting with the best mean on the validation split, at the usual batch size and this clip norm."""
    sums: dict[Key, dict[Setting, list[float]]] = defaultdict(lambda: defaultdict(list))
    for record in found:
        if record["stage"] == "tune" and record["batch_size"] == usual_batch(record["units"]):
            for (step, bound, ratio), score in zip(record["settings"], record["auc"], strict=True):
                if ratio is None and clip in (None, bound):
                    sums[key_of(record)][Setting(step, bound)].append(score)
    return {
        key: max(scores, key=lambda one: sum(scores[one]) / len(scores[one])) for key, scores in sums.items()
    }


def rate_rule(units: int, coordinates: int, unit_norm: bool, epsilon: float) -> Setting:
    """What the classifier takes by itself."""
    plan = plan_for(units, epsilon, usual_batch(units))
    return Setting(rate_for_table(coordinates, coordinates - 1, unit_norm=unit_norm)(plan), CLIP)


def old_rate(units: int) -> Setting:
    """What it took until version 0.2."""
    return Setting(0.2 * math.sqrt(usual_batch(units) / 128), CLIP)


def final_table(found: Iterable[Mapping[str, Any]]) -> list[str]:
    """A row for each table and budget: rates, and what the rule loses against the tuned ones, by test AUC."""
    groups: dict[Key, list[Mapping[str, Any]]] = defaultdict(list)
    for record in found:
        if record["stage"] == "final":
            groups[key_of(record)].append(record)
    headings = ["table", "records", "epsilon", "rate: rule", "tuned", "AUC: rule", "tuned less rule",
                "rate and clip tuned less rule", "old rule less rule"]  # fmt: skip
    rows = []
    for (table, unit_norm, epsilon), records in sorted(groups.items()):
        own, at_clip = (records[0]["settings"][place][0] for place in (0, 1))
        mean = estimate([record["auc"][0] for record in records]).mean
        cells = [f"`{table}`", "length one" if unit_norm else "as encoded", f"{epsilon:g}", f"{own:.2g}"]
        cells += [f"{at_clip:.2g}", f"{mean:.4f}"]
        for place in (1, 2, 3):
            cells.append(estimate([one["auc"][place] - one["auc"][0] for one in records]).text())
        rows.append(cells)
    return markdown_table(headings, rows)


def simulate_missing() -> None:
    """Tuning on validation splits, then the test sets, then the table."""
    done = {
        (one["stage"], *key_of(one), one["batch_size"], one["settings"][0][2] is not None, one["seed"])
        for one in read_rows(RECORDS)
    }

    def run(stage: str, key: Key, larger: int, settings: Sequence[Setting], seed: int) -> None:
        batch = larger * usual_batch(sides(*key[:2], stage)[0].units)
        if (stage, *key, batch, settings[0].ratio is not None, seed) not in done:
            append_row(RECORDS, run_rates(stage, *key, larger, settings, seed))

    for key in itertools.product(TABLES, (True, False), EPSILONS):
        for larger, settings in ((1, DENSE), (4, DENSE), (4, SPARSE)):
            if settings is SPARSE and (not key[1] or key[0] == "diabetes130-pooled"):
                continue  # the hospital's sparse method was tuned with the library itself
            for seed in TUNING_SEEDS:
                run("tune", key, larger, settings, seed)
    best, best_clip = tuned(read_rows(RECORDS), CLIP), tuned(read_rows(RECORDS), None)
    for key in best:
        train, _ = sides(*key[:2], "final")
        rule = rate_rule(train.units, train.rows.shape[1] + 1, *key[1:])
        for seed in FINAL_SEEDS:
            run("final", key, 1, (rule, best[key], best_clip[key], old_rate(train.units)), seed)
    print("\n".join(final_table(read_rows(RECORDS))))
