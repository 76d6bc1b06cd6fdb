"""Energy captured and clipping along a run, from the weights it kept (TP-TopK, Def. 6.5)."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from sparsedp.diagnostics.nonprivate import Figure, Findings, Line, NonPrivate
from sparsedp.diagnostics.trajectory import Waypoint, energy_capture

Points = Sequence[Waypoint]


def trajectory_findings(points: NonPrivate[tuple[Waypoint, ...]], dimension: int) -> Findings:
    """`alpha_T`, and how captured energy, gradient norm and clipping bias went along the run."""
    values = {"energy captured along the run (alpha_T)": points.map(energy_capture)}

    def figure(make: Callable[[Points], Figure]) -> NonPrivate[Figure]:
        return points.map(make)

    return Findings(values, (figure(lambda p: _captured(p, dimension)), figure(_clipping)))


def _captured(points: Points, dimension: int) -> Figure:
    moving = [point for point in points if point.energy > 0]
    steps = [float(point.step) for point in moving]
    lines = [
        Line("on the support", steps, [point.captured / point.energy for point in moving]),
        Line("random support, k/d", steps, [point.active / dimension for point in moving]),
    ]
    note = "Share of the gradient's energy on the support of the step, at weights the run kept (TP-TopK, Def. 6.5)."
    return Figure("Energy captured along the run", "step", "share of energy", lines, note)


def _clipping(points: Points) -> Figure:
    steps = [float(point.step) for point in points]
    lines = [
        Line("clipping bias", steps, [point.bias for point in points]),
        Line("its bound (Lemma 6.4)", steps, [point.bias_bound for point in points]),
        Line("gradient norm on the support", steps, [point.captured**0.5 for point in points]),
    ]
    note = "Clipping bias of the mean gradient against its bound, and the gradient it is a bias of."
    return Figure("Clipping along the run", "step", "norm", lines, note)
