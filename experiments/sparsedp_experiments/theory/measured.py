"""What is measured without noise at a run's final weights, and along the run: findings for its non-private page.

A support against un-noised gradients (energy captured, recovery, one-step criterion), symmetry of per-unit deviations
(RS, App. F, Fig. 6 to 9), and energy captured and clipping at the weights the run kept (TP-TopK, Def. 6.5).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from sparsedp.diagnostics import SHARES, RunView
from sparsedp.randomness import PublicRandomness
from sparsedp_experiments.theory.bounds import retained_energy
from sparsedp_experiments.theory.criteria import (
    concentration_curve,
    energy_captured,
    one_step,
    random_capture,
    recovery_curve,
)
from sparsedp_experiments.theory.nonprivate import Figure, Findings, Line, NonPrivate
from sparsedp_experiments.theory.oracle import (
    ClippingReport,
    asymmetry_p_value,
    lopsidedness,
    lopsidedness_by_chance,
)
from sparsedp_experiments.theory.trajectory import Waypoint, energy_capture

MOST_POINTS = 300
"""Shown in the figure of deviations."""

Points = Sequence[Waypoint]


def capture_findings(gradient: NonPrivate[Tensor], view: RunView) -> Findings:
    """`alpha_oracle` against random supports, the energy concentration and the recovery curve (TP-TopK, Fig. 1)."""
    support = view.support

    def edge(side: int) -> Callable[[Tensor], float]:
        return lambda g: random_capture(g**2, support.size).interval()[side]

    values = {
        "gradient energy on the support (alpha_oracle)": gradient.map(
            lambda g: energy_captured(g**2, support)
        ),
        "random support, lower end of 95 %": gradient.map(edge(0)),
        "random support, upper end of 95 %": gradient.map(edge(1)),
        "squared gradient norm": gradient.map(lambda g: float((g**2).sum())),
    }
    figures = [gradient.map(_concentration)]
    scores = view.scores
    if scores is not None:
        order = torch.sort(scores, descending=True, stable=True).indices
        figures.append(gradient.map(lambda g: _recovery(g, order)))
    return Findings(values, tuple(figures))


def criterion_findings(clipped: NonPrivate[Tensor], view: RunView, noise_std: float) -> Findings:
    """The one-step criterion (TP-TopK, Prop. 5.1) and AdaDPIGU's energy retention, of the mean clipped gradient."""
    step = clipped.map(lambda g: one_step(g, view.support, noise_std))
    values = {
        "signal loss of the support": step.map(lambda s: s.signal_loss),
        "noise saved by the support": step.map(lambda s: s.noise_saved),
        "energy retained by the support (AdaDPIGU, alpha)": clipped.map(
            lambda g: retained_energy(g, view.support)
        ),
    }
    return Findings(values)


def clipping_findings(report: NonPrivate[ClippingReport], clip_norm: float) -> Findings:
    """Clipping bias and its bound (TP-TopK, Lemma 6.4)."""
    values = {
        "clipping bias": report.map(lambda r: r.bias),
        "bound on the clipping bias (Lemma 6.4)": report.map(lambda r: r.bias_bound),
        "variance of a clipped gradient": report.map(lambda r: r.unit_variance),
        "share of units that are clipped": report.map(lambda r: float((r.norms > clip_norm).double().mean())),
    }
    return Findings(values)


def _concentration(gradient: Tensor) -> Figure:
    top = concentration_curve(gradient**2, SHARES)
    lines = [Line("largest coordinates", SHARES, top), Line("random coordinates", SHARES, SHARES)]
    note = "Share of the gradient's energy in the largest coordinates (TP-TopK, Fig. 1a)."
    return Figure("Energy concentration", "share of coordinates", "share of energy", lines, note)


def _recovery(gradient: Tensor, order: Tensor) -> Figure:
    curve = recovery_curve(gradient**2, order, SHARES)
    lines = [
        Line("ranked by the run", SHARES, [point.learned for point in curve]),
        Line("random", SHARES, [point.random.mean for point in curve]),
        Line("oracle", SHARES, [point.oracle for point in curve]),
    ]
    note = "Energy that supports of each size recover at the final weights (TP-TopK, Fig. 1b is at the warm-up's)."
    return Figure("Energy recovered", "active ratio", "share of energy", lines, note)


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
