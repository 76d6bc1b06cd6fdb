"""The benchmarks' machinery on small runs, and how their verdicts are read; nothing is asserted about speed."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from benchmarks import heads, models, step, tables
from benchmarks.contenders import CONTENDERS, Job
from benchmarks.model_workloads import MODELS, why_not
from benchmarks.report import Verdict, print_report, verdicts
from benchmarks.step import QUICK, Effort, measure
from benchmarks.supports import SUPPORTS, support_of
from benchmarks.sweeps import Throughput
from benchmarks.sweeps import measure as measure_sweep
from benchmarks.table_workloads import WIDTH, TableWorkload, frequent_rows, rows_of_ranks
from benchmarks.workloads import WORKLOADS, per_sample_loss

from sparsedp.batch import MicroBatch
from sparsedp.clipping import FlatClip
from sparsedp.grad_sample import BookKeepingEngine, ClippedSumQuery
from sparsedp.parameters import ParameterLayout
from sparsedp_experiments.models import parameter_count

PARAMETERS = {"mnist-cnn": 26_010, "scatter-linear": 39_700, "scatter-cnn": 187_210, "dp-cnn": 550_570}
ONCE = Effort(turns=1, seconds=0.0, ratios=())


def in_processes(jobs: list[Job], effort: Effort = ONCE) -> list[dict[str, Any]]:
    return json.loads(json.dumps(measure(jobs, effort, threads=1)))


@pytest.mark.nightly
def test_contenders_take_turns_and_one_that_cannot_run_says_why(capsys):
    jobs = [
        Job("scatter-linear", "sgd", rows=16),
        Job("scatter-linear", "opacus-hooks", rows=-1),
        Job("scatter-linear", "sparsedp", 0.2, "random", rows=16),
    ]
    rows = in_processes(jobs, Effort(turns=2, seconds=0.0, ratios=()))
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
    row = measure_sweep("scatter-linear", ONCE, cores=2, rows=16)
    assert (row.model, row.processes) == ("scatter-linear", 2)
    assert min(row.together, row.alone) > 0
    assert Throughput("any", processes=2, together=0.4, alone=0.3).gain == pytest.approx(1.5)


@pytest.mark.nightly
def test_sparse_gradients_and_ours_run_in_processes_of_their_own_and_say_d():
    name = TableWorkload(500, 8).name
    jobs = [Job(name, "sgd-sparse"), Job(name, "sparsedp", 0.1, "frequent:50")]
    for job, row in zip(jobs, map(tables.with_dimension, in_processes(jobs)), strict=True):
        found = row["d"], row["contender"], row["active_ratio"]
        assert found == (500 * WIDTH + 130, job.contender, job.active_ratio)
        assert row["median_seconds"] > 0
        assert row["peak_rss_mb"] >= row["ready_rss_mb"] > 50


@pytest.mark.nightly
@pytest.mark.parametrize("name", MODELS)
def test_no_model_leaves_the_fast_path(name):
    if (reason := why_not(name)) is not None:
        pytest.skip(reason)
    workload = MODELS[name]
    engine = BookKeepingEngine(workload.model(), per_sample_loss)
    query = ClippedSumQuery(support_of("clustered", engine.layout, 0.02), FlatClip(1.0))
    total = engine.clipped_sum([MicroBatch(workload.batch(2))], query)
    assert bool(total.isfinite().all())
    assert 0 < float(total.norm()) <= 2
    assert engine.notes == ()


@pytest.mark.parametrize("model", WORKLOADS)
def test_every_model_has_every_contender_and_both_kinds_of_support(model):
    jobs = step.jobs_of(model, QUICK.ratios)
    assert {job.contender for job in jobs} == set(CONTENDERS)
    assert {(job.support, job.active_ratio) for job in jobs if job.contender == "sparsedp"} == {
        ("full", 1.0),
        *((kind, ratio) for kind in ("random", "clustered") for ratio in QUICK.ratios),
    }


def test_a_model_whose_weights_are_missing_is_left_out_with_a_reason(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert "sparsedp-experiments[pretrained]" in why_not("lite0-head")
    assert why_not("bert-tiny") is None


@pytest.mark.parametrize("name", PARAMETERS)
def test_the_models_are_the_papers(name):
    assert parameter_count(WORKLOADS[name].model()) == PARAMETERS[name]


@pytest.mark.parametrize("ratio", [0.5, 0.01])
@pytest.mark.parametrize("kind", ["random", "clustered"])
def test_supports_have_the_size_they_are_named_for(kind, ratio):
    layout = ParameterLayout.of(WORKLOADS["mnist-cnn"].model())
    support = SUPPORTS[kind](layout, ratio)
    assert support.size == int(ratio * layout.dimension)
    if kind == "clustered":
        masks = [support.mask()[slot.span].reshape(slot.shape) for slot in layout]
        cut = sum(int((m.flatten(1).any(1) & ~m.flatten(1).all(1)).sum()) for m in masks if m.dim() > 1)
        assert cut <= 1


@pytest.mark.parametrize("rows", [1562, 1_000_000])
def test_frequent_rows_are_those_of_the_most_frequent_words_and_the_head(rows):
    workload = TableWorkload(rows, 512)
    places = rows_of_ranks(torch.arange(min(rows, 3000)), rows)
    assert places.unique().numel() == places.numel()
    ids, _ = workload.batch()
    common = torch.bincount(ids.reshape(-1), minlength=rows).topk(5).indices
    with torch.device("meta"):
        layout = ParameterLayout.of(workload.model())
    support = frequent_rows(layout, 100)
    assert support.size == 100 * WIDTH + 2 * WIDTH + 2
    assert support.mask()[common * WIDTH].all()
    assert support.mask()[-1]


def row(
    contender: str, seconds: float | None, ratio: float = 1.0, support: str = "full", **more: Any
) -> dict:
    found = {
        "model": "any",
        "contender": contender,
        "active_ratio": ratio,
        "support": support,
        "batch_size": 4,
    }
    error = {} if seconds else {"error": "RuntimeError: not enough memory"}
    times = {"median_seconds": seconds, "quartile_seconds": [seconds, seconds], "peak_rss_mb": 100.0}
    return found | times | error | more


def told(found) -> dict[str, tuple[float, bool]]:
    return {
        verdict.bar.partition(": ")[2] or verdict.bar: (round(verdict.value, 3), verdict.met)
        for verdict in found
    }


def test_verdicts_compare_with_sgd_and_with_the_fastest_opacus_mode_that_ran():
    rows = [
        row("sgd", 1.0),
        row("opacus-hooks", 3.0),
        row("opacus-ew", 2.0),
        row("opacus-ghost", None),
        row("sparsedp", 1.0),
        row("sparsedp", 1.6, 0.2, "random", peak_rss_mb=130.0),
        row("sparsedp", 1.2, 0.2, "clustered"),
        row("sparsedp", 0.6, 0.01, "clustered"),
    ]
    assert told(verdicts("mnist-cnn", rows)) == {
        "speed-up over opacus-ew, full": (2.0, True),
        "speed-up over opacus-ew, random": (1.25, False),
        "speed-up over opacus-ew, clustered": (1.667, True),
        "step over SGD's at 0.2, random": (1.6, False),
        "step over SGD's at 0.2, clustered": (1.2, True),
        "peak memory over SGD's, worst row": (1.3, False),
        "step at 0.01 over step at 0.2, clustered": (0.5, True),
    }
    assert Verdict("speed", 1.2, 1.5, at_least=True).missed_by == pytest.approx(0.2)
    assert Verdict("memory", 1.25, 1.25).missed_by == 0


def test_verdicts_of_models_compare_with_sgd_and_the_fastest_opacus(capsys):
    rows = [
        row("sgd", 1.0),
        row("opacus-hooks", 4.0),
        row("opacus-ghost", 3.0),
        row("sparsedp", 2.5, peak_rss_mb=250.0),
        row("sparsedp", 1.2, 0.02, "clustered", peak_rss_mb=120.0),
    ]
    assert told(models.verdicts("any", rows)) == {
        "speed-up over opacus-ghost, full 1": (1.2, False),
        "step over SGD's, full 1": (2.5, False),
        "peak memory over SGD's, full 1": (2.5, False),
        "speed-up over opacus-ghost, clustered 0.02": (2.5, True),
        "step over SGD's, clustered 0.02": (1.2, True),
        "peak memory over SGD's, clustered 0.02": (1.2, True),
    }
    print_report(rows, models.verdicts)
    assert "missed by 25%" in capsys.readouterr().out


def test_verdicts_of_tables_compare_with_sparse_sgd_our_dense_step_and_the_fastest_opacus(capsys):
    large = {"d": 10**8, "batch_size": tables.BATCH, "peak_rss_mb": 110.0, "ready_rss_mb": 100.0}
    small = {**large, "batch_size": tables.SMALL_BATCH}
    rows = [
        row("sgd-sparse", 0.01, **large),
        row("opacus-ghost", 0.5, **large),
        row("opacus-hooks", None, **large),
        row("sparsedp", 0.8, **large),
        row("sparsedp", 0.02, 0.01, **large),
        row("sparsedp", 0.010, 0.1, **small | {"d": 10**5}),
        row("sparsedp", 0.011, 0.0001, **small),
    ]
    found = told(tables.verdicts(rows))
    assert found["time over sparse SGD"] == (2.0, False)
    assert found["speed-up over our dense step"] == (40.0, True)
    assert found["speed-up over Opacus"][0] == 25.0
    assert found["peak memory over model and inputs"][0] == pytest.approx(1.1)
    assert found["growth of time per decade of d"][0] == pytest.approx(1.1 ** (1 / 3) - 1, abs=1e-3)
    tables.print_report(rows)
    assert "not enough memory" in capsys.readouterr().out


def test_the_bar_of_heads_is_met_up_to_a_tenth_more():
    task = heads.Task(200, 50, 1)
    least = heads.measure(task, turns=1)
    assert set(least) == {"calibration", "sparsedp", "PyTorch", "scikit-learn"}
    assert min(seconds for name, seconds in least.items() if name != "calibration") > 0
    made = {"calibration": 9.0, "sparsedp": 1.1, "PyTorch": 1.0, "scikit-learn": 0.5}
    *_, pytorch, scikit_learn = heads.told(task, made)
    assert pytorch == "sparsedp / PyTorch: 1.10 (met, at most 1.1)"
    assert "2.20 (missed" in scikit_learn


def test_every_process_gets_the_same_model_and_batch():
    workload = WORKLOADS["transformer"]
    assert torch.equal(workload.batch(4)[0], workload.batch(4)[0])
    first, second = (torch.cat([p.reshape(-1) for p in workload.model().parameters()]) for _ in range(2))
    assert torch.equal(first, second)
