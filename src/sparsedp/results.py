"""What callbacks and results may know: released values and public quantities only."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from sparsedp.parameters import Support
from sparsedp.privacy.mechanism import Release
from sparsedp.privacy.plan import Plan
from sparsedp.runs.record import EpochMetrics, SupportSpan


@dataclass(frozen=True, slots=True)
class StepReport:
    """One step is done.

    Attributes:
        step: its index in the plan.
        epoch: the epoch it belongs to, from 1.
        phase: the plan's phase.
        released: the privatized gradient.
        learning_rates: one per parameter group.
    """

    step: int
    epoch: int
    phase: str
    released: Release
    learning_rates: tuple[float, ...]


Event = StepReport | EpochMetrics


class Callback:
    """Hears of a run: override what you want to hear of.

    >>> class Norms(Callback):
    ...     def on_step(self, report):
    ...         print(report.step, float(report.released.mean.norm()))

    Formal guarantees: Released values, public numbers and held-out metrics: nothing else reaches a callback.
    """

    def on_step(self, report: StepReport) -> None:
        """After every step."""

    def on_epoch(self, metrics: EpochMetrics) -> None:
        """After every epoch, with its held-out metrics and the epsilon so far."""

    def on_end(self, result: Result) -> None:
        """Once the run is finished, its files closed."""


CallbackLike = Callback | Callable[[Event], None]
"""A callback, or a function that is called with the report of each step and each epoch."""


def tell(callbacks: Iterable[CallbackLike], event: Event | Result) -> None:
    """Tell callbacks, in order, of a step, an epoch or the end."""
    for callback in callbacks:
        if not isinstance(callback, Callback):
            if not isinstance(event, Result):
                callback(event)
        elif isinstance(event, StepReport):
            callback.on_step(event)
        elif isinstance(event, EpochMetrics):
            callback.on_epoch(event)
        else:
            callback.on_end(event)


@dataclass(frozen=True, slots=True)
class LedgerSummary:
    """What the ledger says was spent.

    Attributes:
        steps: releases charged, those lost in a crash included.
        planned: releases the plan has.
        epsilon: their cost at the plan's delta.
        entries: lines of the ledger file; 0 without one.
        head: hash of its last line; None without a file.
    """

    steps: int
    planned: int
    epsilon: float
    entries: int = 0
    head: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """A trained model and what it cost.

    Attributes:
        model: the trained model, in evaluation mode, with the averaged weights if an average was kept.
        epsilon: the guarantee: the epsilon of the whole plan, also when the run was stopped early (a shorter run's
            smaller cost, `ledger.epsilon`, holds only if the stop did not depend on anything released).
        delta: the delta of the guarantee.
        unit: what the guarantee protects: "row", or the name of the unit given.
        publishable: False when a seed was given: reproducible, not for release.
        complete: whether every planned step was taken or counted.
        d: number of trainable scalars.
        k: number of active ones at the end.
        support: which ones.
        supports: when the support changed, and how many coordinates of each parameter it kept.
        scores: what the last ranking was made from; None for random and dense methods.
        history: one report per epoch.
        metrics: the last evaluation on held-out data, which is outside the guarantee.
        plan: what was planned.
        ledger: what was spent.
        out: the run directory, if there is one.
    """

    model: nn.Module = field(repr=False)
    method: str
    epsilon: float
    delta: float | None
    unit: str
    publishable: bool
    complete: bool
    d: int
    k: int
    support: Support
    supports: tuple[SupportSpan, ...] = field(repr=False)
    scores: Tensor | None = field(repr=False)
    history: tuple[EpochMetrics, ...] = field(repr=False)
    metrics: Mapping[str, float | None]
    plan: Plan = field(repr=False)
    ledger: LedgerSummary
    out: Path | None

    @property
    def noise_multiplier(self) -> float:
        """The noise of the main phase's steps over max_grad_norm."""
        return self.plan.phases[-1].noise_multiplier

    @property
    def outcome(self) -> dict[str, Any]:
        """The keys of the record that were null while the run went on."""
        return {
            "epsilon": self.epsilon,
            "epsilon_spent": self.ledger.epsilon,
            "steps_charged": self.ledger.steps,
            "test_accuracy": self.metrics.get("accuracy"),
            "metrics": self.metrics,
            "k": self.k,
            "active_ratio": self.k / self.d,
            "supports": self.supports,
            "ledger": {"head": self.ledger.head, "length": self.ledger.entries},
        }

    def report(self, out: Path | str | None = None) -> Path:
        """Write the HTML report of this run, which kept a directory, and return its path.

        Args:
            out: the file to write; `report.html` in the run directory if not given.
        """
        import sparsedp  # by its front door: nothing in training knows the reports

        return sparsedp.write_report(self, out)
