"""The card on the warm-up: drawn from what a run kept of it."""

import json
import shutil

import pytest
from test_report_page import Outline

from sparsedp import write_report
from sparsedp.report.warmup import TITLE


def summary(**changes):
    curve = {
        "ranking": "coherent",
        "ratio": [0.1, 0.5, 1.0],
        "share": [0.4, 0.8, 1.0],
        "std": [0.05, 0.1, 0.0],
    }
    content = {
        "steps": 9,
        "planned": 10,
        "noise_std": 0.1,
        "curves": [curve],
    }
    return {**content, **changes}


@pytest.fixture
def run(single, tmp_path):
    return shutil.copytree(single, tmp_path / "run")


@pytest.fixture
def page(run, monkeypatch):
    def shown(content):
        monkeypatch.setattr("sparsedp.diagnostics.summarize_warmup", lambda run: content)
        return Outline(write_report(run).read_text())

    return shown


def test_every_run_shows_what_its_warm_up_did(run):
    assert TITLE in Outline(write_report(run).read_text()).text


def test_a_run_that_kept_its_warm_up_shows_the_curve_and_its_interval(page):
    assert TITLE not in page(None).text
    shown = page(summary())
    assert TITLE in shown.text
    assert "30.2 % to 49.8 %" in shown.text.replace("\u00a0", " ")  # 40 % and 1.96 times 5 %


def test_energy_lost_in_noise_is_said_in_words(page):
    curve = {"ranking": "energy", "ratio": [], "share": [], "std": []}
    shown = page(summary(curves=[curve]))
    assert "does not stand out from the noise" in shown.text


def test_points_of_a_cloud_are_not_joined(run):
    def drawn(kind):
        series = [{"name": "unit", "x": [0.0, 1.0, 2.0], "y": [0.0, 5.0, 1.0]}]
        figure = {"title": "Cloud", "x": "a", "y": "b", "series": series, **kind}
        content = {"format": 1, "figures": [figure], "remarks": ["Nothing else was looked at."]}
        (run / "nonprivate.json").write_text(json.dumps(content))
        text = write_report(run, nonprivate=True).read_text()
        assert "Nothing else was looked at." in text
        section = text[text.index('id="nonprivate"') :]
        return section.count("<polyline"), section.count("<circle")

    assert drawn({"kind": "points"}) == (0, 6)
    assert drawn({"kind": "lines"}) == drawn({}) == (2, 6)
