"""`python -m sparsedp_experiments.figures.run [measure | draw] [STUDY ...]`, or both, one after the other.

`measure` does what no record is there for, so it may be stopped and started again at any time; it needs the data
sets (SPARSEDP_DATA). `draw` makes the figures and the gallery page from the records alone.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

from sparsedp.errors import SparseDPError
from sparsedp_experiments.figures.config import Study, load_studies, record_name
from sparsedp_experiments.figures.measures import KINDS
from sparsedp_experiments.figures.page import whole, write
from sparsedp_experiments.figures.store import Store
from sparsedp_experiments.runs.results import commit

ROOT = Path(__file__).parents[3]
LABORATORY = ROOT / "experiments"
CONFIGS = LABORATORY / "configs" / "figures.toml"
TEXT = LABORATORY / "gallery.md"
DOCS = ROOT / "docs"
STORE = Store(LABORATORY / "results" / "figures.jsonl")


def measure(studies: Sequence[Study], store: Store, screen: Console, most: int | None = None) -> None:
    """Measure the points that have no record yet, `most` of them, seed by seed, and show the time left."""
    todo = [
        (study, point)
        for study in studies
        for points in study.by_seed()
        for point in points
        if not store.find(study, point)
    ][:most]
    bar = Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("left"),
        TimeRemainingColumn(elapsed_when_finished=True),
        console=screen,
    )
    with bar:
        task = bar.add_task("measuring", total=len(todo))
        for study, point in todo:
            bar.update(task, description=f"{study.name} {record_name(point)}")
            if not screen.is_terminal:
                screen.print(f"{study.name} {record_name(point)}")
            store.keep(study, point, KINDS[study.kind](study, point), commit())
            bar.advance(task)


def chosen(studies: Sequence[Study], names: Sequence[str]) -> list[Study]:
    """The studies named, in that order; all without names.

    Raises:
        SparseDPError: there is no such study.
    """
    by_name = {study.name: study for study in studies}
    unknown = [name for name in names if name not in by_name]
    if unknown:
        raise SparseDPError(f"no study named {unknown}; there are {', '.join(by_name)}")
    return [by_name[name] for name in names] if names else list(studies)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("step", choices=("measure", "draw", "all"), nargs="?", default="all")
    parser.add_argument("studies", nargs="*", help="names of tables in configs/figures.toml")
    parser.add_argument("--most", type=int, help="measure at most so many points now")
    given = parser.parse_intermixed_args(arguments)
    screen = Console(stderr=True)
    try:
        studies = chosen(load_studies(CONFIGS), given.studies)
        if given.step in ("measure", "all"):
            measure(studies, STORE, screen, given.most)
        if given.step in ("draw", "all"):
            write(TEXT.read_text(), whole(load_studies(CONFIGS), STORE), DOCS)
            screen.print(f"wrote {DOCS / 'gallery.md'}")
    except SparseDPError as error:
        screen.print(f"[bold red]error[/] {error}", highlight=False)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
