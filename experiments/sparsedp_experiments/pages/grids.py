"""Tables in the guides: what an experiment's arms reach at each epsilon, between marks that name the experiment."""

from __future__ import annotations

import re
from collections.abc import Mapping

from sparsedp._validate import NONE
from sparsedp_experiments.pages import words
from sparsedp_experiments.pages.study import Study
from sparsedp_experiments.runs.table import Row

START = "<!-- arms of {}: written by make results -->"
END = "<!-- end of arms -->"
_MARKED = re.compile(rf"({START.format('(.+?)')}\n).*?({END})", re.DOTALL)


def with_grids(page: str, studies: Mapping[str, Study]) -> str:
    """A page with every marked table written anew; those of experiments without records stay as they are."""

    def written(found: re.Match[str]) -> str:
        study = studies.get(found[2])
        if study is None or not study.rows:
            return found[0]
        table = "\n".join(arms_by_epsilon(study))
        return f"{found[1]}\n{table}\n\n{found[3]}"

    return _MARKED.sub(written, page)


def arms_by_epsilon(study: Study) -> list[str]:
    """A row for each arm, a column for each epsilon: the mean, and the interval of its difference to the baseline."""
    axis = study.experiment.contrast.axis
    epsilons = sorted(study.axes["epsilon"], key=float)
    found = {(row.cell[axis], row.cell["epsilon"]): row for row in study.rows}
    rows = [
        [arm, *(_cell(found.get((arm, epsilon)), study.experiment.metric) for epsilon in epsilons)]
        for arm in study.axes[axis]
    ]
    return words.markdown_table([axis, *(f"epsilon {epsilon}" for epsilon in epsilons)], rows)


def _cell(row: Row | None, metric: str) -> str:
    if row is None:
        return NONE
    mean = words.value_text(row.score.mean, metric)
    between = row.difference
    if between is None or between.low is None or between.high is None:
        return mean
    return f"{mean} ({words.signed(between.low, metric)} to {words.signed(between.high, metric)})"
