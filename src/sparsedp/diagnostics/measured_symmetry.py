"""Symmetry of per-unit gradient deviations at a run's final weights (RS, App. F, Fig. 6 to 9)."""

from __future__ import annotations

from torch import Tensor

from sparsedp.core.randomness import PublicRandomness
from sparsedp.diagnostics.nonprivate import Figure, Findings, Line, NonPrivate
from sparsedp.diagnostics.oracle import asymmetry_p_value
from sparsedp.diagnostics.symmetry import lopsidedness, lopsidedness_by_chance

MOST_POINTS = 300
"""Shown in the figure."""


def symmetry_findings(points: NonPrivate[Tensor], public: PublicRandomness) -> Findings:
    """From deviations on two random directions, `[units, 2]`: a cloud, and how likely chance makes it as lopsided."""
    chance = points.map(lambda p: lopsidedness_by_chance(p, public))
    values = {
        "lopsidedness of gradient deviations (0 to 1)": points.map(lopsidedness),
        "lopsidedness of a symmetric cloud, 95 % point": chance.map(
            lambda c: float(c[round(0.95 * (len(c) - 1))])
        ),
        "p-value of symmetry": points.map(lambda p: asymmetry_p_value(p, public)),
    }
    return Findings(values, (points.map(_cloud),))


def _cloud(points: Tensor) -> Figure:
    shown = points[:MOST_POINTS]
    line = Line("one unit", shown[:, 0].tolist(), shown[:, 1].tolist())
    note = (
        "Each unit's gradient less the mean, on two random directions (RS, Fig. 6 to 9). A symmetric cloud looks the "
        "same upside down."
    )
    return Figure(
        "Gradient deviations", "first random direction", "second random direction", [line], note, "points"
    )
