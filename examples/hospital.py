"""Readmission within 30 days at epsilon 1, 3 and 8, per patient: every private method, tuned alike.

    SPARSEDP_DATA=... python examples/hospital.py --results experiments/results/hospital-sklearn.jsonl

Logistic regression through `SparseDPClassifier` on the hospital table (`diabetes130`). Learning rate and clip norm
are chosen for each method and epsilon on a fifth of the training patients, with a seed of its own; then the model is
trained on all training patients with three other seeds, and only then is the test set opened. Every fit is a line of
the results file, so a run that was stopped goes on where it was.

The table is for comparing methods. For a release, the fits made to tune would have to be paid for too.
"""

from __future__ import annotations

import argparse
import itertools
import json
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from statistics import mean, stdev
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from rich.console import Console
from rich.table import Table
from scipy import sparse
from scipy.stats import t as student
from sklearn.linear_model import LogisticRegression
from sklearn.metrics import roc_auc_score
from sklearn.preprocessing import normalize

from sparsedp import list_methods
from sparsedp.sklearn import SparseDPClassifier
from sparsedp_experiments.data import DataBundle, Split, diabetes130

EPSILONS = (1.0, 3.0, 8.0)
SEEDS = (0, 1, 2)
TUNING_SEED = 100
RATES = (4.0, 16.0)
CLIP_NORMS = (0.1, 0.4, 1.6)
INVERSE_PENALTIES = (0.1, 0.3, 1.0, 3.0, 10.0)
EPOCHS, BATCH_SIZE = 10, 2048
FLAGGED = 0.2

Row = dict[str, Any]


@dataclass(frozen=True)
class Sheet:
    """A split as scikit-learn wants it."""

    features: sparse.csr_matrix
    labels: npt.NDArray[np.int64]
    patients: npt.NDArray[np.int64]


def sheet(split: Split) -> Sheet:
    given = split.features
    entries = (given.weights.numpy(), given.columns.numpy(), given.starts.numpy())
    matrix = sparse.csr_matrix(entries, shape=(len(given), given.width))
    return Sheet(matrix, split.targets.numpy(), split.units.numpy())


@dataclass(frozen=True)
class Results:
    """One line per fit; a fit that is already there is not made again."""

    path: Path

    def rows(self) -> list[Row]:
        """Every fit so far."""
        return [json.loads(line) for line in self.path.read_text().splitlines()] if self.path.exists() else []

    def get(self, key: Mapping[str, Any], measure: Callable[[], Row]) -> Row:
        """The row of a fit, made now if it is not there."""
        for row in self.rows():
            if all(row.get(name) == value for name, value in key.items()):
                return row
        start = time.process_time()
        row = {**key, **measure(), "cpu_seconds": round(time.process_time() - start, 1)}
        with self.path.open("a") as file:
            file.write(json.dumps(row) + "\n")
        return row


def measures(scores: npt.NDArray[np.float64], y: npt.NDArray[np.int64]) -> Row:
    """AUC, and the share of readmissions among the fifth of admissions with the highest scores."""
    flagged = np.argsort(-scores, kind="stable")[: round(FLAGGED * len(y))]
    return {"auc": round(roc_auc_score(y, scores), 5), "recall": round(y[flagged].sum() / y.sum(), 5)}


def private_fit(train: Sheet, held_out: Sheet, setting: Mapping[str, Any], seed: int) -> Row:
    model = SparseDPClassifier(
        **setting,
        classes=[0, 1],
        unit="patient",
        normalize="record",
        epochs=EPOCHS,
        batch_size=BATCH_SIZE,
        random_state=seed,
    )
    model.fit(train.features, train.labels, units=train.patients)
    spent = {"epsilon_spent": model.epsilon_, "delta": model.delta_, "patients": model.n_units_}
    return {
        **measures(model.decision_function(held_out.features), held_out.labels),
        **spent,
        "d": model.result_.d,
    }


def open_fit(train: Sheet, held_out: Sheet, inverse_penalty: float) -> Row:
    model = LogisticRegression(C=inverse_penalty, max_iter=1000).fit(normalize(train.features), train.labels)
    return measures(model.decision_function(normalize(held_out.features)), held_out.labels)


