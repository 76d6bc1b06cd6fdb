"""The figures of the gallery, each from the records of one or more studies."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import final

from sparsedp_experiments.figures.plots import attack, dynamics, support, theory
from sparsedp_experiments.figures.store import Records


@final
@dataclass(frozen=True, slots=True)
class Plot:
    """A figure: the studies it is drawn from, and how."""

    studies: tuple[str, ...]
    draw: Callable[[Records], str]


_WARM_UPS = tuple(support.DATA)

PLOTS: Mapping[str, Plot] = MappingProxyType(
    {
        "concentration": Plot(_WARM_UPS, support.concentration),
        "recovery": Plot(_WARM_UPS, support.recovery),
        "alpha": Plot(_WARM_UPS, support.alpha),
        "rho-sig": Plot(_WARM_UPS, support.rho_sig),
        "freezing": Plot(("freezing",), dynamics.freezing),
        "symmetry": Plot(("symmetry",), dynamics.symmetry),
        "wire": Plot(("wire",), dynamics.wire),
        "least-squares": Plot(("least-squares",), attack.least_squares),
        "inversion": Plot(("inversion",), attack.inversion),
        "inversion-pictures": Plot(("inversion",), attack.pictures),
        "misranking": Plot(("misranking", *_WARM_UPS), theory.misranking),
        "criterion": Plot(("bounds",), theory.criterion),
        "theorem": Plot(("bounds", "bounds-plain"), theory.theorem),
        "best-rate": Plot(("bounds", "bounds-plain"), theory.best_rate),
    }
)
