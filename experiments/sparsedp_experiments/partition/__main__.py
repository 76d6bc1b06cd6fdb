"""`python -m sparsedp_experiments.partition`: train what has no record yet, one line of JSON per training."""

from __future__ import annotations

import itertools
import time
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from rich.progress import track

from sparsedp._serialization import canonical, sha256
from sparsedp_experiments.partition.train import Training, train
from sparsedp_experiments.runs.datasets import load_data
from sparsedp_experiments.runs.results import append_row, commit, read_rows
from sparsedp_experiments.runs.settings import Settings

ROOT = Path(__file__).parents[3]
CONFIG = ROOT / "experiments" / "configs" / "partition.toml"
RECORDS = ROOT / "experiments" / "results" / "rs.jsonl"
NAME = "rs-table3"
_SHARED = ("model", "delta", "epochs", "batch_size", "clip_norm", "lr", "momentum")


def read_config(path: Path = CONFIG) -> dict[str, Any]:
    """The experiment."""
    found: dict[str, Any] = tomllib.loads(path.read_text(encoding="utf-8"))[NAME]
    return found


def trainings(config: Mapping[str, Any]) -> Iterator[Training]:
    """Every training, seeds outermost."""
    shared = {name: config[name] for name in _SHARED}
    cells = itertools.product(config["seeds"], config["epsilon"], config["method"], config["sampling"])
    for seed, epsilon, (method, ratio), sampling in cells:
        yield Training(
            **shared, epsilon=epsilon, method=method, active_ratio=ratio, sampling=sampling, seed=seed
        )


def settings_of(config: Mapping[str, Any], training: Training) -> dict[str, Any]:
    """What a training's record is found by."""
    return {"dataset": config["dataset"], **asdict(training)}


def main() -> None:
    """Train what is left."""
    torch.set_num_threads(1)
    config = read_config()
    done = {row["config_hash"] for row in read_rows(RECORDS)}
    left = [one for one in trainings(config) if sha256(canonical(settings_of(config, one))) not in done]
    bundle = load_data(Settings(dataset=config["dataset"]))
    for training in track(left, description=config["title"]):
        began = time.monotonic()
        found = train(training, bundle)
        record = {
            "format": 1,
            "experiment": NAME,
            "config_hash": sha256(canonical(settings_of(config, training))),
            "settings": settings_of(config, training),
            "data_variant": bundle.variant,
            **asdict(found),
            "commit": commit(),
            "seconds": round(time.monotonic() - began, 1),
        }
        append_row(RECORDS, record)


if __name__ == "__main__":
    main()
