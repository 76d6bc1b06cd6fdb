"""Experiments with hand-made records: a config, and a metric for every cell and seed."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from sparsedp_experiments.runs.grid import read_experiment
from sparsedp_experiments.runs.results import Results
from sparsedp_experiments.runs.tables import Study, read_study

CONFIG = """
title = "A small table"
description = "Made by hand."
seeds = 3
{more}
[base]
dataset = "{dataset}"
delta = 1e-5
epochs = 2
batch_size = 100

[grid]
epsilon = [1.0, 3.0]
method = ["dp-sgd", "tp-rand", "tp-topk"]

[[override]]
where = {{ method = "tp-topk" }}
set = {{ lr = 2.0 }}
"""

Score = Callable[[dict[str, str], int], float | None]
"""The metric of a cell and seed; None if that run is not done."""


def make_study(
    root: Path,
    score: Score,
    name: str = "small",
    content: str | None = None,
    dataset: str = "mnist",
    variant: str = "official",
    **more_metrics: Score,
) -> Study:
    """A study in a folder laid out as the repository is."""
    text = CONFIG.format(more="", dataset=dataset) if content is None else content
    config = root / "experiments" / "configs" / f"{name}.toml"
    config.parent.mkdir(parents=True, exist_ok=True)
    config.write_text(text.lstrip())
    experiment = read_experiment(config)
    results = Results(root / "experiments" / "results" / f"{name}.jsonl", name)
    for run in experiment.runs():
        value = score(dict(run.cell), run.seed)
        if value is not None:
            metrics = {experiment.metric: value}
            metrics |= {key: found(dict(run.cell), run.seed) for key, found in more_metrics.items()}
            results.keep(record_of(name, run, metrics, variant))
    return read_study(experiment, results.path)


def record_of(experiment: str, run: Any, metrics: dict[str, float | None], variant: str) -> dict[str, Any]:
    """What the pages read of a record."""
    epsilon = run.settings.epsilon
    return {
        "experiment": experiment,
        "config_hash": run.settings.digest,
        "cell": dict(run.cell),
        "seed": run.seed,
        "dataset": run.settings.dataset,
        "data_variant": variant,
        "model": run.settings.model,
        "method": run.settings.method,
        "private": True,
        "settings": run.settings.to_json(),
        "target_epsilon": epsilon,
        "noise": {"train": 4.0 / epsilon}
        if run.settings.method == "dp-sgd"
        else {"warm-up": 9.0, "main": 4.0 / epsilon},
        "batch_size": 100.0,
        "k": 26_010 if run.settings.method == "dp-sgd" else 5_202,
        "epsilon_spent": epsilon - 0.001 * (run.seed + 1),
        "unit": "row",
        "units": 60_000,
        "d": 26_010,
        "active_ratio": 0.2,
        "metrics": metrics,
        "seconds": 36.0,
    }
