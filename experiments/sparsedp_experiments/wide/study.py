"""The study of wide data: `python -m sparsedp_experiments.wide.study run|table [--only PART]`.

A row is one arm of one seed of one cell, with its scores at every learning rate. Rows that are there already are
not made again. Rates are chosen by the mean over the validation seeds; the test seeds only report.
"""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from sklearn.metrics import roc_auc_score
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import sparsedp
from sparsedp.methods import Method
from sparsedp.methods.auto import ADAPTIVE
from sparsedp.training.planning import changed_method
from sparsedp_experiments.runs.grid import CONFIGS, RESULTS, read_toml
from sparsedp_experiments.runs.results import Estimate, append_row, estimate, paired_difference, read_rows
from sparsedp_experiments.wide.data import GENERATORS, WideData
from sparsedp_experiments.wide.simulate import EMA, MOMENTUM, Training, oracle, simulate

RECORDS = RESULTS / "wide.jsonl"
CELL = ("data", "features", "causes", "epsilon", "records")
METHODS: Mapping[str, str | Method] = {
    "dense": "dp-sgd",
    "adaptive": "tp-adaptive",
    "raw": ADAPTIVE,
    "energy": "tp-topk",
    "coherent": "tp-coherent",
    "random": "tp-rand",
    "oracle": "dp-sgd",
}
"""The library's method for the first word of an arm; the second is the ratio."""
Named = tuple[str, float]
"""An arm and its rate."""
Found = dict[Named, tuple[Tensor, int]]
VALIDATION = 100
"""Seeds from here on choose the rate of every arm; the others report."""


def cells(config: Mapping[str, Any], only: str | None) -> Iterator[dict[str, Any]]:
    """Every cell of every part of the configuration, in its order."""
    for part in config["parts"]:
        if only not in (None, part["name"]):
            continue
        for epsilon in part["epsilon"]:
            for causes in part["causes"]:
                yield {**config["training"], **part, "epsilon": epsilon, "causes": causes}


def run_cell(
    cell: Mapping[str, Any], seed: int, folder: Path | None, rates: Mapping[str, str]
) -> Iterator[dict[str, Any]]:
    """The rows of one seed of a cell; `rates` are those that were chosen for its arms, if any."""
    make: Callable[..., WideData] = GENERATORS[cell["data"]]
    extra = {"folder": folder} if cell["data"].startswith("msprime") else {}
    data = make(cell["records"], cell["features"], cell["causes"], seed, **extra)
    if len(data.causes):
        yield {**_head(cell, seed, "none"), "arm": "best", **_scores(data, data.best)}
    named = [
        (arm, rate)
        for arm in cell["arms"]
        for rate in (cell["rates"] if seed >= VALIDATION else [float(rates[arm])])
    ]
    found = (simulated if cell["engine"] == "simulator" else fitted)(data, cell, named, seed)
    scores: dict[str, dict[str, dict[str, float]]] = {}
    for arm, rate in named:
        weights, kept = found[arm, rate]
        scores.setdefault(arm, {})[str(rate)] = {**_scores(data, data.test_x.times(weights)), "kept": kept}
    for arm, by_rate in scores.items():
        yield {**_head(cell, seed, cell["engine"]), "arm": arm, "rates": by_rate}


def best_rates(rows: Sequence[Mapping[str, Any]], metric: str) -> dict[str, str]:
    """For each arm of the rows of a cell, the rate of the best mean over the validation seeds."""
    found: dict[str, dict[str, list[float]]] = {}
    for row in rows:
        for rate, scores in row.get("rates", {}).items():
            if row["seed"] >= VALIDATION:
                found.setdefault(row["arm"], {}).setdefault(rate, []).append(scores[metric])
    return {
        arm: max(rates, key=lambda rate: sum(rates[rate]) / len(rates[rate])) for arm, rates in found.items()
    }


def same_cell(row: Mapping[str, Any], cell: Mapping[str, Any]) -> bool:
    """Whether a row is of this cell, or of the same one in the part that it takes its rates of (`rates_of`)."""
    parts = (cell["name"], cell.get("rates_of"))
    return row["part"] in parts and all(row[name] == cell[name] for name in CELL)


def simulated(data: WideData, cell: Mapping[str, Any], named: Sequence[Named], seed: int) -> Found:
    """Weights and size of the support of each arm and rate, by the simulator."""
    names = ("epsilon", "delta", "epochs", "batch_size", "max_grad_norm")
    plan = sparsedp.plan("dp-sgd", units=cell["records"], **{name: cell[name] for name in names})
    phase = plan.phases[0]
    training = Training(phase.noise_multiplier, phase.steps, cell["batch_size"], cell["max_grad_norm"])
    known = [one for one in named if one[0] == "oracle"]
    found = simulate(data, training, [one for one in named if one not in known], seed)
    found |= oracle(data, training, known, seed) if known else {}
    return {one: (weights[:, None], kept) for one, (weights, kept) in found.items()}


def fitted(data: WideData, cell: Mapping[str, Any], named: Sequence[Named], seed: int) -> Found:
    """The same by `sparsedp.fit`."""
    found = {one: fit_linear(data, *one, cell, seed) for one in named}
    return {one: (weights, result.k) for one, (weights, result) in found.items()}


