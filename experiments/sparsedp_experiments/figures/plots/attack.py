"""Reconstruction attacks: least squares and inverted gradients (RS, Theorem 5.1 and Fig. 5)."""

from __future__ import annotations

import base64
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from sparsedp_experiments.runs.results import estimate
from sparsedp_experiments.figures.canvas import (
    BLUE,
    DASHED,
    DOTTED,
    GREY,
    ORANGE,
    PINK,
    TEAL,
    key,
    legend,
    level,
    seeded,
    shares,
    sheet,
    whisker,
    written,
)
from sparsedp_experiments.figures.store import Record, Records

_GAP = 2
"""White pixels between two pictures."""
_WHITE = 255


def least_squares(records: Records) -> str:
    """Squared error over that of dense gradients: simulated, in closed form, and the theorem's bound."""
    found = records["least-squares"]
    figure, panels = sheet(len(found), 3)
    for record, axes in zip(found, panels, strict=True):
        rows = record["rates"]
        unit = rows[0]["closed"]
        rates = [row["rate"] for row in rows]
        axes.plot(rates, [row["bound"] / unit for row in rows], color=ORANGE, ls=DASHED)
        axes.plot(rates, [row["closed"] / unit for row in rows], color=BLUE)
        for row in rows:
            reach = 1.96 * row["simulated_std"] / unit
            value = row["simulated"] / unit
            whisker(axes, row["rate"], value, value - reach, value + reach, PINK)
        axes.set(
            title=f"Image {record['point']['seed'] + 1}", xlabel="share of frozen coordinates r",
            ylabel="squared error over dense", xlim=(0, 1.03 * max(rates)), ylim=(0, None),
        )  # fmt: skip
    keys = [
        key("simulated attacks, 95 %", PINK, dot=True),
        key("closed form", BLUE),
        key("lower bound of Theorem 5.1", ORANGE, DASHED),
    ]
    legend(figure, keys)
    alt = "Squared reconstruction error by least squares over the share of frozen coordinates."
    return written(figure, alt)


def inversion(records: Records) -> str:
    """Fig. 5: mean squared error of inverted gradients over sparsity and noise."""
    found = records["inversion"]
    ratios = sorted({attack["ratio"] for attack in found[0]["attacks"]})
    multipliers = sorted({attack["noise_multiplier"] for attack in found[0]["attacks"]})
    colours = dict(zip(multipliers, (TEAL, PINK, GREY), strict=False))
    guess = estimate([record["guess_mse"] for record in found]).mean
    top = 1.1 * max([guess, *(attack["mse"] for record in found for attack in record["attacks"])])
    figure, panels = sheet(2, 2, 480, 280)
    titles = {"unclipped": "Gradients as they are", "clipped": "Clipped to C = 0.1, as in training"}
    for (clipping, title), axes in zip(titles.items(), panels, strict=True):
        shares(axes, "x", 0.9 * ratios[0], 1.1 * ratios[-1], ratios)
        axes.set(title=title, xlabel="active ratio", ylabel="mean squared error", ylim=(0, min(top, 0.25)))
        level(axes, guess)
        for multiplier, colour in colours.items():
            kind = clipping if multiplier else "clipped"
            columns = [[_mse(record, kind, multiplier, ratio) for ratio in ratios] for record in found]
            seeded(axes, ratios, columns, colour, dots=True)
    keys = [
        *(key(f"noise {m:g} of the bound" if m else "no noise", colour) for m, colour in colours.items()),
        key("the mean training image, which needs no gradient", GREY, DOTTED),
    ]
    legend(figure, keys)
    return written(
        figure, "Mean squared error of reconstructed images over active ratio, for three noise levels."
    )


def pictures(records: Records) -> str:
    """The reconstructions: a row for each picture, a block for each setting."""
    found = [record for record in records["inversion"] if record["picture"]]
    attacks = found[0]["attacks"]
    ratios = sorted({attack["ratio"] for attack in attacks}, reverse=True)
    kinds = list(dict.fromkeys((attack["clipping"], attack["noise_multiplier"]) for attack in attacks))
    blocks = [("original", [""], [[_pixels(record["picture"], record["shape"])] for record in found])]
    for clipping, multiplier in kinds:
        tiles = []
        for record in found:
            by_ratio = {
                attack["ratio"]: attack["picture"]
                for attack in record["attacks"]
                if (attack["clipping"], attack["noise_multiplier"]) == (clipping, multiplier)
            }
            tiles.append([_pixels(by_ratio[ratio], record["shape"]) for ratio in ratios])
        title = f"noise {multiplier:g}, {clipping}" if multiplier else "no noise"
        blocks.append((title, [f"{100 * ratio:g}%" for ratio in ratios], tiles))
    widths = [len(labels) for _, labels, _ in blocks]
    width, height = 46 * sum(widths) // len(blocks) + 22, 46 * len(found) + 90
    figure, panels = sheet(len(blocks), len(blocks), width, height, left=8, widths=widths)
    for (title, labels, tiles), axes in zip(blocks, panels, strict=True):
        side = tiles[0][0].shape[1]
        axes.imshow(np.dstack([np.block(tiles)] * 3), interpolation="none")  # as colours: pixels stay exact
        axes.set(title=title, yticks=[])
        axes.set_xticks([side * (place + 0.5) for place in range(len(labels))], labels)
        axes.xaxis.tick_top()
        axes.spines["bottom"].set_visible(False)
        axes.grid(visible=False)
    return written(figure, "Reconstructed pictures over active ratio, noise and clipping.")


def _pixels(packed: str, shape: Sequence[int]) -> npt.NDArray[np.uint8]:
    """A grey picture with a margin to the right and below."""
    height, width = shape[-2:]
    found = np.frombuffer(base64.b64decode(packed), np.uint8).reshape(height, width)
    return np.pad(found, (0, _GAP), constant_values=_WHITE)


def _mse(record: Record, clipping: str, multiplier: float, ratio: float) -> float:
    return next(
        float(attack["mse"])
        for attack in record["attacks"]
        if (attack["clipping"], attack["noise_multiplier"], attack["ratio"]) == (clipping, multiplier, ratio)
    )
