"""Which coordinates a run trains: layer by layer, row by row, and the scores that chose them."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch

from sparsedp.parameters import Slot
from sparsedp.report.chart import Bars, histogram, strip
from sparsedp.report.figure import Legend, Table, figure, remark
from sparsedp.report.markup import Attributes, Child, Html, tag
from sparsedp.report.numbers import count, percent, significant
from sparsedp.report.rendering import part
from sparsedp.report.run import ReportedRun
from sparsedp.report.scale import Axis, linear_axis, symmetric_log_axis

MOST_CELLS = 128
"""Rows of a layer, and supports of a run, beyond this many are shown in groups."""
BINS = 44
SEVERAL_DECADES = 100
Floats = npt.NDArray[np.float64]
Flags = npt.NDArray[np.bool_]


def layers_figure(run: ReportedRun) -> Html:
    """Every parameter with the share it keeps, where in it the active rows are, and how that changed."""
    d, k = run.layout.dimension, run.support.size
    masks = run.support.per_parameter(run.layout)
    items = [_layer(run, slot, masks[slot.name]) for slot in run.layout]
    table = Table(
        ("parameter", "shape", "coordinates", "active", "share"),
        tuple(
            (
                slot.name,
                _shape(slot),
                count(slot.size),
                count(int(masks[slot.name].sum())),
                _share(masks[slot.name]),
            )
            for slot in run.layout
        ),
        frozenset({0, 1}),
    )
    overall = f"{count(k)} of {count(d)} coordinates are active at the end, {percent(k / d)}."
    over_time = " The strip below shows the share over time." if _moves(run) else ""
    caption = (
        f"{overall} The bar is a parameter's share; the mark on it is the average. Each cell of the strip is a "
        f"row (an output unit, a filter, an entry of a bias), stronger where more of it is active.{over_time}"
    )
    return part("layers", caption, items, table)


def score_figure(run: ReportedRun) -> Html:
    """The scores the last ranking was made from, kept and frozen coordinates apart."""
    if run.scores is None:
        return remark(
            "Score distribution",
            "There is nothing to show: this method ranks by no score, or has not ranked yet.",
        )
    scores = run.scores.double().numpy()
    kept = run.support.mask().numpy()
    x, bars = score_bars(scores, kept)
    y = linear_axis("coordinates", 0, max(map(sum, zip(bars.below, bars.above, strict=True))), text=count)
    split = None
    if kept.any() and not kept.all() and scores[kept].min() >= scores[~kept].max():
        split = float(scores[kept].min())
    return figure(
        "Score distribution",
        lambda width: histogram(
            width,
            x,
            y,
            bars,
            f"Histogram of {count(scores.size)} scores from {significant(scores.min())} to "
            f"{significant(scores.max())}, {count(int(kept.sum()))} of them active.",
            threshold=split,
        ),
        "The scores the last ranking was made from. They come from released, noisy gradients, so showing them costs "
        f"nothing.{' A score near 0 is a coordinate that looks like noise alone.' if _floor_removed(run) else ''}",
        _score_table(scores, kept),
        Legend((("active", "kept"), ("frozen", "frozen"))),
    )


def score_bars(scores: Floats, kept: Flags) -> tuple[Axis, Bars]:
    """A histogram of scores, kept ones below; its axis is bent where scores change sign or span several decades."""
    size = np.abs(scores)
    unit = float(np.median(size)) or float(size.max()) or 1.0
    if scores.min() < 0 or size.max() > SEVERAL_DECADES * unit:
        bent = np.arcsinh(scores / unit)
        edges = np.linspace(bent.min(), max(bent.max(), bent.min() + 1e-6), BINS + 1)
        ends = np.sinh(edges[[0, -1]]) * unit
        axis = symmetric_log_axis("score, linear near 0 and logarithmic beyond", ends[0], ends[1], unit)
        places = np.sinh(edges) * unit
    else:
        bent = scores
        axis = linear_axis("score", float(scores.min()), float(scores.max()))
        places = edges = np.linspace(axis.low, axis.high, BINS + 1)
    below, above = (np.histogram(bent[part], edges)[0] for part in (kept, ~kept))
    return axis, Bars(tuple(map(float, places)), tuple(map(int, below)), tuple(map(int, above)))


def row_shares(mask: torch.Tensor) -> list[float]:
    """The active share of each row (first axis) of a parameter, in groups where there are very many."""
    return _cells(mask.reshape(mask.shape[0] if mask.dim() else 1, -1).double().mean(dim=1).numpy())


def _cells(shares: Floats) -> list[float]:
    groups = np.array_split(shares, min(len(shares), MOST_CELLS))
    return [round(float(group.mean()), 2) for group in groups]


def _layer(run: ReportedRun, slot: Slot, mask: torch.Tensor) -> Html:
    active = int(mask.sum())
    share = active / slot.size
    shares = row_shares(mask)
    average = run.support.active_ratio
    alt = f"Active share of the rows of {slot.name}: from {percent(min(shares), 0)} to {percent(max(shares), 0)}."
    strips: list[Child] = [strip(shares, alt)]
    if _moves(run):
        parts = [span.by_parameter.get(slot.name, 0) / slot.size for span in run.spans]
        strips.append(
            strip(
                _cells(np.array(parts)),
                f"Active share of {slot.name} over {len(parts)} supports: from {percent(parts[0], 0)} to "
                f"{percent(parts[-1], 0)}.",
                "strip time",
            )
        )
    held = f"{count(active)} of {count(slot.size)}"
    return part("layer", slot.name, _shape(slot), held, percent(share, 0), (_bar(share, average), *strips))


def _bar(share: float, average: float) -> Html:
    whole: Attributes = {
        "viewBox": "0 0 100 1",
        "preserveAspectRatio": "none",
        "aria-hidden": "true",
        "class": "bar",
    }
    mark: Attributes = {"x": 100 * average - 0.15, "y": 0, "width": 0.3, "height": 1, "class": "mark"}
    filled: Attributes = {"x": 0, "y": 0, "width": 100 * share, "height": 1, "class": "filled"}
    return tag("svg", whole, tag("rect", filled), tag("rect", mark))


def _floor_removed(run: ReportedRun) -> bool:
    """Whether the score is an energy with the noise's share taken off."""
    rule = run.plan.phases[-1].support.plain()["rule"]
    return isinstance(rule, dict) and rule["name"] in ("energy", "coherent")


def _moves(run: ReportedRun) -> bool:
    return len(run.spans) > 2


def _shape(slot: Slot) -> str:
    return " × ".join(map(str, slot.shape)) or "scalar"


def _share(mask: torch.Tensor) -> str:
    return percent(float(mask.double().mean()))


def _score_table(scores: Floats, kept: Flags) -> Table:
    quantiles = (0.0, 0.05, 0.25, 0.5, 0.75, 0.95, 1.0)
    groups = [("all", scores), ("active", scores[kept]), ("frozen", scores[~kept])]
    return Table(
        ("coordinates", "how many", *(f"{percent(q, 0)} quantile" for q in quantiles)),
        tuple(
            (name, count(part.size), *(significant(float(v)) for v in np.quantile(part, quantiles)))
            for name, part in groups
            if part.size
        ),
    )
