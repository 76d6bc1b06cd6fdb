"""Theory against measurement: misranking, the one-step criterion, Theorem 6.3, RS's best rate."""

from __future__ import annotations

import math
from collections.abc import Sequence

from scipy import stats

from sparsedp.report.scale import Axis, linear_axis
from sparsedp.report.statistics import estimate
from studies.figures.drawing.marks import DASHED, DOTTED, Bar, Curve, Level, Mark, Upright, Whisker
from studies.figures.drawing.sheet import Key, Panel, fractions, log10, powers, sheet
from studies.figures.drawing.style import BLUE, GOLD, GREY, ORANGE, PINK, TEAL, VIOLET
from studies.figures.plots.support import SHOWN_EPSILON, at_epsilon
from studies.figures.store import Record, Records

_BOUNDS = (
    ("chebyshev", GREY, DASHED), ("bernstein", GOLD, DASHED), ("chernoff", TEAL, DASHED),
    ("energy", BLUE, ""), ("coherent", ORANGE, ""),
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
    panels = []
    for record in records["misranking"]:
        rows = record["pairs"]
        marks: list[Mark] = [
            Curve(
                [
                    (math.log10(row["strength"]), log10(row[name]))
                    for row in rows
                    if row[name] >= 10.0**_LOWEST
                ],
                colour,
                line,
            )
            for name, colour, line in _BOUNDS
        ]
        for row in rows:
            low, high = _clopper_pearson(row["swapped"], row["draws"])
            if row["swapped"]:
                share = row["swapped"] / row["draws"]
                marks.append(
                    Whisker(math.log10(row["strength"]), log10(share), log10(low), log10(high), PINK)
                )
        for place, (name, label) in enumerate(_MARKED.items()):
            strength = _strength(records[name], SHOWN_EPSILON)
            if strength is not None and strength < 1:
                marks.append(Upright(log10(strength), f"top tenth of {label}, ε = {SHOWN_EPSILON}", place))
        panels.append(
            Panel(
                f"{record['steps']} warm-up steps",
                powers("G²/ν²", -3, 0),
                powers("probability", _LOWEST, 0),
                marks,
            )
        )
    keys = [
        Key("energy score, exact", BLUE),
        Key("simulated, 95 %", PINK, dot=True),
        Key("Chebyshev (Prop. 5.3)", GREY, DASHED),
        Key("Remark B.1, c = 3/32", GOLD, DASHED),
        Key("best exponential bound", TEAL, DASHED),
        Key("coherent score, exact", ORANGE),
    ]
    alt = "Misranking probability over gradient strength: exact, simulated and three bounds."
    return sheet(alt, panels, keys, columns=2, width=480, height=300)


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

    def line(name: str, colour: str, style: str = "") -> Curve:
        return Curve([(row["step"], log10(row[name])) for row in rows], colour, style, dots=not style)

    x = linear_axis("step", record["switch"], record["steps"], whole=True)
    values = [
        log10(row[name]) for row in rows for name in ("signal_loss", "noise_saved", "random_signal_loss")
    ]
    y = powers("squared norm", math.floor(min(values)), math.ceil(max(values)))
    marks: list[Mark] = [
        line("noise_saved", TEAL), line("random_signal_loss", GREY, DASHED), line("signal_loss", BLUE),
        line("clipped_energy", ORANGE, DOTTED),
    ]  # fmt: skip
    first = Panel("Signal lost against noise saved", x, y, marks)
    shown = [(row["step"], row["progress_over_dense"]) for row in rows]
    top = max(1.2, 1.1 * max(value for _, value in shown))
    second = Panel(
        "Progress of a step over a dense one's",
        x,
        linear_axis("ratio", 0, top),
        [Level(1.0, "a dense step", at_end=True), Curve(shown, BLUE, dots=True)],
    )
    keys = [
        Key("noise saved (d - k) ν²", TEAL),
        Key("signal lost, learned support", BLUE),
        Key("signal lost, random support", GREY, DASHED),
        Key("the whole clipped gradient", ORANGE, DOTTED),
    ]
    alt = "The two sides of the one-step criterion along the main phase of a run, and the progress of a step."
    return sheet(alt, [first, second], keys, columns=2, width=480, height=280)


_TERMS = (
    ("progress", "progress", BLUE), ("clipping_bias", "clipping", ORANGE), ("mini_batch", "batch", VIOLET),
    ("dp_noise", "noise", PINK), ("total", "bound", GREY), ("projected_energy", "measured", TEAL),
)  # fmt: skip


def theorem(records: Records) -> str:
    """The four terms of Theorem 6.3 and what they bound."""
    found = records["bounds-plain"][0]["theorem"]
    shown = [(name, label, colour, found[name]) for name, label, colour in _TERMS if found.get(name)]
    low = math.floor(min(log10(value) for *_, value in shown)) - 1
    high = math.ceil(max(log10(value) for *_, value in shown))
    marks: list[Mark] = [
        Bar(place, 0.62, log10(value), colour, f"{value:.2g}")
        for place, (_, _, colour, value) in enumerate(shown)
    ]
    labels = {place: label for place, (_, label, _, _) in enumerate(shown)}
    x = Axis("", -0.6, len(shown) - 0.4, tuple(map(float, labels)), lambda v: labels[round(v)])
    panel = Panel("Terms of Theorem 6.3 along a plain SGD run", x, powers("squared norm", low, high), marks)
    return sheet(
        "The four terms of Theorem 6.3, their sum and what they bound.",
        [panel],
        columns=1,
        width=620,
        height=300,
    )


def best_rate(records: Records) -> str:
    """RS's r*, and the two sums it weighs."""
    panels = []
    for name, title in (("bounds", "tuned run, C = 0.1"), ("bounds-plain", "plain SGD, C = 1")):
        record = records[name][0]
        rows = record["snapshots"]
        x = linear_axis("step", 0, record["steps"], whole=True)
        marks: list[Mark] = [
            Curve([(row["step"], row["best_rate"]) for row in rows], BLUE, dots=True),
            Curve([(row["step"], row["printed_rate"]) for row in rows], GREY, DASHED),
        ]
        panels.append(Panel(f"Best rate r*, {title}", x, fractions("share frozen"), marks))
    for name, title in (("bounds", "tuned run"), ("bounds-plain", "plain SGD")):
        record = records[name][0]
        rows = record["snapshots"]
        x = linear_axis("step", 0, record["steps"], whole=True)
        values = [log10(row[side], 1e-9) for row in rows for side in ("enlarged", "noise_term")]
        y = powers(
            "size of the term",
            math.floor(min(values)),
            max(math.ceil(max(values)), math.floor(min(values)) + 1),
        )
        marks = [
            Curve([(row["step"], log10(row["enlarged"], 1e-9)) for row in rows], ORANGE, dots=True),
            Curve([(row["step"], log10(row["noise_term"], 1e-9)) for row in rows], PINK, dots=True),
        ]
        panels.append(Panel(f"What it weighs, {title}", x, y, marks))
    keys = [
        Key("r* with the learning rate in it", BLUE),
        Key("r* as printed (eq. 116)", GREY, DASHED),
        Key("Δ_C, enlarged by sparsity", ORANGE),
        Key("γ Δ_σ, the noise", PINK),
    ]
    alt = "RS's best sparsification rate along two runs, and the terms it is made of."
    return sheet(alt, panels, keys, columns=2, width=480, height=240)
