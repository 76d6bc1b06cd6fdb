"""Theory against measurement: misranking, the one-step criterion, Theorem 6.3, RS's best rate."""

from __future__ import annotations

import math
from collections.abc import Sequence

from scipy import stats

from sparsedp_experiments.runs.results import estimate
from sparsedp_experiments.figures.canvas import (
    BLUE,
    DASHED,
    DOTTED,
    GOLD,
    GREY,
    ORANGE,
    PINK,
    SOLID,
    TEAL,
    VIOLET,
    key,
    legend,
    level,
    powers,
    sheet,
    upright,
    whisker,
    written,
)
from sparsedp_experiments.figures.plots.support import SHOWN_EPSILON, at_epsilon
from sparsedp_experiments.figures.store import Record, Records

_BOUNDS = (
    ("chebyshev", GREY, DASHED), ("bernstein", GOLD, DASHED), ("chernoff", TEAL, DASHED),
    ("energy", BLUE, SOLID), ("coherent", ORANGE, SOLID),
)  # fmt: skip
_MARKED = {
    "warmup-hospital": "hospital",
    "warmup-fashion-cnn": "CNN",
    "warmup-fashion-scattering": "scattering",
}
_TOP = 0.1
_LOWEST = -4


def misranking(records: Records) -> str:
    """Probability that noise swaps a coordinate with a gradient and one without."""
    found = records["misranking"]
    figure, panels = sheet(len(found), 2, 480, 300)
    for record, axes in zip(found, panels, strict=True):
        rows = record["pairs"]
        powers(axes, "x", -3, 0)
        powers(axes, "y", _LOWEST, 0)
        axes.set(title=f"{record['steps']} warm-up steps", xlabel="G²/ν²", ylabel="probability")
        for name, colour, line in _BOUNDS:
            shown = [row for row in rows if row[name] >= 10.0**_LOWEST]
            axes.plot([row["strength"] for row in shown], [row[name] for row in shown], color=colour, ls=line)
        for row in rows:
            if row["swapped"]:
                low, high = _clopper_pearson(row["swapped"], row["draws"])
                whisker(axes, row["strength"], row["swapped"] / row["draws"], low, high, PINK)
        for place, (name, label) in enumerate(_MARKED.items()):
            strength = _strength(records[name], SHOWN_EPSILON)
            if strength is not None and strength < 1:
                upright(axes, strength, f"top tenth of {label}, ε = {SHOWN_EPSILON}", place)
    keys = [
        key("energy score, exact", BLUE),
        key("simulated, 95 %", PINK, dot=True),
        key("Chebyshev (Prop. 5.3)", GREY, DASHED),
        key("Remark B.1, c = 3/32", GOLD, DASHED),
        key("best exponential bound", TEAL, DASHED),
        key("coherent score, exact", ORANGE),
    ]
    legend(figure, keys)
    return written(
        figure, "Misranking probability over gradient strength: exact, simulated and three bounds."
    )


def _strength(records: Sequence[Record], epsilon: float) -> float | None:
    """Mean G^2/nu^2 of the clipped gradient over its largest tenth of coordinates."""
    found = [record for record in at_epsilon(records, epsilon) if "clipped_energy_over_noise" in record]
    if not found:
        return None
    place = found[0]["shares"].index(_TOP)
    values = [r["clipped_energy_over_noise"] * r["concentration"]["clipped"][place] / _TOP for r in found]
    return estimate(values).mean


def _clopper_pearson(hits: int, draws: int) -> tuple[float, float]:
    low = float(stats.beta.ppf(0.025, hits, draws - hits + 1)) if hits else 0.0
    return low, float(stats.beta.ppf(0.975, hits + 1, draws - hits))


