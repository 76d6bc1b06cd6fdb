"""What `method="auto"` chooses in every cell there is, and what that gained or lost against dense DP-SGD."""

from __future__ import annotations

import json
import re
from collections import defaultdict
from collections.abc import Mapping, Sequence

from sparsedp._validate import NONE
from sparsedp.methods.auto import LOUD, MANY, SPARSE, SPARSE_RATIO, TOO_LOUD, pays
from sparsedp_experiments.comparison.statistics import estimate
from sparsedp_experiments.pages import words
from sparsedp_experiments.pages.loudness import Gain

MARGIN = 0.5
"""Points that auto may lose against dense training."""
MARK = "<!-- auto: written by make results -->"
_PART = re.compile(rf"(?<={re.escape(MARK)}\n).*?(?={re.escape(MARK)})", re.DOTALL)
_CHOSEN = (SPARSE, SPARSE_RATIO)

Cell = tuple[str, str, float, float, int]
"""Experiment, task, epsilon, r of the dense run, and coordinates."""


def auto_section(found: Sequence[Gain]) -> list[str]:
    """The section of the results page."""
    table = auto_table(found)
    return ['### What `method="auto"` would have done', "", *table, ""] if table else []


def with_auto_table(page: str, found: Sequence[Gain]) -> str:
    """A page with the table between its two marks written anew."""
    text = "\n".join(auto_table(found))
    return _PART.sub(lambda _: f"\n{text}\n\n", page) if text else page


def auto_table(found: Sequence[Gain]) -> list[str]:
    """How often auto is dense training itself, and a row for every cell in which it is not."""
    cells = _cells(found)
    if not cells:
        return []
    loud = {cell: arms for cell, arms in cells.items() if pays(cell[3], cell[4])}
    quiet = len(cells) - len(loud)
    tasks = len({cell[1] for cell in cells if cell not in loud})
    said = (
        f"From public numbers alone, auto takes {SPARSE} at ratio {SPARSE_RATIO:g} where r is {LOUD:g} to "
        f"{TOO_LOUD:g} and the model has {MANY:,} coordinates or more. In {quiet} of the {len(cells)} cells "
        f"({tasks} tasks) that were measured this is not so: there it trains all coordinates, and is the baseline "
        f"itself. In the others a loss of more than {MARGIN:g} points would break its promise."
    )
    rows = [_row(cell, arms) for cell, arms in sorted(loud.items(), key=lambda item: item[0][3])]
    headings = [
        "experiment",
        "task",
        "epsilon",
        "r",
        "auto less dense, points",
        f"loses more than {MARGIN:g}?",
    ]
    return [said, "", *words.markdown_table(headings, rows)] if rows else [said]


def _cells(found: Sequence[Gain]) -> Mapping[Cell, dict[tuple[str, float | None], Gain]]:
    """Gains by cell, then by method and ratio; arms with options of their own are no choice of auto's.

    Where a study has a cell without auto's choice, and another has the same cell with it, the second alone counts.
    """
    cells: dict[Cell, dict[tuple[str, float | None], Gain]] = defaultdict(dict)
    for gain in found:
        method, ratio, options = json.loads(gain.arm)
        own = cells[gain.study, gain.task, gain.epsilon, gain.r, gain.d]
        if not options:
            own[method, ratio] = gain
    answered = {cell[1:] for cell, arms in cells.items() if _CHOSEN in arms}
    return {cell: arms for cell, arms in cells.items() if _CHOSEN in arms or cell[1:] not in answered}


def _row(cell: Cell, arms: Mapping[tuple[str, float | None], Gain]) -> list[str]:
    study, task, epsilon, r, _ = cell
    gain = arms.get(_CHOSEN)
    start = [f"`{study}`", task, f"{epsilon:g}", f"{r:.2f}"]
    if gain is None:
        return [*start, NONE, "not run"]
    seen = estimate(gain.seeds)
    if seen.low is None or seen.high is None:
        return [*start, f"{seen.mean:+.2f} (one seed)", "not resolved"]
    answer = "no" if seen.low > -MARGIN else "**yes**" if seen.high < -MARGIN else "not resolved"
    return [*start, f"{seen.mean:+.2f} ({seen.low:+.2f} to {seen.high:+.2f})", answer]
