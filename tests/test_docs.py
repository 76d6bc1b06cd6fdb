"""README and docs say what is true: their code runs, their commands parse, their links and tables hold."""

from __future__ import annotations

import ast
import inspect
import json
import re
import shlex
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

import sparsedp

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
PAGES = sorted([ROOT / "README.md", ROOT / "CONTRIBUTING.md", *DOCS.glob("*.md")])
NOTEBOOKS = sorted((DOCS / "tutorials").glob("*.ipynb"))
KNOWN_LANGUAGES = {"python", "diff", "sh", "console", "text", "json", "toml"}
PUBLIC = re.compile(r"sparsedp(\.(sklearn|methods|methods\.scores|federated|integrations\.\w+|testing))?")
IN_MAKE_TEST = {"README.md", "quickstart.md"}
"""Pages whose code is not left to `make nightly`."""
MOST_WORDS = 18_000

_FENCE = re.compile(r"^```([\w-]*)[^\n]*\n(.*?)^```", re.DOTALL | re.MULTILINE)


def blocks(page: Path, *languages: str) -> list[str]:
    return [code for language, code in _FENCE.findall(page.read_text()) if language in languages]


def code_of(page: Path) -> str:
    if page.suffix == ".md":
        return "\n".join(blocks(page, "python"))
    cells = json.loads(page.read_text())["cells"]
    return "\n".join("".join(cell["source"]) for cell in cells if cell["cell_type"] == "code")


def ids(page: Path) -> str:
    return page.name


def marked(page: Path):
    return page if page.name in IN_MAKE_TEST else pytest.param(page, marks=pytest.mark.nightly)


@pytest.mark.parametrize("page", PAGES, ids=ids)
def test_page_has_only_known_languages(page):
    assert {language for language, _ in _FENCE.findall(page.read_text())} <= KNOWN_LANGUAGES


@pytest.mark.parametrize("page", [marked(page) for page in PAGES if blocks(page, "python")], ids=ids)
def test_page_runs_from_top_to_bottom_in_a_process_of_its_own(page, tmp_path):
    script = tmp_path / "page.py"
    script.write_text("\n".join(blocks(page, "python")))
    done = subprocess.run(
        [sys.executable, "-W", "ignore::DeprecationWarning", str(script)],
        cwd=tmp_path, capture_output=True, text=True, check=False, timeout=280,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]


def new_side(number: int) -> str:
    """What a diff of docs/opacus.md makes of the loop."""
    lines = blocks(DOCS / "opacus.md", "diff")[number].splitlines()
    return "\n".join(line[1:] for line in lines if not line.startswith("-"))


@pytest.mark.parametrize("number", [0, 1])
def test_loop_of_the_diff_against_opacus_runs(number):
    import torch
    from torch import nn
    from torch.nn import functional
    from torch.utils.data import DataLoader, TensorDataset

    class Scores(nn.Linear):
        def forward(self, input_ids, attention_mask, token_type_ids):
            return SimpleNamespace(logits=super().forward(input_ids))

    x, y = torch.randn(60, 4), torch.randint(0, 2, (60,))
    model = Scores(4, 2) if number else nn.Linear(4, 2)
    data = TensorDataset(x, x, x, y) if number else TensorDataset(x, y)
    settings = {"sigma": 1.0, "clip": 1.0, "delta": 1e-3, "epochs": 1}
    names = {
        "nn": nn, "F": functional, "sparsedp": sparsedp, "model": model, "args": SimpleNamespace(**settings),
        "optimizer": torch.optim.SGD(model.parameters(), lr=0.1), "train_loader": DataLoader(data, batch_size=20),
        "EPSILON": 3, "DELTA": 1e-3, "EPOCHS": 1, "CLIP": 1.0,
    }  # fmt: skip
    exec(new_side(number), names)
    if number == 0:
        exec("train(args, model, train_loader, optimizer, privacy_engine)", names)
    private = names["private" if number else "privacy_engine"]
    assert private.step == 3  # an epoch


def doors():
    from sparsedp import federated, sklearn

    names = {
        sparsedp: "fit make_private Trainer plan audit verify held_out "
        "DataConfig RunConfig RunMetadata PrivateNormalisation",
        sklearn: "SparseDPClassifier SparseDPRegressor PublicEncoder PrivacyBudget",
        federated: "FederatedTrainer Client LocalSGD",
    }
    yield from (getattr(module, name) for module in names for name in names[module].split())


@pytest.mark.parametrize("door", doors(), ids=lambda door: door.__name__)
def test_reference_names_every_argument_of_a_door(door):
    from sparsedp.sklearn import SparseDPClassifier, SparseDPRegressor

    assert f".{door.__name__}\n" in (DOCS / "api.md").read_text()
    said = inspect.getdoc(door) or ""
    if door is SparseDPRegressor:
        assert "all other arguments are those of `SparseDPClassifier`" in " ".join(said.split())
        said += inspect.getdoc(SparseDPClassifier)
    described = set(re.findall(r"^\s*(\w+): ", said, re.MULTILINE))
    assert set(inspect.signature(door).parameters) <= described


def test_command_line_page_names_every_option():
    import typer

    from sparsedp.cli import app

    commands = typer.main.get_command(app).commands
    rows = re.findall(
        r"^\| `sparsedp (\w+)[^`]*` \|.*\| (.*) \|$", (DOCS / "cli.md").read_text(), re.MULTILINE
    )
    assert {name for name, _ in rows} == set(commands)
    for name, options in rows:
        taken = {p.opts[0] for p in commands[name].params if p.opts[0].startswith("--")} - {"--help"}
        assert set(re.findall(r"`(--[\w-]+)`", options)) == taken


