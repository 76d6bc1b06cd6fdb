"""Claims judged on hand-made records, and the page made from the committed ones."""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scipy import stats

from sparsedp_experiments.runs.claims import (
    Evidence,
    Ruling,
    above,
    equal,
    judge,
    no_loss,
    parts_of,
    pooled,
    read_claims,
)
from sparsedp_experiments.runs.gains import gains, surviving
from sparsedp_experiments.runs.grid import RESULTS, committed_families, read_experiment
from sparsedp_experiments.runs.page import PAGE, best_choices, page
from sparsedp_experiments.runs.results import Estimate, Results, append_row, estimate, read_rows
from sparsedp_experiments.runs.tables import Study, read_studies, read_study

# Experiments with hand-made records: a config, and a metric for every cell and seed.


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
            append_row(results.path, record_of(name, run, metrics, variant))
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


# Verdicts on hand-made records: pairing, pooling, and when a claim holds, fails, or stays open.


NOISE = np.random.default_rng(0).normal(0, 0.01, (2, 3, 10))

LEARNED = Evidence("small", ({"method": "tp-topk"},), ({"method": "tp-rand"},))


def claims_from(tmp_path, text):
    file = tmp_path / "claims.toml"
    file.write_text(text)
    return read_claims(file)


def claim_text(kind="above", evidence="", margin=0.0):
    return (
        f'[[claim]]\nid = "c"\npaper = "p"\nwhere = "w"\nsays = "s"\ndecides = "d"\nkind = "{kind}"\n'
        f"margin = {margin}\nevidence = [{{ {evidence} }}]\n"
    )


def noisy(gain):
    """Cells that share a large wobble by seed, and a gain of tp-topk over the others."""

    def score(cell, seed):
        row, column = (
            ["1", "3"].index(cell["epsilon"]),
            ["dp-sgd", "tp-rand", "tp-topk"].index(cell["method"]),
        )
        better = gain if cell["method"] == "tp-topk" else 0.0
        return 0.8 + 0.05 * seed + better + 0.1 * NOISE[row, column, seed]

    return score


def test_a_part_is_the_paired_difference_of_scipy(tmp_path):
    study = make_study(tmp_path, noisy(0.01))
    first, second = parts_of(LEARNED, study, "accuracy")
    assert [dict(part.place) for part in (first, second)] == [{"epsilon": "1"}, {"epsilon": "3"}]
    for row, part in enumerate((first, second)):
        ours = [0.8 + 0.05 * seed + 0.01 + 0.1 * NOISE[row, 2, seed] for seed in range(3)]
        theirs = [0.8 + 0.05 * seed + 0.1 * NOISE[row, 1, seed] for seed in range(3)]
        interval = stats.ttest_rel(ours, theirs).confidence_interval(0.95)
        found = estimate([part.values[seed] for seed in sorted(part.values)])
        assert (found.low, found.high) == pytest.approx((interval.low, interval.high))


def test_pooling_takes_one_value_per_seed_the_mean_over_cells(tmp_path):
    parts = parts_of(LEARNED, make_study(tmp_path, noisy(0.01)), "accuracy")
    values = [np.mean([part.values[seed] for part in parts]) for seed in range(3)]
    found = pooled(parts)
    assert found is not None
    interval = stats.ttest_1samp(values, 0).confidence_interval(0.95)
    assert (found[0].low, found[0].high) == pytest.approx((interval.low, interval.high))
    assert (found[0].count, found[1]) == (3, 2)


@pytest.mark.parametrize(
    ("rule", "low", "high", "ruling"),
    [
        (above, 0.001, 0.02, Ruling.HOLDS),
        (above, 0.001, 0.005, Ruling.SLIGHT),
        (above, -0.02, -0.001, Ruling.FAILS),
        (above, -0.001, 0.02, Ruling.OPEN),
        (above, -0.02, 0.001, Ruling.OPEN),
        (above, -0.001, 0.0049, Ruling.LEVEL),
        (above, -0.0049, 0.0, Ruling.LEVEL),
        (above, 0.0, 0.0, Ruling.BLIND),
        (equal, -0.004, 0.003, Ruling.HOLDS),
        (equal, 0.006, 0.009, Ruling.FAILS),
        (equal, -0.009, -0.006, Ruling.FAILS),
        (equal, 0.001, 0.006, Ruling.OPEN),
        (equal, -0.006, 0.001, Ruling.OPEN),
        (no_loss, -0.004, 0.02, Ruling.HOLDS),
        (no_loss, -0.02, -0.006, Ruling.FAILS),
        (no_loss, -0.006, 0.001, Ruling.OPEN),
    ],
)
def test_a_ruling_follows_from_the_interval_and_the_margin(rule, low, high, ruling):
    assert rule(Estimate(3, (low + high) / 2, 0.01, low, high), 0.005) is ruling


