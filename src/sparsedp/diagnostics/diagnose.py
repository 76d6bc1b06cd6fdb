"""All diagnostics of one run: what its releases show, and, on request and marked, what un-noised gradients show."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, final

import torch
from torch import Tensor, nn

from sparsedp.core.batch import MicroBatch, PerSampleLoss
from sparsedp.core.clip import FlatClip
from sparsedp.core.randomness import PublicRandomness
from sparsedp.core.support import Support
from sparsedp.diagnostics.criteria import one_step
from sparsedp.diagnostics.curvature import smoothness
from sparsedp.diagnostics.nonprivate import Figure, Line, NonPrivate, write_nonprivate
from sparsedp.diagnostics.oracle import ClippingReport, clipping_report, mean_gradient
from sparsedp.diagnostics.proxy import PureNoise, proxy_concentration, pure_noise
from sparsedp.diagnostics.quality import (
    concentration_curve,
    energy_captured,
    random_capture,
    recovery_curve,
)
from sparsedp.gradients import make_engine
from sparsedp.methods.timeline import WARM_UP, noise_on_mean
from sparsedp.privacy.plan import Plan
from sparsedp.training.checkpoint import load_weights
from sparsedp.training.folder import RunFolder

SHARES = (0.01, 0.02, 0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0)

_SQUARES: Mapping[str, Callable[[int, Mapping[str, Any]], int]] = {
    "energy": lambda steps, ranking: steps,
    "coherent": lambda steps, ranking: 1,
    "block-coherent": lambda steps, ranking: max(1, steps // ranking["block"]),
}
"""How many independent squares a score averages over a warm-up; rankings not listed have no proxy energy."""


@final
@dataclass(frozen=True, slots=True)
class Proxy:
    """`rho_sig` of a run's support, and what pure noise would give."""

    seen: float
    null: PureNoise


@final
@dataclass(frozen=True, slots=True, eq=False)
class RunView:
    """The public state of a run that diagnostics start from.

    Attributes:
        plan: the run's.
        support: the last one.
        scores: what the last ranking was made from; None for random and dense methods.
        ranking: the method's ranking, as the record describes it; None for dense methods.
    """

    plan: Plan
    support: Support
    scores: Tensor | None
    ranking: Mapping[str, Any] | None

    @classmethod
    def of(cls, folder: Path | str) -> RunView:
        """Read a run's folder."""
        run = RunFolder.open(folder)
        state = run.checkpoint().state
        tensors, values = state["controller"]["tensors"], state["controller"]["values"]
        support = Support(tensors["support"], int(values["dimension"]))
        return cls(run.plan(), support, tensors.get("scores"), values["method"]["ranking"])

    def proxy(self) -> Proxy | None:
        """DP-visible concentration against its null; None without a warm-up or for scores that are no energies."""
        warm_up = next((phase for phase in self.plan.phases if phase.name == WARM_UP), None)
        if self.scores is None or self.ranking is None or warm_up is None:
            return None
        squares_of = _SQUARES.get(self.ranking["name"])
        if squares_of is None:
            return None
        squares = squares_of(warm_up.steps, self.ranking)
        null = pure_noise(self.support.size, self.support.dimension, squares)
        return Proxy(proxy_concentration(self.scores, self.support), null)


def diagnose_nonprivate(
    folder: Path | str,
    model: nn.Module,
    loss: PerSampleLoss,
    batches: Sequence[MicroBatch],
    public: PublicRandomness,
    say: Callable[[str], None] = lambda _: None,
) -> Path:
    """Measure a finished run with un-noised gradients at its final weights, into the run's `nonprivate.json`.

    Args:
        folder: of the run.
        model: of the run's architecture; gets its weights, and evaluation mode.
        loss: the per-sample loss.
        batches: rows to measure on: held-out ones for the support's quality (TP-TopK, Sec. 7.4).
        public: where power iteration starts.
        say: told what is being done.

    **Privacy.** The file is not private, whatever rows were used; nothing of it flows back.
    """
    view = RunView.of(folder)
    load_weights(folder, model)
    model.eval()
    engine = make_engine(model, loss)
    say("mean gradient")
    gradient = mean_gradient(engine, batches)
    values, figures = _support_values(gradient, view), _support_figures(gradient, view)
    phase = view.plan.phases[-1]
    if phase.clip_norm is not None:
        clip = FlatClip(phase.clip_norm)
        say("clipped mean gradient")
        clipped = mean_gradient(engine, batches, clip)
        values |= _criterion_values(clipped, view.support, noise_on_mean(view.plan, phase))
        say("clipping, unit by unit")
        values |= _clipping_values(clipping_report(engine, batches, view.support, clip))
    say("smoothness")
    values["smoothness (largest curvature)"] = smoothness(model, loss, batches, public).map(lambda s: s.value)
    return write_nonprivate(folder, values, figures)


def _support_values(gradient: NonPrivate[Tensor], view: RunView) -> dict[str, NonPrivate[float]]:
    support = view.support

    def edge(side: int) -> Callable[[Tensor], float]:
        return lambda g: random_capture(g**2, support.size).interval()[side]

    return {
        "gradient energy on the support (alpha_oracle)": gradient.map(
            lambda g: energy_captured(g**2, support)
        ),
        "random support, lower end of 95 %": gradient.map(edge(0)),
        "random support, upper end of 95 %": gradient.map(edge(1)),
        "squared gradient norm": gradient.map(lambda g: float((g**2).sum())),
    }


def _support_figures(gradient: NonPrivate[Tensor], view: RunView) -> list[NonPrivate[Figure]]:
    figures = [gradient.map(_concentration)]
    scores = view.scores
    if scores is not None:
        order = torch.sort(scores, descending=True, stable=True).indices
        figures.append(gradient.map(lambda g: _recovery(g, order)))
    return figures


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


def _criterion_values(
    clipped: NonPrivate[Tensor], support: Support, noise_std: float
) -> dict[str, NonPrivate[float]]:
    step = clipped.map(lambda g: one_step(g, support, noise_std))
    return {
        "signal loss of the support": step.map(lambda s: s.signal_loss),
        "noise saved by the support": step.map(lambda s: s.noise_saved),
    }


def _clipping_values(report: NonPrivate[ClippingReport]) -> dict[str, NonPrivate[float]]:
    return {
        "clipping bias": report.map(lambda r: r.bias),
        "bound on the clipping bias (Lemma 6.4)": report.map(lambda r: r.bias_bound),
        "variance of a clipped gradient": report.map(lambda r: r.unit_variance),
    }
