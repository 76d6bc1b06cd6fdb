"""The report of a run: self-contained, the same every time, with nothing in it that is not public."""

from __future__ import annotations

import json
import math
import re
import shutil
from collections import Counter
from html import unescape
from html.parser import HTMLParser
from pathlib import Path

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

import sparsedp
from runs import SETUPS, a_trainer, advance, finished
from sparsedp import PrivacyError, RunMetadata, StepReport, write_report
from sparsedp.methods import EverySteps
from sparsedp.report import energy_share, noise_segments, primary_metric
from sparsedp.report.svg import line_chart, round_axis
from sparsedp.sklearn import SparseDPClassifier

NEVER_CLOSED = {"meta", "br"}
ABOUT = RunMetadata(dataset="blobs", model="perceptron")
numbers = st.floats(-1e9, 1e9, allow_nan=False, width=64)


class Outline(HTMLParser):
    """Checks that elements nest, and collects what the tests ask about."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.links: list[str] = []
        self.figures: list[Counter[str]] = []
        self.labels: list[str] = []
        self.words: list[str] = []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag, attrs):
        found = dict(attrs)
        self.links += [found["href"]] if "href" in found else []
        if tag == "figure":
            self.figures.append(Counter())
        elif "figure" in self.open:
            self.figures[-1][tag] += 1
        if tag == "svg":
            self.labels.append(found.get("aria-label") or "")
        if tag not in NEVER_CLOSED:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        pass

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if not self.open or self.open[-1] != "style":
            self.words.append(data)

    @property
    def text(self) -> str:
        return " ".join(" ".join(self.words).split()).replace("\u00a0", " ")


@pytest.fixture(scope="module")
def single(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of one finished run."""
    return finished(out=tmp_path_factory.mktemp("single") / "run", metadata=ABOUT).out


@pytest.fixture
def run(single: Path, tmp_path: Path) -> Path:
    """A copy of a finished run, to damage."""
    return shutil.copytree(single, tmp_path / "run")


def text_of(folder: Path) -> str:
    return Outline(write_report(folder).read_text()).text


def test_page_is_well_formed_with_figures_in_words_and_refers_to_nothing_outside_itself(run):
    text = write_report(run).read_text()
    outline = Outline(text)
    assert outline.open == []
    assert len(outline.figures) == 2
    assert all(figure["svg"] and figure["table"] and figure["figcaption"] for figure in outline.figures)
    assert all(len(label) > 20 for label in outline.labels)
    assert outline.links == ["#content"]
    assert not re.findall(r"https?://|@import|url\(| src=|<(?:link|img|iframe|script)", text)
    assert "default-src 'none'" in unescape(text)


def test_page_of_the_same_run_has_the_same_bytes_wherever_it_lies(single, tmp_path):
    first = write_report(single, tmp_path / "one.html").read_bytes()
    moved = shutil.copytree(single, tmp_path / "elsewhere" / single.name)
    page = write_report(moved)
    assert page == moved / "report.html"
    assert page.read_bytes() == first
    assert str(tmp_path).encode() not in first


def test_page_says_what_was_promised_and_spent_and_the_guarantee_comes_first(run):
    text = text_of(run)
    record = json.loads((run / "record.json").read_text())
    head = json.loads((run / "ledger.jsonl").read_text().splitlines()[-1])["hash"]
    said = (
        "At most (8, 0.001)-differential privacy for adding or removing one row of 60",
        "reproducible, not for release",
        "The unit is a row, not a person or patient",
        "Held-out data is outside the guarantee",
        f"{record['epsilon']:.4g}",
        f"{record['steps_charged']} of {record['steps']} planned",
        f"{record['k']} of {record['d']} coordinates",
        f"{100 * record['test_accuracy']:.1f} %",
        head,
        f"in the folder {run.name}: sparsedp verify .",
    )
    assert [words for words in said if words not in text] == []
    places = [
        text.index(words) for words in ("The guarantee, in words", "Verification", "The plan", "Settings")
    ]
    assert places == sorted(places)


def test_page_shows_names_given_by_a_user_as_text(tmp_path):
    evil = "<script>alert('x')</script>&\"'"
    about = RunMetadata(dataset=evil, model=evil, variant=evil)
    text = write_report(finished("tp-rand", out=tmp_path / "run", metadata=about).out).read_text()
    assert "<script" not in text
    assert "&lt;script&gt;alert" in text


def test_report_of_a_run_whose_ledger_does_not_verify_is_not_written(run, tmp_path):
    ledger = run / "ledger.jsonl"
    lines = ledger.read_text().splitlines()
    ledger.write_text("\n".join([lines[0], *lines[2:]]) + "\n")
    with pytest.raises(PrivacyError):
        write_report(run)
    ledger.write_text("\n".join(lines[:-6]) + "\n")
    with pytest.raises(PrivacyError, match="removed"):
        write_report(run)
    assert not (run / "report.html").exists()


def test_report_of_a_run_whose_files_do_not_agree_says_so_in_red_on_top(run):
    page = write_report(run).read_text()
    assert "Not verified" not in page
    record = json.loads((run / "record.json").read_text())
    (run / "record.json").write_text(json.dumps({**record, "epsilon": 0.1}, indent=2) + "\n")
    page = write_report(run).read_text()
    assert page.index('class="banner bad"') < page.index('class="badges"')
    assert "Not verified" in page
    assert "the record's epsilon: it says 0.1" in unescape(page)


