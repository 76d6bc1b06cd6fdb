"""Reconstruction attacks: least squares and inverted gradients (RS, Theorem 5.1 and Fig. 5)."""

from __future__ import annotations

import base64
import math
from collections.abc import Sequence

from sparsedp.report.markup import Attributes, Child, tag
from sparsedp.report.scale import Axis, linear_axis
from sparsedp.report.statistics import estimate
from studies.figures.drawing.marks import DASHED, DOTTED, Curve, Level, Mark, Whisker, seeded
from studies.figures.drawing.png import data_address, grey_png
from studies.figures.drawing.sheet import MARGIN, Key, Panel, card, sheet
from studies.figures.drawing.style import BLUE, GREY, ORANGE, PINK, TEAL
from studies.figures.store import Record, Records

_TILE, _LABELS = 46, 84


def least_squares(records: Records) -> str:
    """Squared error over that of dense gradients: simulated, in closed form, and the theorem's bound."""
    rates = [row["rate"] for row in records["least-squares"][0]["rates"]]
    panels = []
    for record in records["least-squares"]:
        unit = record["rates"][0]["closed"]
        rows = record["rates"]
        marks: list[Mark] = [
            Curve([(row["rate"], row["bound"] / unit) for row in rows], ORANGE, DASHED),
            Curve([(row["rate"], row["closed"] / unit) for row in rows], BLUE),
        ]
        for row in rows:
            reach = 1.96 * row["simulated_std"] / unit
            value = row["simulated"] / unit
            marks.append(Whisker(row["rate"], value, value - reach, value + reach, PINK))
        x = linear_axis("share of frozen coordinates r", 0, max(rates))
        y = linear_axis("squared error over dense", 0, 1.1 * max(row["closed"] / unit for row in rows))
        panels.append(Panel(f"Image {record['point']['seed'] + 1}", x, y, marks))
    keys = [
        Key("simulated attacks, 95 %", PINK, dot=True),
        Key("closed form", BLUE),
        Key("lower bound of Theorem 5.1", ORANGE, DASHED),
    ]
    alt = "Squared reconstruction error by least squares over the share of frozen coordinates."
    return sheet(alt, panels, keys, columns=3)


def inversion(records: Records) -> str:
    """Fig. 5: mean squared error of inverted gradients over sparsity and noise."""
    found = records["inversion"]
    ratios = sorted({attack["ratio"] for attack in found[0]["attacks"]})
    multipliers = sorted({attack["noise_multiplier"] for attack in found[0]["attacks"]})
    x = [math.log10(ratio) for ratio in ratios]
    guess = estimate([record["guess_mse"] for record in found]).mean
    top = 1.1 * max([guess, *(attack["mse"] for record in found for attack in record["attacks"])])
    panels = []
    for clipping, title in (
        ("unclipped", "Gradients as they are"),
        ("clipped", "Clipped to C = 0.1, as in training"),
    ):
        marks: list[Mark] = [Level(guess)]
        for multiplier, colour in zip(multipliers, (TEAL, PINK, GREY), strict=False):
            kind = clipping if multiplier else "clipped"
            columns = [[_mse(record, kind, multiplier, ratio) for ratio in ratios] for record in found]
            marks.append(seeded(x, columns, colour, dots=True))
        ticks = tuple(x)
        axis = Axis("active ratio", x[0] - 0.05, x[-1] + 0.05, ticks, lambda v: f"{100 * 10**v:.3g}%")
        panels.append(Panel(title, axis, linear_axis("mean squared error", 0, min(top, 0.25)), marks))
    keys = [
        *(
            Key(f"noise {multiplier:g} of the bound" if multiplier else "no noise", colour)
            for multiplier, colour in zip(multipliers, (TEAL, PINK, GREY), strict=False)
        ),
        Key("the mean training image, which needs no gradient", GREY, DOTTED),
    ]
    alt = "Mean squared error of reconstructed images over active ratio, for three noise levels."
    return sheet(alt, panels, keys, columns=2, width=480, height=280)


def pictures(records: Records) -> str:
    """The reconstructions: a row for each picture and setting."""
    found = [record for record in records["inversion"] if record["picture"]]
    attacks = found[0]["attacks"]
    ratios = sorted({attack["ratio"] for attack in attacks}, reverse=True)
    kinds = list(dict.fromkeys((attack["clipping"], attack["noise_multiplier"]) for attack in attacks))
    group = _TILE * len(ratios) + 14
    width = 2 * MARGIN + _LABELS + group * len(kinds)
    height = 2 * MARGIN + 40 + _TILE * len(found)
    body: list[Child] = [tag("text", {"x": MARGIN, "y": MARGIN + 28, "class": "key"}, "original")]
    for place, (clipping, multiplier) in enumerate(kinds):
        x = MARGIN + _LABELS + group * place
        title = f"noise {multiplier:g}, {clipping}" if multiplier else "no noise"
        body.append(tag("text", {"x": x, "y": MARGIN + 10, "class": "title"}, title))
        for column, ratio in enumerate(ratios):
            at: Attributes = {
                "x": x + _TILE * column + _TILE / 2 - 2,
                "y": MARGIN + 28,
                "class": "tick middle",
            }
            body.append(tag("text", at, f"{100 * ratio:g}%"))
    for row, record in enumerate(found):
        y = MARGIN + 36 + _TILE * row
        body.append(_tile(record["picture"], record["shape"], MARGIN, y))
        by_kind = {
            (a["clipping"], a["noise_multiplier"], a["ratio"]): a["picture"] for a in record["attacks"]
        }
        for place, kind in enumerate(kinds):
            for column, ratio in enumerate(ratios):
                x = MARGIN + _LABELS + group * place + _TILE * column
                body.append(_tile(by_kind[(*kind, ratio)], record["shape"], x, y))
    return card("Reconstructed pictures over active ratio, noise and clipping.", width, height, body)


def _tile(packed: str, shape: Sequence[int], x: float, y: float) -> Child:
    height, width = shape[-2:]
    place: Attributes = {
        "x": x,
        "y": y,
        "width": _TILE - 4,
        "height": _TILE - 4,
        "style": "image-rendering:pixelated",
        "href": data_address(grey_png(base64.b64decode(packed), width, height)),
    }
    return tag("image", place)


def _mse(record: Record, clipping: str, multiplier: float, ratio: float) -> float:
    return next(
        float(attack["mse"])
        for attack in record["attacks"]
        if (attack["clipping"], attack["noise_multiplier"], attack["ratio"]) == (clipping, multiplier, ratio)
    )
