"""`python -m studies.partition`: train what has no record yet, one small JSON file per training."""

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

from sparsedp.core.files import write_json
from sparsedp.experiments.datasets import load_data
from sparsedp.experiments.results import commit
from sparsedp.experiments.settings import Settings
from studies.partition.train import Training, train

ROOT = Path(__file__).parents[2]
CONFIG = ROOT / "configs" / "partition" / "rs-table3.toml"
RECORDS = ROOT / "results" / "rs-table3" / "records"
_SHARED = ("model", "delta", "epochs", "batch_size", "clip_norm", "lr", "momentum")


def read_config(path: Path = CONFIG) -> dict[str, Any]:
    """The experiment."""
    return tomllib.loads(path.read_text(encoding="utf-8"))


def trainings(config: Mapping[str, Any]) -> Iterator[Training]:
    """Every training, seeds outermost."""
    shared = {name: config[name] for name in _SHARED}
    cells = itertools.product(config["seeds"], config["epsilon"], config["method"], config["sampling"])
    for seed, epsilon, (method, ratio), sampling in cells:
        yield Training(
            **shared, epsilon=epsilon, method=method, active_ratio=ratio, sampling=sampling, seed=seed
        )


def record_file(training: Training) -> Path:
    """Where a training's record is."""
    one = training
    return RECORDS / f"epsilon{one.epsilon:g}-{one.method}-{one.sampling}-seed{one.seed}.json"


def main() -> None:
    """Train what is left."""
    torch.set_num_threads(1)
    config = read_config()
    left = [one for one in trainings(config) if not record_file(one).exists()]
    bundle = load_data(Settings(dataset=config["dataset"]))
    for training in track(left, description=config["title"]):
        began = time.monotonic()
        found = train(training, bundle)
        RECORDS.mkdir(parents=True, exist_ok=True)
        record = {
            "format": 1,
            "experiment": "rs-table3",
            "settings": {"dataset": config["dataset"], **asdict(training)},
            "data_variant": bundle.variant,
            **asdict(found),
            "commit": commit(),
            "seconds": round(time.monotonic() - began, 1),
        }
        write_json(record_file(training), record)


if __name__ == "__main__":
    main()
