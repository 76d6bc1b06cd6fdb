"""A support against un-noised gradients at a run's final weights: energy captured, recovery, one-step criterion."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from sparsedp.diagnostics.convergence import retained_energy
from sparsedp.diagnostics.criteria import one_step
from sparsedp.diagnostics.nonprivate import Figure, Findings, Line, NonPrivate
from sparsedp.diagnostics.oracle import ClippingReport
from sparsedp.diagnostics.quality import (
    concentration_curve,
    energy_captured,
    random_capture,
    recovery_curve,
)
from sparsedp.diagnostics.summary import SHARES
from sparsedp.diagnostics.view import RunView


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
