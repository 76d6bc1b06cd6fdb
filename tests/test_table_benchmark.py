"""The benchmark of embedding tables: small tables, every contender, and what its verdicts compare."""

from __future__ import annotations

import json

import pytest
import torch
from benchmarks.contenders import Job
from benchmarks.step import Effort, measure
from benchmarks.table_workloads import WIDTH, TableWorkload, frequent_rows, rows_of_ranks
from benchmarks.tables import (
    BATCH,
    SMALL_BATCH,
    growth_jobs,
    large_jobs,
    print_report,
    verdicts,
    with_dimension,
)

from sparsedp.parameters import ParameterLayout


@pytest.mark.nightly
def test_sparse_gradients_and_ours_run_in_processes_of_their_own_and_say_d():
    name = TableWorkload(500, 8).name
    jobs = [Job(name, "sgd-sparse"), Job(name, "sparsedp", 0.1, "frequent:50")]
    rows = json.loads(json.dumps(measure(jobs, Effort(turns=1, seconds=0.0, ratios=()), threads=1)))
    for job, row in zip(jobs, map(with_dimension, rows), strict=True):
        assert (row["d"], row["contender"], row["active_ratio"]) == (
            500 * WIDTH + 130,
            job.contender,
            job.active_ratio,
        )
        assert row["median_seconds"] > 0
        assert row["peak_rss_mb"] >= row["ready_rss_mb"] > 50


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
    assert all(int(row) * WIDTH in support for row in common)
    assert layout.dimension - 1 in support


def test_every_contender_is_on_the_large_table_and_ours_alone_grows():
    jobs = large_jobs(1000)
    assert [job.contender for job in jobs] == [
        "sgd",
        "sgd-sparse",
        "opacus-ghost",
        "opacus-hooks",
        "sparsedp",
        "sparsedp",
    ]
    assert {job.contender for job in growth_jobs((10, 20))} == {"sparsedp"}


def made(d, batch, contender, ratio, seconds, peak=110.0):
    row = {"d": d, "batch_size": batch, "contender": contender, "active_ratio": ratio}
    error = {} if seconds else {"error": "RuntimeError: not enough memory"}
    return row | {"median_seconds": seconds, "peak_rss_mb": peak, "ready_rss_mb": 100.0} | error


def test_verdicts_compare_with_sparse_sgd_our_dense_step_and_the_fastest_opacus(capsys):
    rows = [
        made(10**8, BATCH, "sgd-sparse", 1.0, 0.01),
        made(10**8, BATCH, "opacus-ghost", 1.0, 0.5),
        made(10**8, BATCH, "opacus-hooks", 1.0, None),
        made(10**8, BATCH, "sparsedp", 1.0, 0.8),
        made(10**8, BATCH, "sparsedp", 0.01, 0.02),
        made(10**5, SMALL_BATCH, "sparsedp", 0.1, 0.010),
        made(10**8, SMALL_BATCH, "sparsedp", 0.0001, 0.011),
    ]
    found = {verdict.bar.partition(": ")[2] or verdict.bar: verdict for verdict in verdicts(rows)}
    assert (found["time over sparse SGD"].value, found["time over sparse SGD"].met) == (2.0, False)
    assert (found["speed-up over our dense step"].value, found["speed-up over our dense step"].met) == (
        40.0,
        True,
    )
    assert found["speed-up over Opacus"].value == 25.0
    assert found["peak memory over model and inputs"].value == pytest.approx(1.1)
    assert found["growth of time per decade of d"].value == pytest.approx(1.1 ** (1 / 3) - 1)
    print_report(rows)
    assert "not enough memory" in capsys.readouterr().out
