"""Many runs side by side: grouped right, counted right, and no winner that is none."""

from __future__ import annotations

import json
import re
import shutil
from html import unescape
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

import sparsedp
from sparsedp import DataError, RunMetadata
from sparsedp_experiments.comparison.groups import Group, group_records
from sparsedp_experiments.comparison.metric import ACCURACY, AUC, HELD_OUT_COUNTS, Reference, majority
from sparsedp_experiments.comparison.page import verdict, write_comparison
from sparsedp_experiments.comparison.statistics import Estimate

pytestmark = pytest.mark.usefixtures("checked_once")


def data(seed: int, rows: int) -> TensorDataset:
    """Three separable classes."""
    generator = torch.Generator().manual_seed(seed)
    centres = 2 * torch.randn(3, 6, generator=torch.Generator().manual_seed(99))
    targets = torch.randint(0, 3, (rows,), generator=generator)
    return TensorDataset(centres[targets] + torch.randn(rows, 6, generator=generator), targets)


def a_run(out: Path, method: str, *, epsilon: float | None = 8.0, **more: Any) -> Path:
    """The folder of a whole run; RDP, which calibrates at once."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))
    more.setdefault("metadata", RunMetadata(dataset="blobs", model="perceptron"))
    sparsedp.fit(
        model,
        data(1, 80),
        nn.CrossEntropyLoss(reduction="none"),
        method=method,
        epsilon=epsilon,
        delta=None if epsilon is None else 1e-3,
        epochs=4,
        batch_size=20,
        lr=0.5,
        eval_dataset=data(2, 60),
        accountant="rdp",
        progress=False,
        run_dir=out,
        **more,
    )
    return out


@pytest.fixture(scope="session")
def several(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of runs: three methods, two epsilons, two seeds, and an ablation."""
    folder = tmp_path_factory.mktemp("several")
    for method in ("dp-sgd", "tp-topk", "on-topk"):
        for epsilon in (4.0, 8.0):
            for seed in (0, 1):
                a_run(folder / f"{method}-{epsilon:g}-{seed}", method, epsilon=epsilon, seed=seed)
    a_run(folder / "clipped", "clipped-sgd", epsilon=None, seed=0)
    return folder


def text_of(page: Path) -> str:
    """What a page says, without its markup."""
    body = re.sub(r"<style>.*?</style>", "", page.read_text(), flags=re.DOTALL)
    return " ".join(unescape(re.sub(r"<[^>]*>", " ", body)).split()).replace("\u00a0", " ")


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
    text = text_of(write_comparison(several, tmp_path / "report.html"))
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
    text = text_of(write_comparison(folder))
    assert "1 not finished, left out" in text
    assert "Not verified" in text
    assert "tp-topk-8-1" in text


def test_settings_that_differ_become_part_of_the_label(tmp_path):
    for ratio in (0.2, 0.5):
        a_run(tmp_path / f"topk-{ratio}", "tp-topk", seed=0, active_ratio=ratio)
    a_run(tmp_path / "dense", "dp-sgd", seed=0)
    (group,) = group_records(records(tmp_path))
    assert [arm.label for arm in group.arms] == ["dp-sgd", "tp-topk, ratio 0.2", "tp-topk, ratio 0.5"]
    text = text_of(write_comparison(tmp_path))
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
    text = text_of(write_comparison(several, tmp_path / "report.html"))
    assert "Each statement is about one run alone" in text
    assert "releasing several costs more" in text


def test_runs_deep_below_a_folder_are_found_and_hidden_ones_are_not(several, tmp_path):
    single = several / "dp-sgd-4-0"
    shutil.copytree(single, tmp_path / "a" / "b" / "run")
    shutil.copytree(single, tmp_path / ".hidden" / "run")
    text = text_of(write_comparison(tmp_path))
    assert "1 runs" in text
    assert len(re.findall(r"Show all 1\b", text)) == 1


def test_runs_that_cannot_be_compared_are_a_clear_error(several, tmp_path):
    shutil.copytree(several / "dp-sgd-4-0", tmp_path / "runs" / "run")
    file = tmp_path / "runs" / "run" / "record.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "status": "running"}))
    with pytest.raises(DataError, match="nothing to compare"):
        write_comparison(tmp_path / "runs")


def compared(values: dict[str, list[float]], several: Path) -> Group:
    """A group whose methods have these accuracies, seed by seed."""
    one = next(r for r in records(several) if r["method"] == "dp-sgd")
    made = [
        {**one, "method": method, "seed": seed, "metrics": {"accuracy": value}}
        for method, found in values.items()
        for seed, value in enumerate(found)
    ]
    (group,) = group_records(made)
    return group


