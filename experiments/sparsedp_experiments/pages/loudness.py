"""Does r, the norm of a step's noise over the clip norm, predict what sparsity gains? Over all cells there are."""

from __future__ import annotations

import json
import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from scipy import stats

from sparsedp_experiments.comparison.statistics import estimate
from sparsedp_experiments.figures.canvas import (
    BLUE,
    GOLD,
    GREY,
    ORANGE,
    PINK,
    TEAL,
    VIOLET,
    key,
    legend,
    level,
    sheet,
    written,
)
from sparsedp_experiments.pages import words
from sparsedp_experiments.pages.section import TEXTS
from sparsedp_experiments.pages.study import Record, Study, noise_ratio
from sparsedp_experiments.pages.verdicts import above

FIGURE = "results/loudness/figure.svg"
DENSE = "dp-sgd"
LEAST_RATIO = 0.2
"""Supports smaller than this are ablations of size, not the methods' settings."""
BANDS = ((0.0, 0.1), (0.1, 0.2), (0.2, 0.4), (0.4, math.inf))
_COLOURS = (
    BLUE,
    ORANGE,
    TEAL,
    PINK,
    VIOLET,
    GOLD,
    GREY,
    "#b3261e",
    "#0b6c93",
    "#1a7a48",
    "#85491f",
    "#3d4855",
)


@dataclass(frozen=True, slots=True)
class Gain:
    """What one sparse method gained over dense training in one cell.

    Attributes:
        study: the experiment.
        task: data set and model.
        epsilon: the budget.
        place: its labels on all axes of its experiment but epsilon.
        arm: method, ratio and options.
        r: of the dense run: noise multiplier times sqrt(d) over the batch size.
        d: coordinates of the model.
        seeds: the paired differences, in points.
    """

    study: str
    task: str
    epsilon: float
    place: str
    arm: str
    r: float
    d: int
    seeds: tuple[float, ...]

    @property
    def mean(self) -> float:
        """Over seeds."""
        return float(np.mean(self.seeds))


def gains(studies: Iterable[Study]) -> list[Gain]:
    """Every sparse method beside the dense run of its place: the same epsilon, unit, data and model."""
    found: list[Gain] = []
    for study in studies:
        for cells in _places(study).values():
            dense = _dense(study, cells)
            if dense is not None:
                found += _compared(study, cells, dense)
    return sorted(found, key=lambda gain: (gain.r, gain.study, gain.arm))


def loudness_section(found: Sequence[Gain]) -> list[str]:
    """The question, the table by bands of r, and the verdict."""
    if not found:
        return []
    rows = [_band(low, high, [gain for gain in found if low <= gain.r < high]) for low, high in BANDS]
    headings = [
        "r of a dense step",
        "cells",
        "tasks",
        "mean gain of sparse over dense, points",
        "cells above zero",
    ]
    return [
        "### Does r predict what sparsity gains?",
        "",
        (TEXTS / "loudness.md").read_text(encoding="utf-8").strip(),
        "",
        *words.markdown_table(headings, rows),
        "",
        f"![Gain against r](../{FIGURE})",
        "",
        verdict(found),
        "",
    ]


def scatter(found: Sequence[Gain]) -> str:
    """The SVG document: one dot a pair, what was gained over r, a colour for each family of tasks."""
    figure, (axes,) = sheet(1, 1, 700, 380)
    families = sorted({gain.task for gain in found})
    colours = {task: _COLOURS[place % len(_COLOURS)] for place, task in enumerate(families)}
    for task, colour in colours.items():
        own = [gain for gain in found if gain.task == task]
        axes.plot([g.r for g in own], [g.mean for g in own], color=colour, marker="o", ls="none", alpha=0.75)
    most = max(abs(gain.mean) for gain in found)
    axes.set(
        xlabel="r of a dense step: noise norm over clip norm", ylabel="gain of sparse over dense, points"
    )
    marks = (0.01, 0.02, 0.05, 0.1, 0.2, 0.4, 1.0)
    axes.set(xscale="log", xlim=(0.8 * min(g.r for g in found), 1.25 * max(g.r for g in found)))
    axes.set(ylim=(-1.08 * most, 1.08 * most))
    low, high = axes.get_xlim()
    shown = [mark for mark in marks if low <= mark <= high]
    axes.set_xticks(shown, [f"{mark:g}" for mark in shown])
    axes.set_xticks([], minor=True)
    level(axes, 0.0)
    legend(figure, [key(task, colour, dot=True) for task, colour in colours.items()])
    return written(
        figure, "What a sparse method gained over dense DP-SGD in each cell, against the noise ratio r"
    )


