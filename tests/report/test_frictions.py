"""What a reader stumbled over: winners that are none, numbers without a measure, empty boxes."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
from report_runs import a_run, write
from test_comparison import records
from test_report_in_browser import DESK, PHONE, look
from test_report_page import Outline

from sparsedp import RunMetadata
from sparsedp.report.metric import ACCURACY, AUC
from sparsedp.report.references import HELD_OUT_COUNTS, Reference, drawn, majority
from sparsedp_experiments.comparison.groups import Group, group_records

pytestmark = pytest.mark.usefixtures("checked_once")


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
    return write(folder)


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


def test_a_reference_is_drawn_unless_it_would_squeeze_the_chart():
    near, far = Reference("near", 0.95), Reference("far", 0.1)
    assert drawn((near, far), 0.8, 0.9) == (near,)
    assert drawn((near, far), 0.1, 0.9) == (near, far)


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
    text = Outline(write(tmp_path).read_text()).text
    assert f"Without privacy (clipped-sgd): {100 * free:.1f} %. Majority class: 50.0 %." in text
    single = Outline(write(tmp_path / "dense-8").read_text()).text
    assert "majority class 50.0 %; outside the guarantee" in single


def test_the_slope_chart_has_an_interval_at_every_point(several, tmp_path):
    page = write(several, tmp_path / "report.html").read_text()
    chart = page.split("Held-out accuracy against epsilon", 1)[1].split("</svg>", 1)[0]
    assert chart.count('class="dot') == 6
    assert chart.count('class="whisker') == 6
    places = re.findall(r'<line x1="([\d.]+)" x2="\1" y1="([\d.]+)" y2="([\d.]+)" class="whisker', chart)
    assert len({x for x, _, _ in places}) == 6, "intervals of different methods cover each other"
    assert all(low != high for _, low, high in places)


def test_rows_as_the_unit_are_a_warning_and_people_are_not(single, several, tmp_path):
    said = '<span class="badge warn">protects each row, not whoever has several</span>'
    assert said in write(single, tmp_path / "single.html").read_text()
    assert said in write(several, tmp_path / "several.html").read_text()
    units = a_run(
        tmp_path / "patients", "dp-sgd", seed=0, unit_ids=[i // 2 for i in range(80)], unit_name="patient"
    )
    page = write(units).read_text()
    assert '<span class="badge plain">protects each patient</span>' in page
    assert "protects each row" not in page


def test_the_line_that_checks_a_run_again_names_its_folder(single, tmp_path):
    text = Outline(write(single, tmp_path / "report.html").read_text()).text
    assert f"To check it again, in the folder {single.name}: sparsedp verify ." in text


KEY_COLUMN = """
const table = [...document.querySelectorAll("table")].find(t => t.caption.textContent.startsWith("Methods at"));
const box = table.parentElement.getBoundingClientRect();
const place = [...table.tHead.rows[0].cells].findIndex(c => c.textContent.startsWith("paired difference"));
return [...table.tBodies[0].rows].map(row => row.cells[place].getBoundingClientRect())
  .map(cell => [cell.left - box.left, box.right - cell.right]);
"""
EMPTY_SHARE = """
return [...document.querySelectorAll(".cards > *")].filter(card => card.checkVisibility()).map(card => {
  const last = card.lastElementChild.getBoundingClientRect(), box = card.getBoundingClientRect();
  return [card.querySelector("h3, summary").textContent, (box.bottom - last.bottom) / box.height];
}).filter(([, share]) => share > 0.34);
"""


def test_the_difference_is_seen_on_a_phone_without_scrolling(browser, several, tmp_path):
    look(browser, write(several, tmp_path / "report.html"), PHONE, "light")
    places = browser.execute_script(KEY_COLUMN)
    assert len(places) == 4, "three methods and the line without privacy"
    assert all(left >= 0 and right >= 0 for left, right in places)


@pytest.mark.parametrize("which", ["single", "several", "unevaluated"])
def test_no_card_is_half_empty(browser, single, several, tmp_path, which):
    runs = {"single": single, "several": several}
    folder = runs.get(which) or a_run(tmp_path / "run", "dp-sgd", seed=0, evaluate=lambda model: {})
    look(browser, write(folder, tmp_path / "report.html"), DESK, "light")
    assert browser.execute_script(EMPTY_SHARE) == []
