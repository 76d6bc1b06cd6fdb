"""RS's Table 3: what sampling by partition costs without amplification, and what it does to accuracy."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from scipy.optimize import brentq
from scipy.special import log_ndtr

from sparsedp._validate import NONE
from sparsedp_experiments.pages import words
from sparsedp_experiments.pages.noise import Training, noise_multiplier
from sparsedp_experiments.pages.paper import label
from sparsedp_experiments.pages.study import Record
from sparsedp_experiments.runs.config import Contrast
from sparsedp_experiments.runs.results import read_rows
from sparsedp_experiments.runs.table import make_rows

DELTA = 1e-5
UNITS, BATCH_SIZE, EPOCHS = 50_000, 1000, 48
"""CIFAR-10 with the batch and the epochs of RS's published command."""


@dataclass(frozen=True, slots=True)
class Cost:
    """The noise Poisson sampling needs, and what partitions cost with that noise."""

    epsilon: float
    accountant: str
    noise_multiplier: float
    partition_epsilon: float


def gaussian_epsilon(noise_multiplier: float, compositions: int, delta: float = DELTA) -> float:
    """Epsilon of so many Gaussian mechanisms of sensitivity one (Balle and Wang 2018, Theorem 8).

    With zero-out neighbours a record is in one batch of every epoch, so `compositions` is the number of epochs.
    """
    mu = math.sqrt(compositions) / noise_multiplier

    def excess(epsilon: float) -> float:
        first = math.exp(log_ndtr(mu / 2 - epsilon / mu))
        second = math.exp(epsilon + log_ndtr(-mu / 2 - epsilon / mu))
        return first - second - delta

    return 0.0 if excess(0.0) <= 0 else float(brentq(excess, 0.0, mu * mu / 2 + mu * 40, xtol=1e-10))


def costs() -> tuple[Cost, ...]:
    """At RS's two epsilons, with the accountant it used and with PLD."""
    training = Training(UNITS, BATCH_SIZE, EPOCHS)
    found = []
    for epsilon in (3.0, 1.0):
        for accountant in ("rdp", "pld"):
            noise = noise_multiplier(training, epsilon, accountant)
            found.append(Cost(epsilon, accountant, noise, gaussian_epsilon(noise, EPOCHS)))
    return tuple(found)


def price_table() -> list[str]:
    """What partitions cost with the noise of Poisson sampling. Needs no training."""
    rows = [
        [
            f"{one.epsilon:g}",
            one.accountant.upper(),
            f"{one.noise_multiplier:.2f}",
            f"{one.partition_epsilon:.1f}",
        ]
        for one in costs()
    ]
    headings = ["epsilon, Poisson", "accountant", "noise multiplier", "epsilon of partitions with that noise"]
    return words.markdown_table(headings, rows)


@dataclass(frozen=True, slots=True)
class Partitions:
    """The trainings of `experiments/sparsedp_experiments/partition`, as a claim can be tested on them."""

    axes: Mapping[str, Sequence[str]]
    records: tuple[Record, ...]
    name: str = "rs-table3"


def read_partitions(root: Path) -> Partitions:
    """Every record of `experiments/sparsedp_experiments/partition` there is."""
    rows = read_rows(root / "experiments" / "results" / "rs.jsonl")
    records = [_as_record(row) for row in rows if row["experiment"] == "rs-table3"]
    axes: dict[str, list[str]] = {"epsilon": [], "method": [], "sampling": []}
    for record in records:
        for axis, found in record["cell"].items():
            axes[axis] += [] if found in axes[axis] else [found]
    return Partitions(axes, tuple(records))


def trained_table(found: Partitions) -> list[str]:
    """Accuracy with both kinds of batches at the same noise, and the epsilon each really has."""
    if not found.records:
        return []
    first = found.records[0]["settings"]
    rows = [
        [
            *row.cell.values(),
            str(row.score.count),
            words.mean_text(row.score, "accuracy"),
            words.difference_text(row.difference, "accuracy"),
            NONE if row.epsilon is None else f"{row.epsilon:.4g}",
        ]
        for row in make_rows(found.records, "accuracy", Contrast("sampling", "Poisson"))
    ]
    said = (
        f"Trained with both (`{first['model']}` on `{first['dataset']}`, {first['epochs']} epochs, batch "
        f"{first['batch_size']:,}; `configs/partition/rs-table3.toml`), test accuracy, final epoch, at the noise "
        "Poisson sampling needs for the epsilon named:"
    )
    headings = ["epsilon named", "method", "sampling", "seeds", "accuracy, %", "less Poisson", "true epsilon"]
    return [said, "", *words.markdown_table(headings, rows), ""]


def _as_record(content: Mapping[str, Any]) -> Record:
    settings = content["settings"]
    return {
        "cell": {
            "epsilon": label(settings["epsilon"]),
            "method": settings["method"],
            "sampling": settings["sampling"],
        },
        "seed": settings["seed"],
        "metrics": {"accuracy": content["accuracy"]},
        "epsilon_spent": content["epsilon"],
        "active_ratio": settings["active_ratio"],
        "settings": settings,
    }
