"""The file: self-contained, the same every time, readable by machines, with nothing in it that is not public."""

from __future__ import annotations

import json
import shutil
from collections import Counter
from html import unescape
from html.parser import HTMLParser
from pathlib import Path

import pytest
from report_runs import a_run, train, write

import sparsedp
from sparsedp import DataError, PrivacyError, RunMetadata, SparseDPError, write_report
from sparsedp._files import readable_json
from sparsedp.report.nonprivate import WARNING

NEVER_CLOSED = {"meta", "br", "hr", "rect", "line", "path", "circle", "polyline"}


class Outline(HTMLParser):
    """Checks that elements nest, and collects what the tests ask about."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.ids: list[str] = []
        self.links: list[str] = []
        self.figures: list[Counter[str]] = []
        self.charts: list[dict[str, str | None]] = []
        self.words: list[str] = []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag, attrs):
        found = dict(attrs)
        self.ids += [found["id"]] if found.get("id") else []
        self.links += [found["href"]] if "href" in found else []
        if tag == "figure":
            self.figures.append(Counter())
        elif "figure" in self.open:
            self.figures[-1][tag] += 1
        if tag == "svg" and found.get("role") == "img":
            self.charts.append(found)
        if tag not in NEVER_CLOSED:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        if "figure" in self.open:
            self.figures[-1][tag] += 1

    def handle_endtag(self, tag):
        if tag in NEVER_CLOSED and (not self.open or self.open[-1] != tag):
            return
        assert self.open.pop() == tag

    def handle_data(self, data):
        if not self.open or self.open[-1] not in ("style", "script"):
            self.words.append(data)

    @property
    def text(self) -> str:
        return " ".join(" ".join(self.words).split()).replace("\u00a0", " ")


def page_of(folder: Path, tmp_path: Path) -> tuple[str, Outline]:
    text = write(folder, tmp_path / "report.html").read_text()
    return text, Outline(text)


@pytest.mark.parametrize("which", ["single", "several"])
def test_the_page_is_well_formed_and_every_figure_has_a_text_and_a_table(which, request, tmp_path):
    _, outline = page_of(request.getfixturevalue(which), tmp_path)
    assert outline.open == []
    assert max(Counter(outline.ids).values()) == 1
    assert [link for link in outline.links if link.removeprefix("#") not in outline.ids] == []
    assert len(outline.figures) >= 5
    assert all(figure["svg"] and figure["table"] and figure["figcaption"] for figure in outline.figures)
    assert len(outline.charts) >= 5
    assert all(len(chart["aria-label"] or "") > 20 for chart in outline.charts)


@pytest.mark.parametrize("which", ["single", "several"])
def test_the_page_refers_to_nothing_outside_itself(which, request, tmp_path):
    text, outline = page_of(request.getfixturevalue(which), tmp_path)
    assert all(link.startswith("#") for link in outline.links)
    for forbidden in ("http://", "https://", "//cdn", "@import", "url(", " src=", "<link", "<img", "<iframe"):
        assert forbidden not in text
    assert "default-src 'none'" in unescape(text)


@pytest.mark.parametrize("which", ["single", "several"])
def test_the_same_run_gives_the_same_bytes(which, request, tmp_path):
    folder = request.getfixturevalue(which)
    first = write(folder, tmp_path / "one.html").read_bytes()
    assert write(folder, tmp_path / "two.html").read_bytes() == first


def test_moving_the_folder_does_not_name_the_machine(single, tmp_path):
    moved = tmp_path / "elsewhere" / "run"
    shutil.copytree(single, moved)
    assert str(tmp_path) not in write(moved).read_text()
    assert write(moved) == moved / "report.html"


def test_the_page_says_what_was_promised_and_spent(single, tmp_path):
    _, outline = page_of(single, tmp_path)
    record = json.loads((single / "record.json").read_text())
    head = json.loads((single / "ledger.jsonl").read_text().splitlines()[-1])["hash"]
    for said in (
        "At most (8, 0.001)-differential privacy for adding or removing one row of 80",
        "reproducible, not for release",
        "The unit is a row, not a person or patient",
        "Held-out data is outside the guarantee",
        f"{record['epsilon']:.4g}",
        f"{record['steps_charged']} of {record['steps']} planned",
        f"{record['k']} of {record['d']} coordinates",
        f"{100 * record['test_accuracy']:.1f} %",
        head,
    ):
        assert said in outline.text, said


def test_names_given_by_a_user_cannot_become_markup(tmp_path):
    evil = "<script>alert('x')</script>&\"'"
    folder = a_run(
        tmp_path / "run", "tp-rand", seed=0, metadata=RunMetadata(dataset=evil, model=evil, variant=evil)
    )
    text = write(folder).read_text()
    assert evil not in text
    assert text.count("<script>") == 1
    assert "&lt;script&gt;alert" in text


def test_diagnostics_are_not_even_opened_unless_asked_for(single, tmp_path):
    run = tmp_path / "run"
    shutil.copytree(single, run)
    before = write_report(run).read_bytes()
    (run / "nonprivate.json").write_text("not JSON at all")
    assert write_report(run).read_bytes() == before
    with pytest.raises(DataError, match=r"nonprivate\.json"):
        write_report(run, nonprivate=True)


def test_diagnostics_that_are_asked_for_come_under_a_banner(single, tmp_path):
    run = tmp_path / "run"
    shutil.copytree(single, run)
    empty = Outline(write_report(run, nonprivate=True).read_text()).text
    assert WARNING in empty
    assert "kept no non-private diagnostics" in empty
    figure = {
        "title": "Training loss",
        "x": "epoch",
        "y": "loss",
        "series": [{"name": "all", "x": [0, 1], "y": [3, 2.5]}],
    }
    content = {"format": 1, "values": [{"name": "oracle capture", "value": 0.8765}], "figures": [figure]}
    (run / "nonprivate.json").write_text(json.dumps(content))
    shown = Outline(write_report(run, nonprivate=True).read_text()).text
    assert "0.8765" in shown
    assert "Training loss (not private)" in shown
    plain = Outline(write_report(run).read_text()).text
    assert WARNING not in plain
    assert "0.8765" not in plain


def test_a_folder_of_runs_is_refused(several):
    with pytest.raises(SparseDPError, match="holds 13 runs"):
        write_report(several)


def test_a_run_whose_ledger_does_not_verify_gets_no_report(single, tmp_path):
    run = tmp_path / "run"
    shutil.copytree(single, run)
    ledger = run / "ledger.jsonl"
    lines = ledger.read_text().splitlines()
    ledger.write_text("\n".join([lines[0], *lines[2:]]) + "\n")
    with pytest.raises(PrivacyError):
        write_report(run, tmp_path / "report.html")
    ledger.write_text("\n".join(lines[:-6]) + "\n")
    with pytest.raises(PrivacyError, match="removed"):
        write_report(run, tmp_path / "report.html")
    assert not (tmp_path / "report.html").exists()


def test_a_run_whose_files_do_not_agree_says_so_in_red_on_top(single, tmp_path):
    run = tmp_path / "run"
    shutil.copytree(single, run)
    page = write_report(run, tmp_path / "report.html").read_text()
    assert "Not verified" not in page
    record = json.loads((run / "record.json").read_text())
    (run / "record.json").write_text(json.dumps({**record, "epsilon": 0.1}, indent=2) + "\n")
    page = write_report(run, tmp_path / "report.html").read_text()
    assert page.index('class="banner bad"') < page.index('class="badges"')
    assert "Not verified" in page
    assert "the record's epsilon: it says 0.1" in unescape(page)


def test_files_of_two_runs_are_not_taken_for_one(single, several, tmp_path):
    run = tmp_path / "run"
    shutil.copytree(single, run)
    shutil.copy(several / "tp-topk-4-0" / "plan.json", run)
    with pytest.raises(PrivacyError, match="another plan"):
        write_report(run)


@pytest.mark.parametrize("missing", ["record.json", "checkpoint.safetensors", "ledger.jsonl"])
def test_a_missing_file_is_named(single, tmp_path, missing):
    run = tmp_path / "run"
    shutil.copytree(single, run)
    (run / missing).unlink()
    with pytest.raises(SparseDPError, match=missing.split(".")[0]):
        write_report(run)


def test_a_record_of_another_format_is_refused(single, tmp_path):
    run = tmp_path / "run"
    shutil.copytree(single, run)
    (run / "record.json").write_text(json.dumps({"format": 99}))
    with pytest.raises(DataError, match="99"):
        write_report(run)


def test_a_folder_without_runs_and_a_place_that_cannot_be_written_are_clear_errors(single, tmp_path):
    with pytest.raises(DataError, match="no run"):
        write(tmp_path)
    (tmp_path / "file").write_text("")
    with pytest.raises(SparseDPError, match="cannot write"):
        write_report(single, tmp_path / "file" / "report.html")


def test_a_result_writes_the_report_of_its_folder(tmp_path):
    result = train("tp-coherent", run_dir=tmp_path / "run", seed=3)
    assert result.report() == tmp_path / "run" / "report.html"
    assert result.report(tmp_path / "copy.html").read_bytes() == result.report().read_bytes()


def test_a_result_without_a_folder_still_has_a_report(tmp_path):
    result = train("tp-topk")
    with pytest.raises(SparseDPError, match="say where"):
        result.report()
    outline = Outline(result.report(tmp_path / "report.html").read_text())
    assert "its ledger lived in memory" in outline.text
    assert "noise from the operating system" in outline.text
    assert outline.open == []


def test_a_run_that_is_not_private_says_so_at_the_top(several, tmp_path):
    _, outline = page_of(several / "clipped", tmp_path)
    top = outline.text[: outline.text.index("How it went")]
    assert "this run protects nobody" in top
    assert "∞" in top


def test_a_run_stopped_early_keeps_its_planned_epsilon(tmp_path):
    def stop(event: object) -> None:
        if isinstance(event, sparsedp.EpochMetrics) and event.epoch == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        train("tp-topk", run_dir=tmp_path / "run", seed=0, callbacks=[stop])
    outline = Outline(write_report(tmp_path / "run").read_text())
    assert "stopped before its plan was done" in outline.text
    assert "At most (8, 0.001)" in outline.text


def test_a_run_stopped_in_its_first_epoch_is_not_called_unprotected(tmp_path):
    def stop(event: object) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        train("tp-topk", run_dir=tmp_path / "run", seed=0, callbacks=[stop])
    outline = Outline(write_report(tmp_path / "run").read_text())
    assert outline.text.count("No epoch of this run is done yet") == 3
    assert "is not private" not in outline.text


def test_two_classes_lead_with_the_area_under_the_curve(tmp_path):
    folder = a_run(tmp_path / "run", "tp-topk", classes=2, seed=0)
    record = json.loads((folder / "record.json").read_text())
    outline = Outline(write(folder).read_text())
    assert "held-out AUC" in outline.text
    assert f"{record['metrics']['auc']:.4g}" in outline.text


def test_no_absolute_number_of_seconds_is_shown(single, tmp_path):
    """How long a step takes depends on the data; the record keeps it, the page does not."""
    text, _ = page_of(single, tmp_path)
    slower = shutil.copytree(single, tmp_path / single.name)
    record = json.loads((slower / "record.json").read_text())
    record["timing"]["seconds"] += 98765.4
    (slower / "record.json").write_bytes(readable_json(record))
    assert page_of(slower, tmp_path)[0] == text
    assert "seconds" not in text
