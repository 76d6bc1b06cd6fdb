"""The study of wide data: `python -m sparsedp_experiments.wide.study CONFIG RESULTS [--only PART]`.

A row is one arm of one seed of one cell, with its scores at every learning rate. Rows that are there already are
not made again. Rates are chosen by the mean over the validation seeds, in `tables.py`; the test seeds only report.
"""

from __future__ import annotations

import argparse
import json
import time
import tomllib
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from sklearn.metrics import roc_auc_score
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import sparsedp
from sparsedp_experiments.wide.data import GENERATORS, WideData
from sparsedp_experiments.wide.simulate import ARMS, EMA, MOMENTUM, Training, oracle, simulate

CELL = ("data", "features", "causes", "epsilon", "records")
METHODS: Mapping[str, tuple[str, float | None]] = {
    "dense": ("dp-sgd", None),
    "adaptive": ("tp-adaptive", None),
    "energy 0.2": ("tp-topk", 0.2),
    "coherent 0.2": ("tp-coherent", 0.2),
}
"""The library's method and ratio for each arm."""


def cells(config: Mapping[str, Any], only: str | None) -> Iterator[dict[str, Any]]:
    """Every cell of every part of the configuration, in its order."""
    for part in config["parts"]:
        if only not in (None, part["name"]):
            continue
        for epsilon in part["epsilon"]:
            for causes in part["causes"]:
                yield {**config["training"], **part, "epsilon": epsilon, "causes": causes}


def run_cell(cell: Mapping[str, Any], seed: int, folder: Path | None) -> Iterator[dict[str, Any]]:
    """The rows of one seed of a cell."""
    make: Callable[..., WideData] = GENERATORS[cell["data"]]
    extra = {"folder": folder} if cell["data"] == "msprime" else {}
    data = make(cell["records"], cell["features"], cell["causes"], seed, **extra)
    if len(data.causes):
        yield {**_head(cell, seed, "none"), "arm": "best", **_scores(data, data.best)}
    runs = simulated if cell["engine"] == "simulator" else fitted
    yield from runs(data, cell, seed)


def simulated(data: WideData, cell: Mapping[str, Any], seed: int) -> Iterator[dict[str, Any]]:
    """All arms by the simulator."""
    plan = _plan(cell)
    phase = plan.phases[0]
    training = Training(phase.noise_multiplier, phase.steps, cell["batch_size"], cell["clip_norm"])
    rates = cell["rates"]
    found = simulate(data, training, rates, seed, tuple(cell.get("arms", ARMS)))
    if len(data.causes):
        found |= oracle(data, training, rates, seed)
    by_arm: dict[str, dict[float, dict[str, float]]] = {}
    for (arm, rate), (weights, kept) in found.items():
        by_arm.setdefault(arm, {})[rate] = {**_scores(data, _outputs(data, weights)), "kept": kept}
    for arm, scores in by_arm.items():
        yield {**_head(cell, seed, "simulator"), "arm": arm, "rates": {str(r): s for r, s in scores.items()}}


def fitted(data: WideData, cell: Mapping[str, Any], seed: int) -> Iterator[dict[str, Any]]:
    """Some arms by `sparsedp.fit`."""
    for arm in cell["arms"]:
        method, ratio = METHODS[arm]
        scores = {}
        for rate in cell["rates"]:
            result = fit_linear(data.x.matrix, data.y, method, rate, cell, seed, ratio)
            weights = next(result.model.parameters()).detach().squeeze(0)
            scores[str(float(rate))] = {**_scores(data, _outputs(data, weights)), "kept": result.k}
        yield {**_head(cell, seed, "fit"), "arm": arm, "rates": scores}


def fit_linear(
    x: Tensor,
    y: Tensor,
    method: str,
    rate: float,
    cell: Mapping[str, Any],
    seed: int,
    ratio: float | None = None,
) -> sparsedp.Result:
    """Logistic regression without a bias by `sparsedp.fit`; the learning rate is `rate` over the clip norm."""
    model = nn.Linear(x.shape[1], 1, bias=False)
    nn.init.zeros_(model.weight)

    def loss(output: Tensor, target: Tensor) -> Tensor:
        return nn.functional.binary_cross_entropy_with_logits(output.squeeze(-1), target, reduction="none")

    return sparsedp.fit(
        model,
        TensorDataset(x, y),
        loss,
        method=method,
        active_ratio=ratio,
        epsilon=cell["epsilon"],
        delta=cell["delta"],
        epochs=cell["epochs"],
        batch_size=cell["batch_size"],
        clip_norm=cell["clip_norm"],
        optimizer=lambda parameters: torch.optim.SGD(
            parameters, lr=rate / cell["clip_norm"], momentum=MOMENTUM
        ),
        ema_decay=EMA,
        seed=seed,
        progress=False,
    )


def _plan(cell: Mapping[str, Any]) -> Any:
    names = ("epsilon", "delta", "epochs", "batch_size", "clip_norm")
    return sparsedp.build_plan("dp-sgd", units=cell["records"], **{name: cell[name] for name in names})


def _head(cell: Mapping[str, Any], seed: int, engine: str) -> dict[str, Any]:
    return {"part": cell["name"], **{name: cell[name] for name in CELL}, "engine": engine, "seed": seed}


def _outputs(data: WideData, weights: Tensor) -> Tensor:
    return data.test_x.times(weights[:, None]).squeeze(1)


def _scores(data: WideData, outputs: Tensor) -> dict[str, float]:
    right = ((outputs > 0).float() == data.test_y).float().mean()
    return {"accuracy": round(float(right), 5), "auc": round(float(roc_auc_score(data.test_y, outputs)), 5)}


def main(arguments: Sequence[str] | None = None) -> None:
    """Make the rows that are missing."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("config", type=Path)
    parser.add_argument("results", type=Path)
    parser.add_argument("--only", help="the name of one part")
    parser.add_argument("--cache", type=Path, help="a folder for simulated genotypes")
    given = parser.parse_args(arguments)
    torch.set_num_threads(1)
    config = tomllib.loads(given.config.read_text())
    rows = (
        [json.loads(line) for line in given.results.read_text().splitlines()]
        if given.results.exists()
        else []
    )
    done = {tuple(row[name] for name in ("part", *CELL, "seed")) for row in rows}
    for cell in cells(config, given.only):
        for seed in cell["seeds"]:
            if (cell["name"], *(cell[name] for name in CELL), seed) in done:
                continue
            began = time.monotonic()
            found = list(run_cell(cell, seed, given.cache))
            with given.results.open("a") as file:
                file.writelines(json.dumps(row) + "\n" for row in found)
            print(
                *(cell[name] for name in ("name", *CELL)),
                seed,
                f"{time.monotonic() - began:.0f} s",
                flush=True,
            )


if __name__ == "__main__":
    main()
