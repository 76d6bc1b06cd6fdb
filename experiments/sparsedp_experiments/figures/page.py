"""The gallery page: hand-written text with figures, tables and numbers put in from the records."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from sparsedp.errors import SparseDPError
from sparsedp_experiments.figures.config import Study
from sparsedp_experiments.figures.plots import PLOTS
from sparsedp_experiments.figures.store import Record, Records, Store
from sparsedp_experiments.figures.tables import TABLES
from sparsedp_experiments.figures.words import filled

FOLDER = "figures"
_HEAD = "<!-- Made by `make figures` from experiments/gallery.md and experiments/results; edit those. -->\n"


def whole(studies: Sequence[Study], store: Store) -> dict[str, list[Record]]:
    """The records of every study."""
    return {study.name: store.records(study) for study in studies}


def drawn(records: Records) -> dict[str, str]:
    """The figures whose studies are all there: file name and text."""
    ready = {name: plot for name, plot in PLOTS.items() if all(records[study] for study in plot.studies)}
    return {f"{name}.svg": plot.draw(records) for name, plot in ready.items()}


def page(text: str, records: Records) -> str:
    """The page.

    Raises:
        SparseDPError: the text names a figure or table that does not exist, or leaves a figure out.
    """
    shown = []

    def figure(records: Records, name: str) -> str:
        if name not in PLOTS:
            raise SparseDPError(f"no figure named {name!r}; there are {', '.join(PLOTS)}")
        shown.append(name)
        missing = [study for study in PLOTS[name].studies if not records[study]]
        if missing:
            return f"*Not measured yet: {', '.join(missing)}.*"
        return f"![{name.replace('-', ' ')}]({FOLDER}/{name}.svg)"

    def table(records: Records, name: str) -> str:
        if name not in TABLES:
            raise SparseDPError(f"no table named {name!r}; there are {', '.join(TABLES)}")
        return TABLES[name](records)

    made = filled(text, records, {"figure": figure, "table": table})
    left_out = sorted(set(PLOTS) - set(shown))
    if left_out:
        raise SparseDPError(f"the gallery's text shows no {', '.join(left_out)}; add {{{{figure NAME}}}}")
    return _HEAD + made


def write(text: str, records: Records, docs: Path) -> None:
    """Write the page and its figures; figures of old are removed."""
    folder = docs / FOLDER
    folder.mkdir(parents=True, exist_ok=True)
    made = drawn(records)
    for old in folder.glob("*.svg"):
        if old.name not in made:
            old.unlink()
    for name, svg in made.items():
        (folder / name).write_text(svg)
    (docs / "gallery.md").write_text(page(text, records))
