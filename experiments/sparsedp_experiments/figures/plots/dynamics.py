"""Along training: freezing, symmetry of deviations, bytes on the wire (RS, Fig. 12, Fig. 6 to 9, Sec. 5)."""

from __future__ import annotations

from matplotlib.patches import PathPatch
from matplotlib.path import Path

from sparsedp._validate import count
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
    powers,
    shares,
    sheet,
    written,
)
from sparsedp_experiments.figures.store import Records

_SHARES = (0.01, 0.02, 0.05, 0.1, 0.2, 0.4)


def freezing(records: Records) -> str:
    """Fig. 12: how many coordinates were frozen how often."""
    found = records["freezing"]
    figure, panels = sheet(len(found), 2, 480, 280)
    for record, axes in zip(found, panels, strict=True):
        axes.plot([record["d"] * share for share in record["by_chance"]], color=GREY)
        axes.plot(record["histograms"]["as it was"], color=BLUE)
        top = axes.get_ylim()[1]
        axes.plot(record["histograms"]["ranked without noise"], color=ORANGE, ls=DASHED)
        axes.set(
            title=f"ε = {record['point']['epsilon']}", xlabel="epochs frozen", ylabel="coordinates",
            xlim=(0, record["epochs"]), ylim=(0, top),
        )  # fmt: skip
        axes.yaxis.set_major_formatter(lambda value, _: count(value))
    keys = [
        key("frozen at random (exact law)", GREY),
        key("ranked by released gradients", BLUE),
        key("ranked without noise (not private)", ORANGE, DASHED),
    ]
    legend(figure, keys)
    alt = "How many epochs each coordinate was frozen: ranked, at random, and ranked without noise."
    return written(figure, alt)


def symmetry(records: Records) -> str:
    """Fig. 6 to 9: deviations on a random plane."""
    found = [(record["point"]["method"], stop) for record in records["symmetry"] for stop in record["stops"]]
    figure, panels = sheet(len(found), 4, 240, 250)
    for (method, stop), axes in zip(found, panels, strict=True):
        mean = sum(stop["lopsidedness"]) / len(stop["lopsidedness"])
        chance = sum(stop["by_chance"]) / len(stop["by_chance"])
        axes.set(
            title=f"{method}, {_after(stop['epoch'])}", xlabel=f"lopsided {mean:.2f}, by chance {chance:.2f}",
            xlim=(-5, 5), ylim=(-5, 5), xticks=(-4, 0, 4), yticks=(-4, 0, 4),
        )  # fmt: skip
        corners = [(x, y) for x, y in stop["points"] if max(abs(x), abs(y)) <= 5 for _ in "ab"]
        dots = Path(
            corners, [Path.MOVETO, Path.LINETO] * (len(corners) // 2)
        )  # one path is small, 300 markers are not
        colour = BLUE if method == "dp-sgd" else TEAL
        axes.add_patch(PathPatch(dots, fill=False, ec=colour, lw=3.4, alpha=0.55, capstyle="round"))
    alt = "Deviations of single gradients from their mean, projected to a random plane, along two runs."
    return written(figure, alt)


def _after(epoch: int) -> str:
    return "at the start" if epoch == 0 else f"after {epoch} epoch{'s' if epoch > 1 else ''}"


def wire(records: Records) -> str:
    """Bytes of sparse updates over those of dense ones, and of one support."""
    once, often = (
        [r for r in records["wire"] if r["point"]["method"] == method] for method in ("tp-topk", "on-rand")
    )
    ratios, others = ([r["k"] / r["d"] for r in found] for found in (once, often))
    figure, (update, support) = sheet(2, 2, 480, 280)
    for axes in (update, support):
        shares(axes, "x", 0.009, 0.45, _SHARES)
        axes.set_xlabel("active ratio k/d")
    shares(update, "y", 0.008, 1.0, (*_SHARES, 1.0))
    update.set(title="An update over a dense one", ylabel="share")
    update.plot(ratios, [2 * ratio for ratio in ratios], color=GREY, ls=DASHED)
    update.plot(ratios, [r["share"] for r in once], color=BLUE, marker="o")
    update.plot(others, [r["share"] for r in often], color=ORANGE, ls=DOTTED)
    powers(support, "y", 2, 5)
    support.set(title="The indices of one support", ylabel="bytes")
    support.plot(ratios, [r["four_byte_indices"] for r in once], color=GREY, ls=DASHED)
    support.plot(ratios, [r["d"] / 8 for r in once], color=PINK, ls=DOTTED)
    support.plot(ratios, [r["one_support_bytes"] for r in once], color=BLUE, marker="o")
    support.plot(others, [r["one_support_bytes"] for r in often], color=ORANGE, ls=DOTTED)
    keys = [
        key("tp-topk, one support", BLUE),
        key("on-rand, a support every epoch", ORANGE, DOTTED),
        key("4-byte indices (left: with the values of every step)", GREY, DASHED),
        key("a bitmap", PINK, DOTTED),
    ]
    legend(figure, keys)
    alt = "Bytes per step of encoded sparse updates as a share of dense ones, and bytes of one support."
    return written(figure, alt)
