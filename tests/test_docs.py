"""README and docs say what is true: their code runs, their commands parse, their links and tables hold."""

from __future__ import annotations

import ast
import json
import re
import shlex
import tomllib
from pathlib import Path

import pytest
from benchmarks.readme import MEASURED_PAGES, updated

import sparsedp

ROOT = Path(__file__).parents[1]
PAGES = sorted([ROOT / "README.md", *(ROOT / "docs").glob("*.md")])
RUN_ELSEWHERE = {"methods.md", "adding-a-method.md"}
"""Run by tests/methods/test_method_docs.py, in a process of their own, as they register a method."""
KNOWN_LANGUAGES = {"python", "sh", "console", "text", "json", "toml", "mermaid"}
TOOLS = {"pip", "git", "cd", "export"}

_FENCE = re.compile(r"^```([\w-]*)[^\n]*\n(.*?)^```", re.DOTALL | re.MULTILINE)


def blocks(page: Path, *languages: str) -> list[str]:
    return [code for language, code in _FENCE.findall(page.read_text()) if language in languages]


def ids(page: Path) -> str:
    return page.name


EVERY_DAY = {"README.md", "quickstart.md"}
"""Pages whose code is not left to `make nightly`."""
WITH_PYTHON = [page for page in PAGES if blocks(page, "python") and page.name not in RUN_ELSEWHERE]
COMMANDS = [(page, command) for page in PAGES for command in blocks(page, "sh", "console")]


@pytest.mark.parametrize("page", PAGES, ids=ids)
def test_every_block_of_code_has_a_language_that_is_checked(page):
    assert {language for language, _ in _FENCE.findall(page.read_text())} <= KNOWN_LANGUAGES


