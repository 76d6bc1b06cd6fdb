"""The one file of a run's folder that is not private, `nonprivate.json`: no other part of a run refers to it.

    {"format": 1,
     "values": [{"name": "...", "value": 0.5, "note": "..."}],
     "figures": [{"title": "...", "note": "...", "x": "epoch", "y": "training loss", "kind": "lines",
                  "series": [{"name": "...", "x": [0, 1], "y": [2.3, 1.9]}]}],
     "remarks": ["..."]}

A figure of the kind "points" is a cloud; its points are not joined.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, final

from sparsedp._files import read_json, write_json
from sparsedp.errors import DataError

NONPRIVATE, DRAWN = "nonprivate.json", "nonprivate.svg"
FORMAT = 1


@final
@dataclass(frozen=True, slots=True)
class Diagnostics:
    """What the file holds; empty if there is none."""

    values: tuple[Mapping[str, Any], ...] = ()
    figures: tuple[Mapping[str, Any], ...] = ()
    remarks: tuple[str, ...] = ()

    def to_json(self) -> dict[str, Any]:
        """As the file has it."""
        parts = {"values": self.values, "figures": self.figures, "remarks": self.remarks}
        return {"format": FORMAT, **{name: list(part) for name, part in parts.items()}}


def write_diagnostics(folder: Path | str, found: Diagnostics) -> Path:
    """Write the file, in the place of an earlier one; gives its path."""
    path = Path(folder) / NONPRIVATE
    write_json(path, found.to_json())
    return path


def read_diagnostics(folder: Path) -> Diagnostics:
    """The non-private values of a run, if any were kept.

    Raises:
        DataError: the file is damaged or of another format.
    """
    file = folder / NONPRIVATE
    if not file.exists():
        return Diagnostics()
    content = read_json(file)
    if not isinstance(content, dict) or content.get("format") != FORMAT:
        raise DataError(f"{file}: expected format {FORMAT}; make it again with this version of sparsedp")
    parts = (tuple(content.get(name, ())) for name in ("values", "figures", "remarks"))
    return Diagnostics(*parts)


def draw_diagnostics(folder: Path, found: Diagnostics) -> Path | None:
    """Draw the figures beside the file, under a banner; None if there are none."""
    if not found.figures:
        return None
    import matplotlib.pyplot as plt

    figure, panels = plt.subplots(len(found.figures), figsize=(7, 3.2 * len(found.figures)), squeeze=False)
    figure.suptitle(
        "Not private: computed from data without noise. Do not publish it or choose by it.", color="red"
    )
    for entry, axes in zip(found.figures, panels.flat, strict=True):
        for line in entry["series"]:
            joined = entry.get("kind", "lines") == "lines"
            axes.plot(line["x"], line["y"], "-o" if joined else "o", markersize=3, label=line["name"])
        axes.set(title=entry["title"], xlabel=entry["x"], ylabel=entry["y"])
        axes.legend()
    path = folder / DRAWN
    figure.tight_layout()
    figure.savefig(path)
    plt.close(figure)
    return path
