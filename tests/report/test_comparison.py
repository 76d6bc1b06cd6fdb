"""Many runs side by side: grouped right, counted right."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import numpy as np
import pytest
from report_runs import a_run, write
from test_report_page import Outline

from sparsedp import DataError
from sparsedp_experiments.comparison.groups import group_records
from sparsedp_experiments.runs.results import verdict
from sparsedp_experiments.runs.results import Estimate

pytestmark = pytest.mark.usefixtures("checked_once")


def records(folder: Path) -> list[dict]:
    return [json.loads(file.read_text()) for file in sorted(folder.rglob("record.json"))]


def test_runs_are_grouped_by_epsilon_and_methods_come_in_the_tables_order(several):
    groups = group_records(records(several))
    assert [group.task.epsilon for group in groups] == [4.0, 8.0, None]
    assert [arm.label for arm in groups[0].arms] == ["dp-sgd", "tp-topk", "on-topk"]
    assert groups[0].baseline is groups[0].arms[0]
    assert groups[2].baseline is None
    assert all(len(arm.records) == 2 for group in groups[:2] for arm in group.arms)


def test_means_and_paired_differences_are_those_of_the_records(several, tmp_path):
    found = {(r["method"], r["target_epsilon"], r["seed"]): r["test_accuracy"] for r in records(several)}
    group = group_records(records(several))[1]
    arm = next(arm for arm in group.arms if arm.method == "on-topk")
    ours = np.array([found["on-topk", 8.0, seed] for seed in (0, 1)])
    dense = np.array([found["dp-sgd", 8.0, seed] for seed in (0, 1)])
    assert arm.estimate.mean == pytest.approx(ours.mean())
    assert group.baseline is not None
    difference = arm.against(group.baseline)
    assert difference is not None
    assert difference.mean == pytest.approx((ours - dense).mean())
    half = 12.7062 * (ours - dense).std(ddof=1) / np.sqrt(2)
    assert difference.high - difference.mean == pytest.approx(half, rel=1e-4)
    text = Outline(write(several, tmp_path / "report.html").read_text()).text
    assert f"{100 * ours.mean():.1f} %" in text
    assert f"{100 * (ours - dense).mean():+.2f} (" in text


@pytest.mark.parametrize(
    ("low", "high", "said"),
    [
        (0.1, 0.2, "better"),
        (-0.2, -0.1, "worse"),
        (-0.1, 0.1, "not resolved"),
        (None, None, "one seed, no interval"),
    ],
)
def test_a_verdict_needs_an_interval_without_zero(low, high, said):
    assert verdict(Estimate(3, 0.1, 0.1, low, high)) == said


def test_a_run_that_is_not_finished_is_left_out_and_counted(several, tmp_path):
    folder = tmp_path / "runs"
    shutil.copytree(several, folder)
    file = folder / "tp-topk-8-1" / "record.json"
    record = json.loads(file.read_text())
    file.write_text(json.dumps({**record, "status": "stopped"}))
    group = group_records(records(folder))[1]
    assert [len(arm.records) for arm in group.arms] == [2, 1, 2]
    text = Outline(write(folder).read_text()).text
    assert "1 not finished, left out" in text
    assert "Not verified" in text
    assert "tp-topk-8-1" in text


def test_settings_that_differ_become_part_of_the_label(tmp_path):
    for ratio in (0.2, 0.5):
        a_run(tmp_path / f"topk-{ratio}", "tp-topk", seed=0, active_ratio=ratio)
    a_run(tmp_path / "dense", "dp-sgd", seed=0)
    (group,) = group_records(records(tmp_path))
    assert [arm.label for arm in group.arms] == ["dp-sgd", "tp-topk, ratio 0.2", "tp-topk, ratio 0.5"]
    text = Outline(write(tmp_path).read_text()).text
    assert "One seed each: no interval can be given" in text
    assert "one seed, no interval" in text


def test_a_seed_recorded_twice_counts_once(several):
    twice = [*records(several), *records(several)]
    assert [len(arm.records) for arm in group_records(twice)[0].arms] == [2, 2, 2]


def test_runs_without_seeds_are_averaged_but_not_paired(several):
    unseeded = [{**record, "seed": None} for record in records(several)]
    group = group_records(unseeded)[0]
    assert group.baseline is not None
    assert [arm.estimate.count for arm in group.arms] == [2, 2, 2]
    assert all(arm.against(group.baseline) is None for arm in group.arms)


def test_the_page_says_that_runs_on_the_same_data_cost_more_together(several, tmp_path):
    text = Outline(write(several, tmp_path / "report.html").read_text()).text
    assert "Each statement is about one run alone" in text
    assert "releasing several costs more" in text


def test_runs_deep_below_a_folder_are_found_and_hidden_ones_are_not(single, tmp_path):
    shutil.copytree(single, tmp_path / "a" / "b" / "run")
    shutil.copytree(single, tmp_path / ".hidden" / "run")
    text = write(tmp_path).read_text()
    assert "1 runs" in text
    assert len(re.findall(r"Show all 1\b", text)) == 1


def test_runs_that_cannot_be_compared_are_a_clear_error(single, tmp_path):
    shutil.copytree(single, tmp_path / "runs" / "run")
    file = tmp_path / "runs" / "run" / "record.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "status": "running"}))
    with pytest.raises(DataError, match="nothing to compare"):
        write(tmp_path / "runs")