@pytest.mark.parametrize(
    "page",
    [
        page if page.name in EVERY_DAY else pytest.param(page, marks=pytest.mark.nightly)
        for page in WITH_PYTHON
    ],
    ids=ids,
)
def test_the_python_on_the_page_runs_from_top_to_bottom(page, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    names: dict[str, object] = {"__name__": "__docs__"}
    for code in blocks(page, "python"):
        exec(compile(ast.parse(code), str(page), "exec"), names)


def test_pages_with_python_are_run_here_or_by_the_test_named_above():
    there = (ROOT / "tests" / "methods" / "test_method_docs.py").read_text()
    assert all(f'"{name}"' in there for name in RUN_ELSEWHERE)
    assert {page.name for page in WITH_PYTHON} >= {
        "README.md",
        "quickstart.md",
        "privacy.md",
        "run-format.md",
    }


def lines_of(block: str) -> list[str]:
    """The commands of a block, without prompts, comments and the output between them."""
    joined = block.replace("\\\n", " ")
    prompted = [line[2:] for line in joined.splitlines() if line.startswith("$ ")]
    found = prompted or joined.splitlines()
    return [line for line in found if line.strip() and not line.lstrip().startswith("#")]


@pytest.mark.parametrize(
    "command",
    [(page, line) for page, block in COMMANDS for line in lines_of(block)],
    ids=lambda c: f"{c[0].name}: {c[1]}",
)
def test_a_command_line_is_one_the_program_takes(command):
    words = shlex.split(command[1], comments=True)
    while words and re.fullmatch(r"[A-Z_]+=.*", words[0]):
        words = words[1:]
    program, *arguments = words
    CHECKS[program](arguments)


def _parse_with_the_command_line(arguments: list[str]) -> None:
    import typer

    from sparsedp.cli import app

    found = typer.main.get_command(app)
    context = found.make_context("sparsedp", list(arguments), resilient_parsing=False)
    while hasattr(found, "resolve_command"):
        rest = (
            [*context._protected_args, *context.args] if hasattr(context, "_protected_args") else context.args
        )
        if not rest:
            return
        name, found, rest = found.resolve_command(context, list(rest))
        context = found.make_context(name, list(rest), parent=context)


def _is_a_target(arguments: list[str]) -> None:
    targets = re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert set(arguments) <= set(targets)


def _is_there(arguments: list[str]) -> None:
    if arguments[0] == "-m":
        assert (ROOT / Path(*arguments[1].split("."))).with_suffix(".py").exists()
    else:
        assert (ROOT / arguments[0]).exists()


def _anything(arguments: list[str]) -> None:
    """Other people's programs."""


CHECKS = {
    "sparsedp": _parse_with_the_command_line,
    "make": _is_a_target,
    "python": _is_there,
    **dict.fromkeys(TOOLS, _anything),
}


def test_a_wrong_flag_would_be_found():
    with pytest.raises(Exception, match="No such option"):
        _parse_with_the_command_line(["train", "--no-such-flag"])
    with pytest.raises(Exception, match="No such command"):
        _parse_with_the_command_line(["no-such-command"])


@pytest.mark.parametrize("page", PAGES, ids=ids)
def test_blocks_of_data_parse(page):
    for code in blocks(page, "json"):
        json.loads(code)
    for code in blocks(page, "toml"):
        tomllib.loads(code)


@pytest.mark.parametrize("page", PAGES, ids=ids)
def test_links_lead_somewhere(page):
    text = _FENCE.sub("", page.read_text())
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        if "://" in target:
            continue
        path, _, anchor = target.partition("#")
        file = (page.parent / path).resolve() if path else page
        assert file.exists(), target
        if anchor:
            headings = re.findall(r"^#+ (.*)$", file.read_text(), re.MULTILINE)
            assert anchor in {re.sub(r"[^\w -]", "", h).lower().replace(" ", "-") for h in headings}, target


def keys_under(heading: str) -> list[set[str]]:
    """The keys of every table in a section of docs/run-format.md."""
    text = (ROOT / "docs" / "run-format.md").read_text()
    section = re.split(r"^## ", text, flags=re.MULTILINE)
    body = next(part for part in section if part.startswith(heading))
    tables = re.findall(r"^\| key \|.*?(?:\n(?!\|)|\Z)", body, re.DOTALL | re.MULTILINE)
    return [set(re.findall(r"^\| `(\w+)`", table, re.MULTILINE)) for table in tables]


def test_the_run_format_is_that_of_a_real_run(tmp_path):
    from torch import nn

    import sparsedp
    from sparsedp_experiments.data import digits

    data = digits()
    run = tmp_path / "run"
    sparsedp.fit(
        nn.Sequential(nn.Flatten(), nn.Linear(64, 10)),
        data.train,
        nn.CrossEntropyLoss(reduction="none"),
        epsilon=8,
        epochs=1,
        eval_dataset=data.test,
        run_dir=run,
        progress=False,
    ).report()
    plan = json.loads((run / "plan.json").read_text())
    header, written, block = (
        json.loads(line) for line in (run / "ledger.jsonl").read_text().splitlines()[:3]
    )
    line = json.loads((run / "metrics.jsonl").read_text().splitlines()[0])
    record = json.loads((run / "record.json").read_text())
    assert keys_under("plan.json") == [set(plan), set(plan["phases"][0])]
    assert keys_under("ledger.jsonl") == [set(header), set(block), set(written)]
    assert keys_under("metrics.jsonl") == [set(line)]
    assert keys_under("record.json") == [set(record)]
    text = (ROOT / "docs" / "run-format.md").read_text()
    listed = set(re.findall(r"^\| `([\w.]+\.\w+)` \|", text, re.MULTILINE))
    assert listed == {file.name for file in run.iterdir()} | {"nonprivate.json"}


@pytest.mark.parametrize("page", MEASURED_PAGES)
def test_a_pages_tables_are_up_to_date_with_the_committed_measurements(page):
    text = (ROOT / page).read_text()
    assert updated(text) == text, "run: python -m benchmarks.readme"


def test_tables_are_made_from_measurements(tmp_path):
    text = (
        "a\n<!-- begin results -->\nold\n<!-- end results -->\nb\n<!-- begin speed -->\n<!-- end speed -->\n"
    )
    assert "on the way" in updated(text, tmp_path)
    row = {"model": "m", "contender": "sgd", "active_ratio": 1.0, "support": "full", "batch_size": 64}
    rows = [
        {**row, "median_seconds": 0.1, "peak_rss_mb": 400.0},
        {**row, "contender": "opacus-hooks", "median_seconds": 0.3, "peak_rss_mb": 900.0},
        {**row, "contender": "opacus-ew", "error": "cannot", "median_seconds": None, "peak_rss_mb": None},
        {**row, "contender": "sparsedp", "median_seconds": 0.15, "peak_rss_mb": 450.0},
        {**row, "contender": "sparsedp", "active_ratio": 0.2, "support": "random"}
        | {"median_seconds": 0.14, "peak_rss_mb": 440.0},
    ]
    (tmp_path / "benchmarks" / "results").mkdir(parents=True)
    (tmp_path / "benchmarks" / "results" / "step.json").write_text(json.dumps({"rows": rows}))
    made = updated(text, tmp_path).replace("\u00a0", " ")
    assert "old" not in made
    assert "| m, 64 | 100 ms | 300 ms | 150 ms | 140 ms | - | 400 / 900 / 450 MB |" in made
    assert updated(made, tmp_path) == updated(text, tmp_path)


def test_the_site_has_every_page_and_the_reference_every_name():
    pages = {page.name for page in (ROOT / "docs").glob("*.md")}
    assert set(re.findall(r"[\w-]+\.md", (ROOT / "mkdocs.yml").read_text())) == pages
    assert set(re.findall(r"\(([\w-]+\.md)\)", (ROOT / "docs" / "index.md").read_text())) == pages - {
        "index.md"
    }
    named = set(re.findall(r"`(\w+)`", (ROOT / "docs" / "api.md").read_text()))
    assert set(sparsedp.__all__) <= named


def test_the_architecture_page_names_files_that_are_there_and_draws_the_import_contract():
    page, source = ROOT / "docs" / "architecture.md", ROOT / "src" / "sparsedp"
    named = re.findall(r"`((?:\w+/)+\w+\.py)`", page.read_text())
    assert len(named) > 30
    assert [name for name in named if not (source / name).exists() and not (ROOT / name).exists()] == []
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    layers = next(one["layers"] for one in contracts if one["type"] == "layers")
    height = {name: place for place, layer in enumerate(layers) for name in layer.split(" | ")}
    (picture,) = blocks(page, "mermaid")
    assert (
        set(re.findall(r"(\w+)\[", picture))
        == set(height)
        == {f.parent.name for f in source.glob("*/__init__.py")}
    )
    arrows = re.findall(r"^ +(\w+).*?--> ([\w &]+)$", picture, re.MULTILINE)
    assert len(arrows) > 12
    assert all(height[top] < height[low] for top, lows in arrows for low in lows.split(" & "))
