"""When fewer coordinates suffice: the gain of `tp-adaptive` on wide data, and what theory expects of it.

`python -m sparsedp_experiments.figures.wide FIGURE`
"""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from io import StringIO
from pathlib import Path

import matplotlib as mpl
import numpy as np
from matplotlib.figure import Figure
from scipy import special

from sparsedp_experiments.runs.results import Estimate, estimate, paired_difference, read_rows
from sparsedp_experiments.wide.data import LOGITS
from sparsedp_experiments.wide.study import RECORDS, Row, cells_of

COLOURS = {500: "#6d7783", 2_000: "#0d7068", 5_000: "#2f5fd0", 20_000: "#7a45c9", 50_000: "#c2500c"}
"""By the number of features."""
LEVEL = 0.2847
"""The share s/d from which on s (1 + 2 log(d/s)) is no less than d."""

TICKS = (1e-3, 3e-3, 1e-2, 3e-2, 0.1, 0.5)
"""Shares that are written on the axis."""


def accuracy_at(error: float) -> float:
    """Of weights whose squared error is `error` times their squared length, on independent features."""
    z, weight = np.polynomial.hermite_e.hermegauss(64)
    agrees = special.ndtr(z / math.sqrt(error)) if error else (z > 0).astype(float)
    likely = special.expit(LOGITS * z)
    return float((weight * (likely * agrees + (1 - likely) * (1 - agrees))).sum() / weight.sum())


def promised(dense: float, features: int, causes: float) -> float:
    """What theory expects of the best sparse estimate, given what dense training got: error s (1 + 2 log(d/s)) for d.

    The dense error is read off its accuracy, as the only number taken from a run.
    """
    low, high = 1e-6, 1e6
    for _ in range(60):
        middle = math.sqrt(low * high)
        low, high = (middle, high) if accuracy_at(middle) > dense else (low, middle)
    share = causes / features
    return accuracy_at(low * min(1.0, share * (1 + 2 * math.log(1 / share)))) - dense


def figure(rows: Sequence[Row]) -> str:
    """Gain over dense training against the share of causes, a line for each number of features; theory beside it."""
    points: dict[int, list[tuple[float, Estimate, float]]] = {}
    for cell, scores, _ in cells_of(rows):
        usual = cell["data"] == "independent" and cell["epsilon"] == 1.0 and cell["records"] == 20_000
        gain = paired_difference(scores.get("adaptive", {}), scores.get("dense", {}))
        if usual and gain is not None and not cell["part"].endswith("-fit"):
            dense = estimate(list(scores["dense"].values())).mean
            points.setdefault(cell["features"], []).append((cell["causes"] / cell["features"], gain, dense))
    drawing = Figure((11, 4), layout="constrained")
    measured, theory = drawing.subplots(1, 2)
    for axes, title in ((measured, "measured"), (theory, "theory: error of s (1 + 2 log d/s) for d")):
        axes.set(title=title, xlabel="share of features that matter", ylabel="points over dense")
        axes.set(xscale="log", xlim=(8e-4, 0.6), ylim=(-3, 33))
        axes.set_xticks(TICKS, [f"{tick:.3g} %" for tick in 100 * np.array(TICKS)])
        axes.minorticks_off()
        axes.axhline(0, ls=":", color="#6d7783")
    for features, found in sorted(points.items()):
        found.sort(key=lambda point: point[0])
        x, mean = [share for share, _, _ in found], [100 * gain.mean for _, gain, _ in found]
        reach = [100 * (gain.high - gain.mean) if gain.high is not None else 0.0 for _, gain, _ in found]
        measured.errorbar(x, mean, reach, color=COLOURS[features], marker="o", label=f"{features:,} features")
        dense = float(np.mean([one for _, _, one in found]))
        grid = np.geomspace(1e-3, 0.5, 60)
        line = [100 * promised(dense, features, share * features) for share in grid]
        theory.plot(grid, line, color=COLOURS[features])
    theory.axvline(LEVEL, ls=":", color="#6d7783", label="s (1 + 2 log d/s) = d")
    theory.legend()
    measured.legend()
    file = StringIO()
    with mpl.rc_context({"svg.fonttype": "none", "svg.hashsalt": "sparsedp"}):
        drawing.savefig(file, format="svg", metadata={"Date": None})
    return file.getvalue()


if __name__ == "__main__":
    Path(sys.argv[1]).write_text(figure(read_rows(RECORDS)))
