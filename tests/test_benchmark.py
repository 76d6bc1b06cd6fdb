"""The benchmark's machinery, on one small run; it asserts nothing about speed."""

from __future__ import annotations

import json

import pytest
import torch
from benchmarks.contenders import CONTENDERS, Job
from benchmarks.report import Verdict, print_report, verdicts
from benchmarks.step import QUICK, Effort, jobs_of, measure
from benchmarks.supports import SUPPORTS
from benchmarks.sweeps import Throughput
from benchmarks.sweeps import measure as measure_sweep
from benchmarks.workloads import WORKLOADS

from sparsedp.parameters import ParameterLayout
from sparsedp_experiments.models import parameter_count

PARAMETERS = {"mnist-cnn": 26_010, "scatter-linear": 39_700, "scatter-cnn": 187_210, "dp-cnn": 550_570}


@pytest.mark.nightly
def test_contenders_take_turns_and_one_that_cannot_run_says_why(capsys):
    jobs = [
        Job("scatter-linear", "sgd", rows=16),
        Job("scatter-linear", "opacus-hooks", rows=-1),
        Job("scatter-linear", "sparsedp", 0.2, "random", rows=16),
    ]
    rows = json.loads(json.dumps(measure(jobs, Effort(turns=2, seconds=0.0, ratios=()), threads=1)))
    for job, row in zip(jobs, rows, strict=True):
        assert (row["model"], row["contender"]) == ("scatter-linear", job.contender)
        assert (row["active_ratio"], row["support"]) == (job.active_ratio, job.support)
    sgd, failed, ours = rows
    for row in (sgd, ours):
        assert row["steps"] == 2
        assert 0 < row["quartile_seconds"][0] <= row["median_seconds"] <= row["quartile_seconds"][1]
        assert row["peak_rss_mb"] > 50
    assert failed["median_seconds"] is None
    assert "negative dimension" in failed["error"]
    print_report(rows)
    assert "opacus-hooks cannot: RuntimeError" in capsys.readouterr().out


@pytest.mark.nightly
def test_processes_at_work_at_once_are_measured_against_one_with_their_threads():
    row = measure_sweep("scatter-linear", Effort(turns=1, seconds=0.0, ratios=()), cores=2, rows=16)
    assert (row.model, row.processes) == ("scatter-linear", 2)
    assert row.together > 0
    assert row.alone > 0


def test_two_processes_gain_what_they_do_in_the_time_of_one():
    assert Throughput("any", processes=2, together=0.4, alone=0.3).gain == pytest.approx(1.5)


@pytest.mark.parametrize("model", WORKLOADS)
def test_every_model_has_every_contender_and_both_kinds_of_support(model):
    jobs = jobs_of(model, QUICK.ratios)
    assert {job.contender for job in jobs} == set(CONTENDERS)
    assert {(job.support, job.active_ratio) for job in jobs if job.contender == "sparsedp"} == {
        ("full", 1.0),
        *((kind, ratio) for kind in ("random", "clustered") for ratio in QUICK.ratios),
    }


@pytest.mark.parametrize("name", PARAMETERS)
def test_the_models_are_the_papers(name):
    assert parameter_count(WORKLOADS[name].model()) == PARAMETERS[name]


@pytest.mark.parametrize("ratio", [0.5, 0.2, 0.05, 0.01])
@pytest.mark.parametrize("kind", ["random", "clustered"])
def test_supports_have_the_size_they_are_named_for(kind, ratio):
    layout = ParameterLayout.of(WORKLOADS["mnist-cnn"].model())
    support = SUPPORTS[kind](layout, ratio)
    assert support.size == int(ratio * layout.dimension)
    if kind == "clustered":
        masks = support.per_parameter(layout).values()
        cut = sum(int((m.flatten(1).any(1) & ~m.flatten(1).all(1)).sum()) for m in masks if m.dim() > 1)
        assert cut <= 1


def row(
    contender: str, seconds: float, ratio: float = 1.0, support: str = "full", memory: float = 100.0
) -> dict:
    return {
        "model": "mnist-cnn",
        "contender": contender,
        "active_ratio": ratio,
        "support": support,
        "median_seconds": seconds,
        "peak_rss_mb": memory,
    }


def test_verdicts_compare_with_sgd_and_with_the_fastest_opacus_mode_that_ran():
    rows = [
        row("sgd", 1.0),
        row("opacus-hooks", 3.0),
        row("opacus-ew", 2.0),
        {**row("opacus-ghost", 0.1), "median_seconds": None, "error": "RuntimeError: no"},
        row("sparsedp", 1.0),
        row("sparsedp", 1.6, 0.2, "random", memory=130.0),
        row("sparsedp", 1.2, 0.2, "clustered"),
        row("sparsedp", 0.6, 0.01, "clustered"),
    ]
    found = {verdict.bar: (round(verdict.value, 3), verdict.met) for verdict in verdicts("mnist-cnn", rows)}
    assert found == {
        "mnist-cnn: speed-up over opacus-ew, full": (2.0, True),
        "mnist-cnn: speed-up over opacus-ew, random": (1.25, False),
        "mnist-cnn: speed-up over opacus-ew, clustered": (1.667, True),
        "mnist-cnn: step over SGD's at 0.2, random": (1.6, False),
        "mnist-cnn: step over SGD's at 0.2, clustered": (1.2, True),
        "mnist-cnn: peak memory over SGD's, worst row": (1.3, False),
        "mnist-cnn: step at 0.01 over step at 0.2, clustered": (0.5, True),
    }


def test_a_missed_bar_says_by_how_much():
    assert Verdict("speed", 1.2, 1.5, at_least=True).missed_by == pytest.approx(0.2)
    assert Verdict("memory", 1.5, 1.25).missed_by == pytest.approx(0.2)
    assert Verdict("memory", 1.25, 1.25).missed_by == 0


def test_every_process_gets_the_same_model_and_batch():
    workload = WORKLOADS["transformer"]
    assert torch.equal(workload.batch(4)[0], workload.batch(4)[0])
    first, second = (torch.cat([p.reshape(-1) for p in workload.model().parameters()]) for _ in range(2))
    assert torch.equal(first, second)
