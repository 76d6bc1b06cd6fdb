"""Which learning rate a private logistic regression on a table wants, by simulating many rates at once.

The simulation is in NumPy and written apart from the library, which it takes the plan's noise and number of steps
from: the same sampling of units, clip, noise and momentum. All settings share the batches. `sweep table-rates`
simulates what has no record and prints the table.
"""

from __future__ import annotations

import json
import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from scipy import sparse
from scipy.stats import rankdata

from sparsedp.methods.plan_config import PlanConfig
from sparsedp.optimizers.factory import rate_for_table
from sparsedp.privacy.plan import Plan
from sparsedp_experiments.data.bundle import DataBundle, Sparse, Split
from sparsedp_experiments.data.registry import load
from sparsedp_experiments.runs.results import Estimate, estimate
from sparsedp_experiments.runs.tables import markdown_table

MOMENTUM = 0.9
WARM_UP = 0.3

Array = npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class Setting:
    """A rate times the clip norm, the clip norm, and for tp-coherent the share of coordinates that stay."""

    step: float
    clip_norm: float
    ratio: float | None = None


@dataclass(frozen=True, slots=True, eq=False)
class People:
    """Rows, targets, and the rows of each unit."""

    rows: sparse.csr_matrix
    targets: Array
    owner: npt.NDArray[np.int64]

    @property
    def units(self) -> int:
        """How many there are."""
        return int(self.owner.max()) + 1


def people(split: Split) -> People:
    """A side of a data set."""
    features = split.features
    assert isinstance(features, Sparse)
    parts = (features.weights.numpy(), features.columns.numpy(), features.starts.numpy())
    owner = np.arange(len(split)) if split.units is None else np.unique(split.units, return_inverse=True)[1]
    rows = sparse.csr_matrix(parts, shape=(len(split), features.width))
    return People(rows, split.targets.numpy().astype(np.float32), owner)


def simulate(
    train: People, plan: Plan, settings: Sequence[Setting], seed: int, paired: bool = False
) -> Array:
    """The weights of every setting after the plan's steps: [features + 1, settings], the intercept last.

    `paired` gives all settings the same noise in units of its scale, as runs of the library with one seed have.
    """
    phase = plan.phases[-1]
    steps, rng = sum(one.steps for one in plan.phases), np.random.default_rng(seed)
    clip = np.array([one.clip_norm for one in settings], np.float32)
    rate = np.array([one.step / one.clip_norm for one in settings], np.float32)
    weights = np.zeros((train.rows.shape[1] + 1, len(settings)), np.float32)
    speed, seen, active = np.zeros_like(weights), np.zeros_like(weights), np.ones_like(weights)
    sparse_ones = any(one.ratio is not None for one in settings)
    draw = _Sampler(train, phase.sampling_rate, rng)
    expected = phase.sampling_rate * train.units
    for step in range(steps):
        chosen = draw()
        rows, targets = train.rows[chosen], train.targets[chosen]
        total = _clipped_sum(rows, targets, weights, active, clip, sparse_ones)
        noise = rng.standard_normal((len(weights), 1 if paired else len(settings)), dtype=np.float32)
        total += noise * (phase.noise_multiplier * clip)
        released = total / np.float32(expected) * active
        if sparse_ones and step < WARM_UP * steps:
            seen += released
            if step + 1 >= WARM_UP * steps:
                active = _supports(seen, settings)
                speed *= active
        speed = np.float32(MOMENTUM) * speed + released
        weights -= rate * speed * active
    return weights


def auc(held_out: People, weights: Array) -> list[float]:
    """Of every setting, by ranks."""
    scores = held_out.rows @ weights[:-1] + weights[-1]
    positive = held_out.targets == 1
    count = int(positive.sum())
    ranks = np.stack([rankdata(scores[:, one]) for one in range(scores.shape[1])], axis=1)
    above = ranks[positive].sum(axis=0) - count * (count + 1) / 2
    return [float(one) for one in above / (count * (len(positive) - count))]


def bundle_for(bundle: DataBundle, validation: float | None, most: int) -> tuple[People, People]:
    """Both sides; with `validation` that share of the training units is held out instead. At most so many rows."""
    used = bundle if validation is None else bundle.validated(validation, 0)
    train = people(used.train)
    if len(train.targets) > most and train.units == len(train.targets):
        kept = np.random.default_rng(5).permutation(len(train.targets))[:most]
        train = People(train.rows[kept], train.targets[kept], np.arange(most))
    return train, people(used.test)


class _Sampler:
    """Each unit by its own coin, then one of its rows."""

    def __init__(self, train: People, share: float, rng: np.random.Generator) -> None:
        self.units, self.share, self.rng = train.units, share, rng
        self.order = np.argsort(train.owner, kind="stable")
        self.counts = np.bincount(train.owner)
        self.first = np.concatenate([[0], np.cumsum(self.counts)[:-1]])

    def __call__(self) -> npt.NDArray[np.int64]:
        units = np.flatnonzero(self.rng.random(self.units) < self.share)
        if self.units == len(self.order):
            return units
        inside = (self.rng.random(len(units)) * self.counts[units]).astype(np.int64)
        return self.order[self.first[units] + inside]


def _clipped_sum(
    rows: sparse.csr_matrix, targets: Array, weights: Array, active: Array, clip: Array, sparse_ones: bool
) -> Array:
    """The sum of the clipped gradients of every setting."""
    squares = rows.multiply(rows)
    norms = np.sqrt(squares @ active[:-1] + active[-1]) if sparse_ones else _lengths(squares)
    logits = np.clip(rows @ weights[:-1] + weights[-1], -30, 30)
    residual = 1 / (1 + np.exp(-logits)) - targets[:, None]
    residual *= np.minimum(1, clip / (np.abs(residual) * norms + 1e-12))
    return np.concatenate([rows.T @ residual, residual.sum(axis=0, keepdims=True)]).astype(np.float32)


