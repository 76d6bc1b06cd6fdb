"""Support quality at the switch: TP-TopK, Fig. 1 and Sec. 7.4."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import Any

from sparsedp.report.scale import Axis
from studies.figures.drawing.marks import DASHED, DOTTED, Curve, Level, Mark, seeded
from studies.figures.drawing.sheet import Key, Panel, fractions, shares, sheet
from studies.figures.drawing.style import BLUE, GREY, ORANGE, PINK, TEAL, VIOLET
from studies.figures.store import Record, Records

DATA: Mapping[str, str] = MappingProxyType(
    {
        "warmup-fashion-cnn": "Fashion-MNIST, CNN",
        "warmup-fashion-scattering": "Fashion-MNIST, scattering",
        "warmup-hospital": "Hospital table, logistic",
    }
)
EPSILONS = (1, 3, 8)
SHOWN_EPSILON = 3
FEW = 2
"""An interval over so many seeds says nothing."""


def at_epsilon(records: Sequence[Record], epsilon: float) -> list[Record]:
    """The records of one budget, a seed each."""
    return [record for record in records if record["point"]["epsilon"] == epsilon]


def at_ratio(record: Record, ratio: float) -> Mapping[str, Any]:
    """What a record says of one active ratio."""
    return next(found for found in record["supports"] if found["ratio"] == ratio)


def concentration(records: Records) -> str:
    """Fig. 1a: the share of energy in the largest coordinates."""
    kinds = (("mean gradient", BLUE, ""), ("mini-batch gradients", ORANGE, DASHED), ("clipped", TEAL, DOTTED))
    panels = []
    for name, title in DATA.items():
        found = at_epsilon(records[name], SHOWN_EPSILON)
        x = [math.log10(share) for share in found[0]["shares"]]
        chance = Curve([(at, 10**at) for at in x], GREY, DOTTED)
        lines: list[Mark] = [
            seeded(
                x,
                [record["concentration"][kind] for record in found if kind in record["concentration"]],
                colour,
                line,
            )
            for kind, colour, line in kinds
        ]
        panels.append(
            Panel(title, shares("largest coordinates"), fractions("share of energy"), [chance, *lines])
        )
    keys = [
        Key("energy of the mean gradient", BLUE),
        Key("mean energy of mini-batch gradients (the paper's)", ORANGE, DASHED),
        Key("energy of the mean clipped gradient", TEAL, DOTTED),
        Key("random coordinates", GREY, DOTTED),
    ]
    alt = "Share of gradient energy in the largest coordinates, for three models at epsilon 3."
    return sheet(alt, panels, keys, columns=3)


def recovery(records: Records) -> str:
    """Fig. 1b: what supports of each size recover, by ranking and budget."""
    panels = []
    for name, title in DATA.items():
        for epsilon in EPSILONS:
            found = at_epsilon(records[name], epsilon)
            x = [math.log10(share) for share in found[0]["shares"]]
            lines: list[Mark] = [
                seeded(x, [record["recovery"][kind] for record in found], colour, line)
                for kind, colour, line in (
                    ("oracle", GREY, DASHED), ("random", GREY, DOTTED),
                    ("coherent", ORANGE, ""), ("energy", BLUE, ""),
                )
            ]  # fmt: skip
            panels.append(
                Panel(f"{title}, ε = {epsilon}", shares("active ratio"), fractions("share of energy"), lines)
            )
    keys = [
        Key("by energy score", BLUE),
        Key("by coherent score", ORANGE),
        Key("random", GREY, DOTTED),
        Key("oracle (not private)", GREY, DASHED),
    ]
    alt = "Gradient energy recovered by learned, random and oracle supports, for three models and budgets."
    return sheet(alt, panels, keys, columns=3)


_RATIO_TICKS = (0.05, 0.1, 0.2, 0.4)


def _ratio_axis() -> Axis:
    ticks = tuple(math.log10(ratio) for ratio in _RATIO_TICKS)
    return Axis("active ratio k/d", math.log10(0.045), math.log10(0.45), ticks, lambda v: f"{10**v:.2g}")


def alpha(records: Records) -> str:
    """alpha_oracle over k/d, by ranking and budget."""
    panels = []
    x = [math.log10(ratio) for ratio in _RATIO_TICKS]
    for name, title in DATA.items():
        lines: list[Mark] = [Curve([(at, 10**at) for at in x], GREY, DOTTED)]
        for epsilon, colour in zip(EPSILONS, (PINK, VIOLET, TEAL), strict=True):
            found = at_epsilon(records[name], epsilon)
            for score, line in (("energy", ""), ("coherent", DASHED)):
                columns = [
                    [at_ratio(r, ratio)["by"][score]["alpha"] for ratio in _RATIO_TICKS] for r in found
                ]
                lines.append(seeded(x, columns, colour, line, dots=True))
        panels.append(Panel(title, _ratio_axis(), fractions("alpha_oracle"), lines))
    keys = [
        *(Key(f"energy score, ε = {e}", c) for e, c in zip(EPSILONS, (PINK, VIOLET, TEAL), strict=True)),
        Key("coherent score (same colours)", GREY, DASHED),
        Key("random support: k/d", GREY, DOTTED),
    ]
    alt = "Gradient energy captured by the learned support against k/d, for three models and three budgets."
    return sheet(alt, panels, keys, columns=3)


def _tells(record: Record) -> bool:
    """Whether the split version found energy above the noise at every ratio."""
    return all(found["by"]["energy"]["split"] is not None for found in record["supports"])


def _over_ratios(found: Sequence[Record], what: str, colour: str, line: str = "") -> Curve:
    """Something of the energy score's supports, over the ratios."""
    x = [math.log10(ratio) for ratio in _RATIO_TICKS]
    columns = [[at_ratio(record, ratio)["by"]["energy"][what] for ratio in _RATIO_TICKS] for record in found]
    return seeded(x, columns, colour, line, dots=not line)


def rho_sig(records: Records) -> str:
    """rho_sig against its null, the split version against the truth."""
    panels = []
    x = [math.log10(ratio) for ratio in _RATIO_TICKS]
    for name, title in DATA.items():
        for epsilon in EPSILONS:
            found = at_epsilon(records[name], epsilon)
            told = [record for record in found if _tells(record)]
            lines: list[Mark] = [
                Curve([(at, 10**at) for at in x], GREY, DOTTED),
                _over_ratios(found, "null", PINK, DASHED),
                _over_ratios(found, "rho_sig", PINK),
                _over_ratios(found, "alpha_of_first_half", BLUE),
            ]
            if told:
                split = _over_ratios(told, "split", TEAL)
                lines.append(split if len(told) > FEW else replace(split, low=(), high=()))
            lines.append(Level(1.0))
            axis = Axis("share", 0.0, 1.2, (0.0, 0.2, 0.4, 0.6, 0.8, 1.0), lambda v: f"{v:.1f}")
            panels.append(Panel(f"{title}, ε = {epsilon}", _ratio_axis(), axis, lines))
    keys = [
        Key("rho_sig", PINK),
        Key("rho_sig of pure noise (its null)", PINK, DASHED),
        Key("split version (DP-visible)", TEAL),
        Key("true capture of that ranking", BLUE),
        Key("k/d", GREY, DOTTED),
    ]
    alt = "rho_sig, its pure-noise null, its split version and the true energy captured, over active ratio."
    return sheet(alt, panels, keys, columns=3)