def best_claim(tmp_path):
    evidence = 'experiment = "small", best = { method = "tp-topk" }, among = ["method"]'
    return claims_from(tmp_path, claim_text("best", evidence))[0]


@pytest.mark.parametrize(
    ("level", "ruling", "rival"),
    [
        ({"tp-topk": 0.9, "tp-rand": 0.8, "dp-sgd": 0.7}, Ruling.HOLDS, "method tp-rand"),
        ({"tp-topk": 0.8, "tp-rand": 0.7, "dp-sgd": 0.9}, Ruling.FAILS, "method dp-sgd"),
        ({"tp-topk": 0.8, "tp-rand": 0.7999, "dp-sgd": 0.6}, Ruling.OPEN, "method tp-rand"),
    ],
)
def test_the_best_must_lead_all_others_and_falls_to_any(tmp_path, level, ruling, rival):
    def score(cell, seed):
        column = list(level).index(cell["method"])
        return level[cell["method"]] + NOISE[0, column, seed]

    verdict = judge(best_claim(tmp_path), {"small": make_study(tmp_path, score)})
    assert (verdict.ruling, verdict.rival) == (ruling, rival)


def test_leads_of_the_best_are_widened_for_the_number_of_rivals(tmp_path):
    study = make_study(tmp_path, noisy(0.0))
    verdict = judge(best_claim(tmp_path), {"small": study})
    values = [np.mean([part.values[seed] for part in verdict.parts]) for seed in range(3)]
    half = stats.t.ppf(1 - 0.05 / 2 / 2, 2) * np.std(values, ddof=1) / math.sqrt(3)  # two rivals
    assert verdict.pooled is not None
    assert verdict.pooled.high - verdict.pooled.mean == pytest.approx(half)


def test_the_committed_claims_cover_the_papers_and_ours():
    claims = read_claims()
    assert {claim.paper for claim in claims} == {"TP-TopK", "RS", "AdaDPIGU", "ours"}
    assert all(claim.margin == 0.005 for claim in claims if claim.kind in ("equal", "no-loss"))


# The results page: made from the records as they are, with the better arm on top whatever the metric.


LEVEL = {"dp-sgd": 0.5, "tp-rand": 0.3, "tp-topk": 0.4}


@pytest.fixture(scope="module")
def studies():
    return read_studies()


def by_method(cell, seed):
    return LEVEL[cell["method"]] + 0.001 * seed


def test_the_committed_page_is_made_of_the_committed_records(studies):
    assert PAGE.read_text(encoding="utf-8") == page(studies)


def test_every_record_of_a_grid_is_found_by_todays_settings(studies):
    """Digests are stable: renaming a setting would orphan the records."""
    names = set(committed_families())
    known = {record["config_hash"] for study in studies.values() for record in study.records}
    rows = (row for file in RESULTS.glob("*.jsonl") for row in read_rows(file) if "cell" in row)
    found = [row for row in rows if row["experiment"] in names]
    orphans = [row["experiment"] for row in found if row["config_hash"] not in known]
    assert len(found) > 3000
    assert {name for name in orphans if not studies[name].stale} == set()
    assert sum(len(study.stale) for study in studies.values()) == len(orphans)


@pytest.mark.parametrize(("metric", "sign"), [("accuracy", 1), ("loss", -1)])
def test_less_loss_is_better(tmp_path, metric, sign):
    lines = [
        'title = "t"',
        "seeds = 3",
        f'metric = "{metric}"',
        "[base]",
        'dataset = "mnist"',
        "epsilon = 1.0",
    ]
    content = "\n".join([*lines, "[grid]", 'method = ["dp-sgd", "tp-rand", "tp-topk"]'])
    study = make_study(tmp_path, by_method, content=content)
    evidence = Evidence("small", ({"method": "tp-topk"},), ({"method": "tp-rand"},))
    (part,) = parts_of(evidence, study, metric)
    assert part.values[0] == pytest.approx(sign * 0.1)
    ((best, count),) = best_choices(study, ["dataset"]).values()
    assert (best.cell["method"], count) == ("dp-sgd" if sign > 0 else "tp-rand", 3)
    assert all(gain.mean * sign < 0 for gain in gains([study]))


def test_holms_correction_keeps_only_what_all_looks_together_allow():
    clear, weak = estimate([1.0, 1.01, 1.02]), estimate([0.1, 1.0, 0.4])
    judged = [(object(), clear), *((object(), weak) for _ in range(10))]
    assert surviving(judged) == judged[:1]