def fit_linear(
    data: WideData, arm: str, rate: float, cell: Mapping[str, Any], seed: int
) -> tuple[Tensor, sparsedp.Result]:
    """A linear model by `sparsedp.fit`, and its weights; the learning rate is `rate` over the clip norm.

    `oracle` trains on the causes alone, with the clip norm of their share.
    """
    name, _, ratio = arm.partition(" ")
    columns = data.causes if name == "oracle" else torch.arange(data.x.width)
    max_grad_norm = cell["max_grad_norm"] * (len(columns) / data.x.width) ** 0.5
    binary = data.y.is_floating_point()
    model = nn.Linear(len(columns), 1 if binary else int(data.y.max()) + 1, bias=False)
    nn.init.zeros_(model.weight)

    def loss(output: Tensor, target: Tensor) -> Tensor:
        if binary:
            return nn.functional.binary_cross_entropy_with_logits(
                output.squeeze(-1), target, reduction="none"
            )
        return nn.functional.cross_entropy(output, target, reduction="none")

    result = sparsedp.fit(
        model,
        TensorDataset(data.x.at(columns).matrix if name == "oracle" else data.x.matrix, data.y),
        loss,
        method=changed_method(METHODS[name], active_ratio=float(ratio) if ratio else None),
        epsilon=cell["epsilon"],
        delta=cell["delta"],
        epochs=cell["epochs"],
        batch_size=cell["batch_size"],
        max_grad_norm=max_grad_norm,
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=rate / max_grad_norm, momentum=MOMENTUM),
        ema_decay=EMA,
        seed=seed,
        progress=False,
    )
    weights = torch.zeros(data.x.width, model.out_features)
    weights[columns] = next(result.model.parameters()).detach().T
    return weights, result


def _head(cell: Mapping[str, Any], seed: int, engine: str) -> dict[str, Any]:
    return {"part": cell["name"], **{name: cell[name] for name in CELL}, "engine": engine, "seed": seed}


def _scores(data: WideData, outputs: Tensor) -> dict[str, float]:
    if not data.y.is_floating_point():
        return {"accuracy": round(float((outputs.argmax(1) == data.test_y).float().mean()), 5)}
    outputs = outputs.flatten()
    right = ((outputs > 0).float() == data.test_y).float().mean()
    return {"accuracy": round(float(right), 5), "auc": round(float(roc_auc_score(data.test_y, outputs)), 5)}


Row = Mapping[str, Any]
RANKED = ("msprime", "msprime-array", "blocks", "hospital", "molecules")
"""Data whose metric is AUC; the others' is accuracy."""


Cell = tuple[dict[str, Any], dict[str, dict[int, float]], dict[str, float]]
"""What it is, and for each of its arms the scores of the test seeds at its rate and the mean size of its support."""


def cells_of(rows: Sequence[Row]) -> Iterator[Cell]:
    """Every cell of the study."""
    by_cell: dict[tuple[Any, ...], list[Row]] = {}
    for row in rows:
        by_cell.setdefault((row["part"], *(row[name] for name in CELL)), []).append(row)
    for name, found in by_cell.items():
        cell = dict(zip(("part", *CELL), name, strict=True))
        metric = "auc" if cell["data"] in RANKED else "accuracy"
        chosen = best_rates(found, metric)
        scores: dict[str, dict[int, float]] = {}
        kept: dict[str, list[float]] = {}
        for row in found:
            if row["seed"] >= VALIDATION:
                continue
            rates = row.get("rates", {"": row})
            one = rates[chosen[row["arm"]] if row["arm"] in chosen else next(iter(rates))]
            scores.setdefault(row["arm"], {})[row["seed"]] = one[metric]
            kept.setdefault(row["arm"], []).append(one.get("kept", math.nan))
        yield cell, scores, {arm: float(np.mean(sizes)) for arm, sizes in kept.items()}


def table(rows: Sequence[Row]) -> str:
    """Every cell and arm: mean over the test seeds, and the paired gain over dense with its 95 % interval."""
    heads = "| part | data | d | causes | ε | N | arm | kept | mean | over dense | seeds |"
    lines = [heads, "|---" * (heads.count("|") - 1) + "|"]
    for cell, scores, kept in cells_of(rows):
        for arm, by_seed in scores.items():
            gain = paired_difference(by_seed, scores.get("dense", {}))
            about = (*(cell[name] for name in ("part", *CELL)), arm, f"{kept[arm]:.0f}")
            lines.append(
                f"| {' | '.join(map(str, about))} | {estimate(list(by_seed.values())).mean:.4f} | "
                f"{'' if gain is None or arm == 'dense' else _interval(gain)} | {len(by_seed)} |"
            )
    return "\n".join(lines) + "\n"


def _interval(gain: Estimate) -> str:
    inside = "" if gain.low is None or gain.high is None else f" [{gain.low:+.4f}, {gain.high:+.4f}]"
    return f"{gain.mean:+.4f}{inside}"


def main(arguments: Sequence[str] | None = None) -> None:
    """Make the rows that are missing, or print the table of those that are there."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("doing", choices=["run", "table"])
    parser.add_argument("--only", help="the name of one part")
    parser.add_argument("--cache", type=Path, help="a folder for simulated genotypes")
    given = parser.parse_args(arguments)
    if given.doing == "table":
        print(table(read_rows(RECORDS)), end="")
        return
    torch.set_num_threads(1)
    for cell in cells(read_toml(CONFIGS / "wide.toml"), given.only):
        for seed in cell["seeds"]:
            there = [row for row in read_rows(RECORDS) if same_cell(row, cell)]
            if any(row["seed"] == seed and row["part"] == cell["name"] for row in there):
                continue
            began = time.monotonic()
            for row in list(
                run_cell(cell, seed, given.cache, best_rates(there, cell.get("metric", "accuracy")))
            ):
                append_row(RECORDS, row)
            took = f"{time.monotonic() - began:.0f} s"
            print(*(cell[name] for name in ("name", *CELL)), seed, took, flush=True)


if __name__ == "__main__":
    main()