def criterion(records: Records) -> str:
    """Prop. 5.1 along a run, and the progress of a step."""
    record = records["bounds"][0]
    rows = [row for row in record["snapshots"] if row["step"] >= record["switch"]]
    steps = [row["step"] for row in rows]
    figure, (both, progress) = sheet(2, 2, 480, 280)
    sides = [row[name] for row in rows for name in ("signal_loss", "noise_saved", "random_signal_loss")]
    powers(both, "y", math.floor(math.log10(min(sides))), math.ceil(math.log10(max(sides))))
    both.set(title="Signal lost against noise saved", xlabel="step", ylabel="squared norm")
    both.plot(steps, [row["noise_saved"] for row in rows], color=TEAL, marker="o")
    both.plot(steps, [row["random_signal_loss"] for row in rows], color=GREY, ls=DASHED)
    both.plot(steps, [row["signal_loss"] for row in rows], color=BLUE, marker="o")
    both.plot(steps, [row["clipped_energy"] for row in rows], color=ORANGE, ls=DOTTED)
    ratios = [row["progress_over_dense"] for row in rows]
    progress.plot(steps, ratios, color=BLUE, marker="o")
    progress.set(
        title="Progress of a step over a dense one's", xlabel="step", ylabel="ratio",
        ylim=(0, max(1.2, 1.1 * max(ratios))),
    )  # fmt: skip
    level(progress, 1.0, "a dense step")
    keys = [
        key("noise saved (d - k) ν²", TEAL),
        key("signal lost, learned support", BLUE),
        key("signal lost, random support", GREY, DASHED),
        key("the whole clipped gradient", ORANGE, DOTTED),
    ]
    legend(figure, keys)
    alt = "The two sides of the one-step criterion along the main phase of a run, and the progress of a step."
    return written(figure, alt)


_TERMS = (
    ("progress", "progress", BLUE), ("clipping_bias", "clipping", ORANGE), ("mini_batch", "batch", VIOLET),
    ("dp_noise", "noise", PINK), ("total", "bound", GREY), ("projected_energy", "measured", TEAL),
)  # fmt: skip


def theorem(records: Records) -> str:
    """The four terms of Theorem 6.3 and what they bound."""
    found = records["bounds-plain"][0]["theorem"]
    shown = [(label, colour, found[name]) for name, label, colour in _TERMS if found.get(name)]
    labels, colours, values = zip(*shown, strict=True)
    figure, (axes,) = sheet(1, 1, 620, 300)
    powers(axes, "y", math.floor(math.log10(min(values))) - 1, math.ceil(math.log10(max(values))))
    axes.set(
        title="Terms of Theorem 6.3 along a plain SGD run",
        ylabel="squared norm",
        xlim=(-0.6, len(shown) - 0.4),
    )
    axes.bar_label(
        axes.bar(labels, values, 0.62, color=colours), [f"{value:.2g}" for value in values], padding=2
    )
    return written(figure, "The four terms of Theorem 6.3, their sum and what they bound.")


def best_rate(records: Records) -> str:
    """RS's r*, and the two sums it weighs."""
    runs = {"bounds": ("tuned run, C = 0.1", "tuned run"), "bounds-plain": ("plain SGD, C = 1", "plain SGD")}
    figure, panels = sheet(4, 2, 480, 240)
    for place, (name, (title, short)) in enumerate(runs.items()):
        rows = records[name][0]["snapshots"]
        steps = [row["step"] for row in rows]
        rate, weighed = panels[place], panels[place + 2]
        rate.plot(steps, [row["best_rate"] for row in rows], color=BLUE, marker="o")
        rate.plot(steps, [row["printed_rate"] for row in rows], color=GREY, ls=DASHED)
        rate.set(title=f"Best rate r*, {title}", xlabel="step", ylabel="share frozen", ylim=(0, 1))
        sides = [max(row[side], 1e-9) for row in rows for side in ("enlarged", "noise_term")]
        low = math.floor(math.log10(min(sides)))
        powers(weighed, "y", low, max(math.ceil(math.log10(max(sides))), low + 1))
        weighed.plot(steps, [max(row["enlarged"], 1e-9) for row in rows], color=ORANGE, marker="o")
        weighed.plot(steps, [max(row["noise_term"], 1e-9) for row in rows], color=PINK, marker="o")
        weighed.set(title=f"What it weighs, {short}", xlabel="step", ylabel="size of the term")
    keys = [
        key("r* with the learning rate in it", BLUE),
        key("r* as printed (eq. 116)", GREY, DASHED),
        key("Δ_C, enlarged by sparsity", ORANGE),
        key("γ Δ_σ, the noise", PINK),
    ]
    legend(figure, keys)
    return written(figure, "RS's best sparsification rate along two runs, and the terms it is made of.")