def commands() -> list[tuple[str, str]]:
    """Page and command of every line in a block of shell, without prompts, comments and output."""
    found = []
    for page in PAGES:
        for block in blocks(page, "sh", "console"):
            lines = block.replace("\\\n", " ").splitlines()
            prompted = [line[2:] for line in lines if line.startswith("$ ")]
            found += [
                (page.name, line)
                for line in prompted or lines
                if line.strip() and not line.lstrip().startswith("#")
            ]
    return found


@pytest.mark.parametrize("command", commands(), ids=lambda c: f"{c[0]}: {c[1]}")
def test_command_line_is_one_that_the_program_takes(command):
    program, *arguments = shlex.split(command[1], comments=True)
    assert program in {"sparsedp", "make", "python", "pip", "cd", "export"}
    if program == "sparsedp":
        parse(arguments)
    if program == "make":
        assert set(arguments) <= set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))


def parse(arguments: list[str]) -> None:
    import typer

    from sparsedp.cli import app

    group = typer.main.get_command(app)
    context = group.make_context("sparsedp", list(arguments))
    name, command, rest = group.resolve_command(context, list(arguments))
    command.make_context(name, rest, parent=context)


@pytest.mark.parametrize("page", PAGES, ids=ids)
def test_link_leads_somewhere(page):
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
    section = re.split(r"^## ", (DOCS / "run-format.md").read_text(), flags=re.MULTILINE)
    body = next(part for part in section if part.startswith(heading))
    tables = re.findall(r"^\| key \|.*?(?:\n(?!\|)|\Z)", body, re.DOTALL | re.MULTILINE)
    return [set(re.findall(r"^\| `(\w+)`", table, re.MULTILINE)) for table in tables]


def test_run_format_is_that_of_a_real_run(tmp_path):
    import torch
    from torch import nn
    from torch.utils.data import TensorDataset

    x = torch.randn(60, 4, generator=torch.Generator().manual_seed(0))
    y, run = (x[:, 0] > 0).long(), tmp_path / "run"
    data, apart = TensorDataset(x[:50], y[:50]), TensorDataset(x[50:], y[50:])
    sparsedp.fit(
        nn.Linear(4, 2), data, nn.CrossEntropyLoss(), epsilon=8, delta=1e-3, epochs=1, eval_dataset=apart,
        run_dir=run, progress=False,
    ).report()  # fmt: skip
    header, written, block = (
        json.loads(line) for line in (run / "ledger.jsonl").read_text().splitlines()[:3]
    )
    plan = json.loads((run / "plan.json").read_text())
    line = json.loads((run / "metrics.jsonl").read_text().splitlines()[0])
    record = json.loads((run / "record.json").read_text())
    assert keys_under("plan.json") == [set(plan), set(plan["phases"][0])]
    assert keys_under("ledger.jsonl")[:3] == [set(header), set(block), set(written)]
    assert keys_under("metrics.jsonl") == [set(line)]
    assert keys_under("record.json") == [set(record)]
    listed = set(re.findall(r"^\| `([\w.]+\.\w+)` \|", (DOCS / "run-format.md").read_text(), re.MULTILINE))
    assert listed == {file.name for file in run.iterdir()}


def test_site_has_every_page_and_the_reference_every_name():
    pages = {page.name for page in DOCS.glob("*.md")}
    shown = (ROOT / "mkdocs.yml").read_text()
    assert set(re.findall(r"[\w-]+\.md", shown)) == pages
    assert set(re.findall(r"tutorials/([\w-]+\.ipynb)[,\]]", shown)) == {page.name for page in NOTEBOOKS}
    assert set(sparsedp.__all__) <= set(re.findall(r"`(\w+)`", (DOCS / "api.md").read_text()))
    assert "mkdocs build --strict" in (ROOT / "Makefile").read_text()  # with --quiet, strict finds nothing


def test_prose_of_the_site_is_short():
    words = {page: len(_FENCE.sub("", page.read_text()).split()) for page in PAGES}
    assert sum(count for page, count in words.items() if page.parent == DOCS) <= MOST_WORDS
    assert words[ROOT / "README.md"] <= 700


def test_design_names_files_that_are_there():
    named = re.findall(r"`((?:\w+/)*\w+(?:\.py|/))`", (DOCS / "design.md").read_text())
    source = ROOT / "src" / "sparsedp"
    assert len(named) > 25
    apart = () if (ROOT / "experiments").exists() else ("experiments",)  # not in the source distribution
    gone = [name for name in named if not ((source / name).exists() or (ROOT / name).exists())]
    assert [name for name in gone if not name.startswith(apart)] == []


@pytest.mark.nightly
@pytest.mark.parametrize("notebook", NOTEBOOKS, ids=ids)
def test_notebook_runs_from_top_to_bottom(notebook, tmp_path):
    nbformat, nbclient = pytest.importorskip("nbformat"), pytest.importorskip("nbclient")
    book = nbformat.read(notebook, as_version=4)
    nbclient.NotebookClient(book, timeout=280, resources={"metadata": {"path": str(tmp_path)}}).execute()


@pytest.mark.parametrize("page", [page for page in [*PAGES, *NOTEBOOKS] if code_of(page)], ids=ids)
def test_page_imports_public_modules_only(page):
    for node in ast.walk(ast.parse(code_of(page))):
        imported = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        imported += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
        assert all(PUBLIC.fullmatch(name) for name in imported if name.startswith("sparsedp"))