def _lengths(squares: sparse.csr_matrix) -> Array:
    found: Array = np.sqrt(np.asarray(squares.sum(axis=1)) + 1).astype(np.float32)
    return found


def _supports(seen: Array, settings: Sequence[Setting]) -> Array:
    """Ones where a setting goes on: the coordinates with the largest summed release (the coherent score)."""
    found = np.ones_like(seen)
    for one, setting in enumerate(settings):
        if setting.ratio is not None:
            kept = round(setting.ratio * len(seen))
            found[np.argsort(-np.abs(seen[:, one]), kind="stable")[kept:], one] = 0
    return found


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
    plan = PlanConfig.asked(
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


def read_records(path: Path = RECORDS) -> Iterator[dict[str, Any]]:
    """Every line there is."""
    if path.exists():
        for line in path.read_text(encoding="utf-8").splitlines():
            yield json.loads(line)


def add_record(record: dict[str, Any], path: Path = RECORDS) -> None:
    """One more line."""
    with path.open("a", encoding="utf-8") as stream:
        stream.write(json.dumps(record) + "\n")


Key = tuple[str, bool, float]
"""Table, whether records have length one, and epsilon."""
CLIP = 1.0
MARGIN = 0.002


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
    batch = usual_batch(units)
    plan = PlanConfig.asked(
        "dp-sgd",
        units=units,
        epsilon=epsilon,
        delta=DELTA,
        epochs=EPOCHS,
        batch_size=batch,
        max_grad_norm=CLIP,
    ).plan()
    return Setting(rate_for_table(coordinates, coordinates - 1, unit_norm=unit_norm)(plan), CLIP)


def old_rate(units: int) -> Setting:
    """What it took until version 0.2."""
    return Setting(0.2 * math.sqrt(usual_batch(units) / 128), CLIP)


def final_table(found: Iterable[Mapping[str, Any]]) -> list[str]:
    """A row for each table and budget: rates, and what the rate_rule loses against the tuned ones, by test AUC."""
    groups: dict[Key, list[Mapping[str, Any]]] = defaultdict(list)
    for record in found:
        if record["stage"] == "final":
            groups[key_of(record)].append(record)
    headings = ["table", "records", "epsilon", "rate: rate_rule", "tuned", "AUC: rate_rule", "tuned less rate_rule",
                "rate and clip tuned less rate_rule", "old rate_rule less rate_rule"]  # fmt: skip
    rows = []
    for (table, unit_norm, epsilon), records in sorted(groups.items()):
        own, at_clip = (records[0]["settings"][place][0] for place in (0, 1))
        scores = [estimate([record["auc"][0] for record in records])]
        scores += [
            estimate([record["auc"][place] - record["auc"][0] for record in records]) for place in (1, 2, 3)
        ]
        rows.append(
            [f"`{table}`", "length one" if unit_norm else "as encoded", f"{epsilon:g}", f"{own:.2g}",
             f"{at_clip:.2g}", f"{scores[0].mean:.4f}", *map(_rate_difference, scores[1:])]
        )  # fmt: skip
    return markdown_table(headings, rows)


def _rate_difference(found: Estimate) -> str:
    if found.low is None or found.high is None:
        return f"{found.mean:+.4f}"
    return f"{found.mean:+.4f} ({found.low:+.4f} to {found.high:+.4f})"


TUNING_SEEDS, FINAL_SEEDS = range(2), range(100, 110)


def simulate_missing() -> None:
    """Tuning on validation splits, then the test sets, then the page."""
    done = {
        (one["stage"], *key_of(one), one["batch_size"], _kind(one), one["seed"]) for one in read_records()
    }
    for table in TABLES:
        for unit_norm in (True, False):
            for epsilon in EPSILONS:
                for larger, settings in ((1, DENSE), (4, DENSE), (4, SPARSE)):
                    if settings is SPARSE and (not unit_norm or table == "diabetes130-pooled"):
                        continue  # the hospital's sparse method was tuned with the library itself
                    for seed in TUNING_SEEDS:
                        batch = larger * batch_of(table, unit_norm, "tune")
                        kind = "sparse" if settings is SPARSE else "dense"
                        if ("tune", table, unit_norm, epsilon, batch, kind, seed) not in done:
                            add_record(run_rates("tune", table, unit_norm, epsilon, larger, settings, seed))
    best, best_clip = tuned(read_records(), 1.0), tuned(read_records(), None)
    for table, unit_norm, epsilon in best:
        train, _ = sides(table, unit_norm, "final")
        settings = (
            rate_rule(train.units, train.rows.shape[1] + 1, unit_norm, epsilon),
            best[table, unit_norm, epsilon],
            best_clip[table, unit_norm, epsilon],
            old_rate(train.units),
        )
        batch = usual_batch(train.units)
        for seed in FINAL_SEEDS:
            if ("final", table, unit_norm, epsilon, batch, "dense", seed) not in done:
                add_record(run_rates("final", table, unit_norm, epsilon, 1, settings, seed))
    print("\n".join(final_table(read_records())))


def _kind(record: dict[str, object]) -> str:
    settings = record["settings"]
    assert isinstance(settings, list)
    return "dense" if settings[0][2] is None else "sparse"