def compare(
    bundle: DataBundle,
    results: Results,
    methods: Iterable[str],
    epsilons: Iterable[float] = EPSILONS,
    seeds: Iterable[int] = SEEDS,
) -> list[Row]:
    """Tune on held-out training patients, then measure on the test set."""
    inner = bundle.validated(0.2)
    train, tuning, validation = (sheet(split) for split in (bundle.train, inner.train, inner.test))
    chosen = [
        best_setting(tuning, validation, results, m, e) for m, e in itertools.product(methods, epsilons)
    ]
    unprotected = {"method": "not private"}
    penalties = [
        results.get(
            {"stage": "tune", **unprotected, "inverse_penalty": c},
            lambda c=c: open_fit(tuning, validation, c),
        )
        for c in INVERSE_PENALTIES
    ]
    penalty = max(penalties, key=lambda row: row["auc"])["inverse_penalty"]

    test = sheet(bundle.test)
    key = {"stage": "test", **unprotected, "inverse_penalty": penalty}
    rows = [results.get(key, lambda: open_fit(train, test, penalty))]
    for setting, seed in itertools.product(chosen, seeds):
        key = {"stage": "test", **setting, "seed": seed}
        rows.append(results.get(key, lambda s=setting, seed=seed: private_fit(train, test, s, seed)))
    return rows


def best_setting(train: Sheet, validation: Sheet, results: Results, method: str, epsilon: float) -> Row:
    """The learning rate and clip norm with the highest validation AUC."""
    settings = [
        {"method": method, "epsilon": epsilon, "lr": lr, "clip_norm": clip_norm}
        for lr, clip_norm in itertools.product(RATES, CLIP_NORMS)
    ]
    aucs = [
        results.get(
            {"stage": "tune", **setting, "seed": TUNING_SEED},
            lambda s=setting: private_fit(train, validation, s, TUNING_SEED),
        )["auc"]
        for setting in settings
    ]
    return settings[aucs.index(max(aucs))]


def table(rows: Iterable[Row]) -> list[list[str]]:
    """One line per method: AUC and recall at each epsilon, mean and standard deviation over seeds."""
    tested = [row for row in rows if row["stage"] == "test"]
    epsilons = sorted({row["epsilon"] for row in tested if "epsilon" in row})
    lines = [["method", *(f"{what}, epsilon {e:g}" for e in epsilons for what in ("AUC", "recall"))]]
    for method in dict.fromkeys(row["method"] for row in tested):
        cells = [method]
        for epsilon, what in itertools.product(epsilons, ("auc", "recall")):
            found = [
                r[what] for r in tested if r["method"] == method and r.get("epsilon", epsilon) == epsilon
            ]
            spread = f" ± {stdev(found):.3f}" if len(found) > 1 else ""
            cells.append(f"{mean(found):.3f}{spread}")
        lines.append(cells)
    return lines


def against_dense(rows: Iterable[Row]) -> list[list[str]]:
    """AUC minus that of dp-sgd with the same seed: mean and 95 % interval (Student's t) over seeds."""
    aucs = {
        (r["method"], r["epsilon"], r["seed"]): r["auc"] for r in rows if r["stage"] == "test" and "seed" in r
    }
    epsilons, seeds = sorted({e for _, e, _ in aucs}), sorted({s for _, _, s in aucs})
    lines = [["method", *(f"AUC - dp-sgd, epsilon {e:g}" for e in epsilons)]]
    for method in dict.fromkeys(m for m, _, _ in aucs if m != "dp-sgd"):
        cells = [method]
        for e in epsilons:
            gains = [aucs[method, e, s] - aucs["dp-sgd", e, s] for s in seeds]
            half = student.ppf(0.975, len(gains) - 1) * stdev(gains) / len(gains) ** 0.5
            cells.append(f"{mean(gains):+.4f} ± {half:.4f}")
        lines.append(cells)
    return lines


def markdown(lines: list[list[str]]) -> str:
    head, *body = lines
    return "\n".join("| " + " | ".join(line) + " |" for line in [head, ["---"] * len(head), *body])


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--results", type=Path, default=Path("hospital-sklearn.jsonl"))
    parser.add_argument("--markdown", action="store_true", help="print the tables in Markdown")
    options = parser.parse_args()
    torch.set_num_threads(1)
    private = [method.name for method in list_methods()]
    bundle = diabetes130(diagnoses="pooled", unit_norm=False)
    rows = compare(bundle, Results(options.results), private)
    titles = {
        "Readmission within 30 days, per patient, test set": table(rows),
        "The same against dense DP-SGD, seed by seed": against_dense(rows),
    }
    for title, (head, *body) in titles.items():
        if options.markdown:
            print(markdown([head, *body]), end="\n\n")
            continue
        shown = Table(*head, title=title)
        for line in body:
            shown.add_row(*line)
        Console().print(shown)


if __name__ == "__main__":
    main()
