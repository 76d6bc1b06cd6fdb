"""What a run gives back."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from torch import Tensor, nn

from sparsedp.core.support import Support
from sparsedp.privacy.plan import Plan
from sparsedp.runs.history import EpochReport, SupportSpan
from sparsedp.runs.record import Outcome


@dataclass(frozen=True, slots=True)
class LedgerSummary:
    """What the ledger says was spent.

    Attributes:
        steps: releases charged, those lost in a crash included.
        planned: releases the plan has.
        epsilon: their cost at the plan's delta; infinite when not private.
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
        delta: the delta of the guarantee; None when not private.
        unit: what the guarantee protects: "row", or the name of the unit given.
        private: False for the ablations without clip or without noise.
        for_release: False when a seed was given: reproducible, not for release.
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
    private: bool
    for_release: bool
    complete: bool
    d: int
    k: int
    support: Support
    supports: tuple[SupportSpan, ...] = field(repr=False)
    scores: Tensor | None = field(repr=False)
    history: tuple[EpochReport, ...] = field(repr=False)
    metrics: Mapping[str, float | None]
    plan: Plan = field(repr=False)
    ledger: LedgerSummary
    out: Path | None

    @property
    def outcome(self) -> Outcome:
        """What the record says of it."""
        return Outcome(
            epsilon=self.epsilon,
            epsilon_spent=self.ledger.epsilon,
            steps_charged=self.ledger.steps,
            metrics=self.metrics,
            k=self.k,
            d=self.d,
            supports=self.supports,
            head=self.ledger.head,
            length=self.ledger.entries,
        )

    def report(self, out: Path | str | None = None, nonprivate: bool = False) -> Path:
        """Write the HTML report of this run, and say where it is; see `sparsedp.write_report`.

        Args:
            out: the file to write; `report.html` in the run directory if not given.
            nonprivate: also show non-private diagnostics, under a banner.
        """
        from sparsedp.report import write_report  # upwards, for convenience alone: see pyproject.toml

        return write_report(self, out, nonprivate)