@pytest.mark.parametrize("epochs", [2, 0])
def test_report_of_a_run_stopped_early_keeps_its_planned_epsilon(tmp_path, epochs):
    def stop(event: object) -> None:
        if epochs == 0 or (isinstance(event, sparsedp.EpochMetrics) and event.epoch == epochs):
            raise KeyboardInterrupt

    trainer = a_trainer("dp-sgd", out=tmp_path / "run", epochs=4, callbacks=[stop])
    with pytest.raises(KeyboardInterrupt), trainer:
        advance(trainer)
    text = text_of(tmp_path / "run")
    assert "stopped before its plan was done" in text
    assert "At most (8, 0.001)" in text
    assert "is not private" not in text
    assert ("No epoch of this run is done yet" in text) == (epochs == 0)


@pytest.mark.parametrize(("metric", "beside"), [("auc", "chance 0.5"), ("accuracy", "majority class 66.7 %")])
def test_report_leads_with_a_metric_beside_what_needs_no_skill(tmp_path, metric, beside):
    about = RunMetadata(schema={"held_out_counts": [20, 40]})
    evaluate = lambda model: {metric: 0.75, "loss": 1.0}  # noqa: E731
    text = text_of(finished(out=tmp_path / "run", metadata=about, evaluate=evaluate).out)
    assert f"{beside}; outside the guarantee" in text
    assert primary_metric({"loss": 1.0, "accuracy": 0.5}) == "accuracy"
    assert primary_metric({"b": 1.0, "a": 2.0}) == "a"
    assert primary_metric({"a": None}) is None


def test_report_shows_a_private_training_loss_as_a_line_of_its_own(tmp_path):
    result = finished(**SETUPS["private-loss"](), out=tmp_path / "run")
    outline = Outline(result.report().read_text())
    last = result.history[-1]
    assert [figure["circle"] for figure in outline.figures] == [5, 5, 6]
    assert f"training loss by epoch, ending at {last.training_loss:.3g}" in outline.labels[1]
    assert f"{last.training_loss:.4g} {last.training_loss_noise:.3g}" in outline.text


EVERY_STEP = {"clock": EverySteps(1)}


@pytest.mark.parametrize(
    ("method", "options"),
    [("dp-sgd", {}), ("tp-topk", {}), ("on-rand", {}), ("ranked", {}), ("on-rand", EVERY_STEP)],
)
def test_noise_segments_add_up_to_the_noise_every_release_carried(method, options, tmp_path):
    released: list[float] = []

    def watch(event: object) -> None:
        if isinstance(event, StepReport):
            released.append(float(event.released.noise_scale.square().sum()))

    epochs = 25 if options else 4
    result = finished(method, options=options, callbacks=[watch], epochs=epochs, out=tmp_path / "run")
    parts = noise_segments(result.plan, result.supports, result.d, result.plan.total_steps)
    assert [part.energy for part in parts for _ in range(part.steps)] == pytest.approx(released, rel=1e-9)
    share = energy_share(parts, result.d)
    dense = sum(result.d * part.noise_std**2 * part.steps for part in parts)
    assert share == pytest.approx(sum(released) / dense)
    assert (share == pytest.approx(1.0)) == (method == "dp-sgd")
    assert result.report().stat().st_size < 200_000
    assert ("more, in record.json" in result.report().read_text()) == bool(options)


@example([-1e9, -999999999.9999999])
@given(st.lists(numbers, min_size=1, max_size=60))
def test_line_chart_draws_every_point_inside_its_picture_and_labels_it(values):
    x = round_axis("epoch", (0, len(values)), whole=True)
    y = round_axis("<a>", values)
    svg = line_chart(x, y, list(enumerate(values)), "what it shows", level=("<b>", values[0]))
    circles = [part for part in svg.split("<circle")[1:]]
    assert len(circles) == len(values)
    for circle in circles:
        place, height = (float(circle.split(f'{name}="')[1].split('"')[0]) for name in ("cx", "cy"))
        assert 0 <= place <= 520
        assert 0 <= height <= 250
        assert "&lt;a&gt;" in circle
    assert "<a>" not in svg
    assert "<b>" not in svg
    assert "-0" not in svg.split("<title>")[0].replace("-0.", "")


def test_the_guarantee_of_an_estimator_is_a_page_with_its_odds_and_rounded_against_us(tmp_path):
    inputs = torch.randn(80, 3, generator=torch.Generator().manual_seed(0)).numpy()
    how = {"epsilon": 1.0, "bounds": (-3, 3), "classes": [0, 1], "random_state": 0, "epochs": 1}
    model = SparseDPClassifier(**how).fit(inputs, (inputs[:, 0] > 0).astype(int))
    text = Outline(model.guarantee_report(tmp_path / "page.html").read_text()).text
    for words in ("epsilon = 1", "N = 80", "= 2.72 times as likely", "0.1% 1.0% 10.0% 50.0%"):
        assert words in text
    for before, column in ((0.1, 2), (0.5, 3)):  # odds move by at most a factor of e
        odds = before / (1 - before)
        for factor, words in ((math.e, "to at most"), (1 / math.e, "at least")):
            shown = float(text.split(words)[1].split()[column].rstrip("%")) / 100
            exact = odds * factor / (1 + odds * factor)
            assert abs(shown - exact) < 2e-4
            assert (shown >= exact) == (factor > 1)
    assert "Not for release" in text
