"""Along training: freezing, symmetry of deviations, bytes on the wire (RS, Fig. 12, Fig. 6 to 9, Sec. 5)."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from sparsedp.report.numbers import count
from sparsedp.report.scale import Axis, linear_axis
from studies.figures.drawing.marks import DASHED, DOTTED, Cloud, Curve, Mark
from studies.figures.drawing.sheet import Key, Panel, powers, sheet
from studies.figures.drawing.style import BLUE, GREY, ORANGE, PINK, TEAL
from studies.figures.store import Record, Records


def freezing(records: Records) -> str:
    """Fig. 12: how many coordinates were frozen how often."""
    panels = []
    for record in records["freezing"]:
        ranked = record["histograms"]["as it was"]
        chance = [record["d"] * share for share in record["by_chance"]]
        marks: list[Mark] = [
            Curve(list(enumerate(chance)), GREY),
            Curve(list(enumerate(ranked)), BLUE),
            Curve(list(enumerate(record["histograms"]["ranked without noise"])), ORANGE, DASHED),
        ]
        x = linear_axis("epochs frozen", 0, record["epochs"], whole=True)
        y = linear_axis("coordinates", 0, 1.1 * max(*ranked, *chance), text=count)
        panels.append(Panel(f"ε = {record['point']['epsilon']}", x, y, marks))
    keys = [
        Key("frozen at random (exact law)", GREY),
        Key("ranked by released gradients", BLUE),
        Key("ranked without noise (not private)", ORANGE, DASHED),
    ]
    alt = "How many epochs each coordinate was frozen: ranked, at random, and ranked without noise."
    return sheet(alt, panels, keys, columns=2, width=480, height=280)


def symmetry(records: Records) -> str:
    """Fig. 6 to 9: deviations on a random plane."""
    panels = []
    for record in records["symmetry"]:
        for stop in record["stops"]:
            mean = sum(stop["lopsidedness"]) / len(stop["lopsidedness"])
            chance = sum(stop["by_chance"]) / len(stop["by_chance"])
            x = Axis(f"lopsided {mean:.2f}, by chance {chance:.2f}", -5.0, 5.0, (-4.0, 0.0, 4.0))
            y = Axis("", -5.0, 5.0, (-4.0, 0.0, 4.0))
            cloud = Cloud(
                [(px, py) for px, py in stop["points"]],
                BLUE if record["point"]["method"] == "dp-sgd" else TEAL,
            )
            title = f"{record['point']['method']}, {_after(stop['epoch'])}"
            panels.append(Panel(title, x, y, [cloud]))
    alt = "Deviations of single gradients from their mean, projected to a random plane, along two runs."
    return sheet(alt, panels, columns=4, width=240, height=250)


def _after(epoch: int) -> str:
    return "at the start" if epoch == 0 else f"after {epoch} epoch{'s' if epoch > 1 else ''}"


def wire(records: Records) -> str:
    """Bytes of sparse updates over those of dense ones, and of one support."""
    once, often = (
        [r for r in records["wire"] if r["point"]["method"] == method] for method in ("tp-topk", "on-rand")
    )
    ticks = tuple(math.log10(share) for share in (0.01, 0.02, 0.05, 0.1, 0.2, 0.4, 1.0))
    x = Axis("active ratio k/d", math.log10(0.009), math.log10(0.45), ticks[:-1], _percent)

    def over_ratio(found: Sequence[Record], bytes_of: Callable[[Record], float]) -> list[tuple[float, float]]:
        return [(math.log10(r["k"] / r["d"]), math.log10(bytes_of(r))) for r in found]

    first: list[Mark] = [
        Curve(over_ratio(once, lambda r: 2 * r["k"] / r["d"]), GREY, DASHED),
        Curve(over_ratio(once, lambda r: r["share"]), BLUE, dots=True),
        Curve(over_ratio(often, lambda r: r["share"]), ORANGE, DOTTED),
    ]
    second: list[Mark] = [
        Curve(over_ratio(once, lambda r: r["four_byte_indices"]), GREY, DASHED),
        Curve(over_ratio(once, lambda r: r["d"] / 8), PINK, DOTTED),
        Curve(over_ratio(once, lambda r: r["one_support_bytes"]), BLUE, dots=True),
        Curve(over_ratio(often, lambda r: r["one_support_bytes"]), ORANGE, DOTTED),
    ]
    panels = [
        Panel("An update over a dense one", x, Axis("share", math.log10(0.008), 0.0, ticks, _percent), first),
        Panel("The indices of one support", x, powers("bytes", 2, 5), second),
    ]
    keys = [
        Key("tp-topk, one support", BLUE),
        Key("on-rand, a support every epoch", ORANGE, DOTTED),
        Key("4-byte indices (left: with the values of every step)", GREY, DASHED),
        Key("a bitmap", PINK, DOTTED),
    ]
    alt = "Bytes per step of encoded sparse updates as a share of dense ones, and bytes of one support."
    return sheet(alt, panels, keys, columns=2, width=480, height=280)


def _percent(value: float) -> str:
    return f"{100 * 10**value:.3g}%"