def verdict(found: Sequence[Gain]) -> str:
    """Whether the gain rises with r: over all cells, and within experiments, where task and settings are the same."""
    if len({gain.r for gain in found}) < 2 or len({gain.mean for gain in found}) < 2:
        return "There are too few cells to say whether the gain moves with r."
    rank = stats.spearmanr([gain.r for gain in found], [gain.mean for gain in found])
    rises = list(_rises(found).values())
    within = estimate(rises)
    said = f"Over all {len(found)} cells the rank correlation of r and gain is {float(rank.statistic):+.2f}. "
    if within.low is None or within.high is None:
        return said + "Within experiments there are too few to say more."
    up = sum(rise > 0 for rise in rises)
    return (
        f"{said}Within an experiment, from its smallest r to its largest, the gain rises in {up} of {len(rises)} "
        f"experiments, by {within.mean:+.2f} points on average ({within.low:+.2f} to {within.high:+.2f}, one value "
        f"an experiment). That louder noise makes sparsity pay more: **{above(within).value}**; where the gain turns "
        "positive differs from task to task, so r tells when to try it, not that it will help."
    )


def _rises(found: Sequence[Gain]) -> Mapping[str, float]:
    """Of each experiment, the mean over its methods of the gain at the largest r less that at the smallest."""
    by_place: dict[tuple[str, str, str], list[Gain]] = defaultdict(list)
    for gain in found:
        by_place[gain.study, gain.task, gain.place].append(gain)
    by_study: dict[str, list[float]] = defaultdict(list)
    for (study, _, _), own in by_place.items():
        if len({gain.epsilon for gain in own}) > 1:
            by_study[study].append(max(own, key=lambda g: g.r).mean - min(own, key=lambda g: g.r).mean)
    return {study: float(np.mean(values)) for study, values in by_study.items()}


def _band(low: float, high: float, own: Sequence[Gain]) -> list[str]:
    name = f"{low:g} to {high:g}" if math.isfinite(high) else f"{low:g} and more"
    if not own:
        return [name, "0", "0", "-", "-"]
    mean = float(np.mean([gain.mean for gain in own]))
    tasks = len({gain.task for gain in own})
    up = sum(gain.mean > 0 for gain in own)
    return [name, str(len(own)), str(tasks), f"{mean:+.2f}", f"{up} of {len(own)}"]


Cells = dict[tuple[tuple[str, str], ...], dict[int, Record]]
"""Records by the labels of their cell, then by seed."""


def _places(study: Study) -> Mapping[str, Cells]:
    """The private records of a study by what runs to be compared must share, whatever they were tuned to."""
    axis = study.experiment.contrast.axis
    places: dict[str, Cells] = defaultdict(lambda: defaultdict(dict))
    for record in study.records:
        if not record["private"] or not record["target_epsilon"]:
            continue
        labels = {name: label for name, label in record["cell"].items() if name != axis}
        shared = [labels, *(record[name] for name in ("dataset", "model", "target_epsilon", "unit", "units"))]
        places[json.dumps(shared, sort_keys=True)][tuple(record["cell"].items())][record["seed"]] = record
    return places


def _dense(study: Study, cells: Cells) -> tuple[tuple[str, str], ...] | None:
    """The cell to compare with: the study's baseline if that is dense, else the only dense DP-SGD, else none."""
    dense = {cell: next(iter(runs.values())) for cell, runs in cells.items() if _ratio(runs) == 1.0}
    contrast = study.experiment.contrast
    for cell in dense:
        if dict(cell).get(contrast.axis) == contrast.baseline:
            return cell
    plain = [cell for cell, record in dense.items() if record["method"] == DENSE]
    return plain[0] if len(plain) == 1 else None


def _ratio(runs: Mapping[int, Record]) -> float:
    """The share of coordinates asked for; where it was left to the method, the share there was."""
    record = next(iter(runs.values()))
    asked = record["settings"].get("active_ratio")
    whole = record["k"] / record["d"] if asked is None or isinstance(asked, str) else asked
    return float(whole)


def _compared(study: Study, cells: Cells, dense: tuple[tuple[str, str], ...]) -> Iterator[Gain]:
    known = cells[dense]
    for cell, runs in cells.items():
        both = sorted(set(known) & set(runs))
        if not both or not LEAST_RATIO <= _ratio(runs) < 1.0:
            continue
        one, other = known[both[0]], runs[both[0]]
        r = noise_ratio(one)
        if r is None:
            continue
        metric, settings = study.experiment.metric, other["settings"]
        arm = [other["method"], settings.get("active_ratio"), settings.get("options")]
        yield Gain(
            study=study.name,
            task=f"{one['dataset']}, {one['model']}{' (JPEG)' if words.is_cifar(study) else ''}",
            epsilon=one["target_epsilon"],
            place=json.dumps([pair for pair in cell if pair[0] != "epsilon"]),
            arm=json.dumps(arm, sort_keys=True),
            r=r,
            d=one["d"],
            seeds=tuple(100 * (runs[s]["metrics"][metric] - known[s]["metrics"][metric]) for s in both),
        )