@pytest.mark.parametrize(
    ("values", "winner", "better"),
    [
        ({"dp-sgd": [0.70, 0.71, 0.72], "tp-topk": [0.80, 0.81, 0.82]}, "tp-topk", ["tp-topk"]),
        ({"dp-sgd": [0.80, 0.81, 0.82], "tp-topk": [0.70, 0.71, 0.72]}, "dp-sgd", []),
        ({"dp-sgd": [0.70, 0.80, 0.72], "tp-topk": [0.80, 0.75, 0.82]}, None, []),
        (
            {"dp-sgd": [0.70, 0.71, 0.72], "tp-topk": [0.80, 0.81, 0.82], "on-rand": [0.79, 0.83, 0.80]},
            None,
            ["tp-topk", "on-rand"],
        ),
        ({"dp-sgd": [0.70], "tp-topk": [0.90]}, None, []),
        ({"dp-sgd": [0.70, 0.71]}, None, []),
    ],
)
def test_a_winner_is_resolved_against_every_other_method(several, values, winner, better):
    group = compared(values, several)
    assert (None if group.winner is None else group.winner.label) == winner
    assert [arm.label for arm in group.improvements] == better


def headlines(page: Path) -> list[str]:
    return re.findall(r'<div class="tile">(.*?)</div>', page.read_text(), re.DOTALL)


def rewritten(folder: Path, accuracy: Any) -> Path:
    """Runs with other accuracies; the page then says that they do not verify, and shows them."""
    for file in folder.rglob("record.json"):
        record = json.loads(file.read_text())
        record["metrics"]["accuracy"] = record["test_accuracy"] = accuracy(record["method"], record["seed"])
        file.write_text(json.dumps(record))
    return write_comparison(folder)


def test_the_headline_names_a_method_only_if_it_is_resolved(several, tmp_path):
    shutil.copytree(several, tmp_path / "level")
    level = rewritten(tmp_path / "level", lambda method, seed: 0.5 + 0.1 * ((len(method) + seed) % 2))
    private = [tile for tile in headlines(level) if "epsilon" in tile]
    assert len(private) == 2
    for tile in private:
        assert "no method is resolved as best" in tile
        assert not any(name in tile for name in ("dp-sgd", "tp-topk", "on-topk"))
    shutil.copytree(several, tmp_path / "clear")
    clear = rewritten(
        tmp_path / "clear", lambda method, seed: 0.9 - 0.01 * seed if method == "tp-topk" else 0.5
    )
    for tile in (tile for tile in headlines(clear) if "epsilon" in tile):
        assert "89.5\N{NO-BREAK SPACE}%" in tile
        assert "tp-topk, better than each other method; dp-sgd 50.0\N{NO-BREAK SPACE}%" in tile


def test_the_majority_class_is_what_a_constant_guess_scores():
    record = {"schema": {HELD_OUT_COUNTS: [30, 50, 20]}}
    assert majority(record, ACCURACY) == Reference("majority class", 0.5)
    assert majority(record, AUC) == Reference("majority class", 0.5)
    assert majority({"schema": {HELD_OUT_COUNTS: [90, 10]}}, ACCURACY) == Reference("majority class", 0.9)
    assert majority({"schema": None}, ACCURACY) is None
    assert majority({}, ACCURACY) is None


def test_runs_without_privacy_and_the_majority_class_stand_beside_private_ones(tmp_path):
    about = RunMetadata(dataset="blobs", model="perceptron", schema={HELD_OUT_COUNTS: [10, 30, 20]})
    for epsilon in (4.0, 8.0):
        a_run(tmp_path / f"dense-{epsilon:g}", "dp-sgd", epsilon=epsilon, seed=0, metadata=about)
    a_run(tmp_path / "free", "clipped-sgd", epsilon=None, seed=0, metadata=about)
    free = next(r for r in records(tmp_path) if r["method"] == "clipped-sgd")["test_accuracy"]
    four, eight, without = group_records(records(tmp_path))
    wanted = (Reference("without privacy (clipped-sgd)", free), Reference("majority class", 0.5))
    assert four.references == eight.references == wanted
    assert without.references == wanted[1:]
    text = text_of(write_comparison(tmp_path))
    assert f"Without privacy (clipped-sgd): {100 * free:.1f} %. Majority class: 50.0 %." in text


def test_intervals_of_methods_stand_side_by_side_and_the_page_is_the_same_every_time(several, tmp_path):
    page = write_comparison(several, tmp_path / "report.html").read_text()
    chart = page.split("against epsilon", 1)[1].split("</svg>", 1)[0]
    places = [
        tuple(re.findall(r'x\d="([\d.]+)"', line))
        for line in re.findall(r'<line class="whisker[^>]*>', chart)
    ]
    assert chart.count("<circle") == 6
    assert len({one for one, _ in places}) == 6, "intervals of different methods cover each other"
    assert page == write_comparison(several, tmp_path / "again.html").read_text()
    assert not any(forbidden in page for forbidden in ("http://", "https://", "<script", " src=", "url("))
