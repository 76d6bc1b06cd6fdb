"""Support quality at the switch: TP-TopK, Fig. 1 and Sec. 7.4."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

from matplotlib.axes import Axes

from sparsedp_experiments.figures.canvas import (
    BLUE,
    DASHED,
    DOTTED,
    GREY,
    ORANGE,
    PINK,
    SOLID,
    TEAL,
    VIOLET,
    LineStyle,
    key,
    legend,
    level,
    seeded,
    shares,
    sheet,
    written,
)
from sparsedp_experiments.figures.store import Record, Records

DATA: Mapping[str, str] = MappingProxyType(
    {
        "warmup-fashion-cnn": "Fashion-MNIST, CNN",
        "warmup-fashion-scattering": "Fashion-MNIST, scattering",
        "warmup-hospital": "Hospital table, logistic",
    }
)
EPSILONS = (1, 3, 8)
SHOWN_EPSILON = 3
_RATIOS = (0.05, 0.1, 0.2, 0.4)
_MARKS = (0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0)
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
    kinds = (
        ("mean gradient", BLUE, SOLID),
        ("mini-batch gradients", ORANGE, DASHED),
        ("clipped", TEAL, DOTTED),
    )
    figure, panels = sheet(len(DATA), 3)
    for (name, title), axes in zip(DATA.items(), panels, strict=True):
        found = at_epsilon(records[name], SHOWN_EPSILON)
        x = found[0]["shares"]
        shares(axes, "x", 0.01, 1.0, _MARKS)
        axes.set(title=title, xlabel="largest coordinates", ylabel="share of energy", ylim=(0, 1))
        axes.plot(x, x, color=GREY, ls=DOTTED)
        for kind, colour, line in kinds:
            columns = [record["concentration"][kind] for record in found if kind in record["concentration"]]
            seeded(axes, x, columns, colour, line)
    keys = [
        key("energy of the mean gradient", BLUE),
        key("mean energy of mini-batch gradients (the paper's)", ORANGE, DASHED),
        key("energy of the mean clipped gradient", TEAL, DOTTED),
        key("random coordinates", GREY, DOTTED),
    ]
    legend(figure, keys)
    return written(
        figure, "Share of gradient energy in the largest coordinates, for three models at epsilon 3."
    )


def recovery(records: Records) -> str:
    """Fig. 1b: what supports of each size recover, by ranking and budget."""
    kinds = (
        ("oracle", GREY, DASHED), ("random", GREY, DOTTED), ("coherent", ORANGE, SOLID), ("energy", BLUE, SOLID),
    )  # fmt: skip
    places = [(name, title, epsilon) for name, title in DATA.items() for epsilon in EPSILONS]
    figure, panels = sheet(len(places), 3)
    for (name, title, epsilon), axes in zip(places, panels, strict=True):
        found = at_epsilon(records[name], epsilon)
        shares(axes, "x", 0.01, 1.0, _MARKS)
        axes.set(
            title=f"{title}, ε = {epsilon}", xlabel="active ratio", ylabel="share of energy", ylim=(0, 1)
        )
        for kind, colour, line in kinds:
            seeded(axes, found[0]["shares"], [record["recovery"][kind] for record in found], colour, line)
    keys = [
        key("by energy score", BLUE),
        key("by coherent score", ORANGE),
        key("random", GREY, DOTTED),
        key("oracle (not private)", GREY, DASHED),
    ]
    legend(figure, keys)
    alt = "Gradient energy recovered by learned, random and oracle supports, for three models and budgets."
    return written(figure, alt)


def alpha(records: Records) -> str:
    """alpha_oracle over k/d, by ranking and budget."""
    colours = dict(zip(EPSILONS, (PINK, VIOLET, TEAL), strict=True))
    figure, panels = sheet(len(DATA), 3)
    for (name, title), axes in zip(DATA.items(), panels, strict=True):
        shares(axes, "x", 0.045, 0.45, _RATIOS)
        axes.set(title=title, xlabel="active ratio k/d", ylabel="alpha_oracle", ylim=(0, 1))
        axes.plot(_RATIOS, _RATIOS, color=GREY, ls=DOTTED)
        for epsilon, colour in colours.items():
            found = at_epsilon(records[name], epsilon)
            for score, line in (("energy", SOLID), ("coherent", DASHED)):
                columns = [[at_ratio(r, ratio)["by"][score]["alpha"] for ratio in _RATIOS] for r in found]
                seeded(axes, _RATIOS, columns, colour, line, dots=True)
    keys = [
        *(key(f"energy score, ε = {epsilon}", colour) for epsilon, colour in colours.items()),
        key("coherent score (same colours)", GREY, DASHED),
        key("random support: k/d", GREY, DOTTED),
    ]
    legend(figure, keys)
    alt = "Gradient energy captured by the learned support against k/d, for three models and three budgets."
    return written(figure, alt)


def _tells(record: Record) -> bool:
    """Whether the split version found energy above the noise at every ratio."""
    return all(found["by"]["energy"]["split"] is not None for found in record["supports"])


def _over_ratios(
    axes: Axes, found: Sequence[Record], what: str, colour: str, line: LineStyle = SOLID, *, band: bool = True
) -> None:
    """Something of the energy score's supports, over the ratios."""
    columns = [[at_ratio(record, ratio)["by"]["energy"][what] for ratio in _RATIOS] for record in found]
    seeded(axes, _RATIOS, columns, colour, line, dots=line == SOLID, band=band)


def rho_sig(records: Records) -> str:
    """rho_sig against its null, the split version against the truth."""
    places = [(name, title, epsilon) for name, title in DATA.items() for epsilon in EPSILONS]
    figure, panels = sheet(len(places), 3)
    for (name, title, epsilon), axes in zip(places, panels, strict=True):
        found = at_epsilon(records[name], epsilon)
        told = [record for record in found if _tells(record)]
        shares(axes, "x", 0.045, 0.45, _RATIOS)
        axes.set(title=f"{title}, ε = {epsilon}", xlabel="active ratio k/d", ylabel="share", ylim=(0, 1.2))
        axes.plot(_RATIOS, _RATIOS, color=GREY, ls=DOTTED)
        _over_ratios(axes, found, "null", PINK, DASHED)
        _over_ratios(axes, found, "rho_sig", PINK)
        _over_ratios(axes, found, "alpha_of_first_half", BLUE)
        if told:
            _over_ratios(axes, told, "split", TEAL, band=len(told) > FEW)
        level(axes, 1.0)
    keys = [
        key("rho_sig", PINK),
        key("rho_sig of pure noise (its null)", PINK, DASHED),
        key("split version (DP-visible)", TEAL),
        key("true capture of that ranking", BLUE),
        key("k/d", GREY, DOTTED),
    ]
    legend(figure, keys)
    alt = "rho_sig, its pure-noise null, its split version and the true energy captured, over active ratio."
    return written(figure, alt)
