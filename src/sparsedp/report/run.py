"""A run as a report reads it: from its folder, or from the result of a run that kept none. Public values only."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, final

from torch import Tensor

from sparsedp.auditing.result import saved_audit
from sparsedp.parameters import Layout, Support
from sparsedp.privacy.ledger import VerifiedLedger
from sparsedp.privacy.plan import Plan
from sparsedp.results import Result
from sparsedp.runs.record import EpochMetrics, SupportSpan
from sparsedp.runs.run import Run
from sparsedp.runs.verify import verify

Record = Mapping[str, Any]


@final
@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ReportedRun:
    """One run.

    Attributes:
        name: its folder's name, or "this run".
        record: what `record.json` holds; without a folder, the part of it a result knows.
        plan: what was planned.
        epochs: one report per epoch so far.
        spans: its supports, in order.
        layout: names and shapes of the trainable parameters.
        support: the last one.
        scores: what the last ranking was made from; None for dense and random methods.
        ledger: the verified ledger; None without a folder.
        warmup: what the warm-up showed; None if the run kept nothing of it.
        audit: what an audit of the run as it is found; None without one.
        problems: what does not fit in its files, in words.
    """

    name: str
    record: Record = field(repr=False)
    plan: Plan = field(repr=False)
    epochs: tuple[EpochMetrics, ...] = field(repr=False)
    spans: tuple[SupportSpan, ...] = field(repr=False)
    layout: Layout = field(repr=False)
    support: Support
    scores: Tensor | None = field(repr=False)
    ledger: VerifiedLedger | None = field(repr=False)
    warmup: Mapping[str, Any] | None = field(default=None, repr=False)
    audit: Mapping[str, Any] | None = field(default=None, repr=False)
    problems: tuple[str, ...] = ()

    @property
    def metrics(self) -> Mapping[str, float | None]:
        """The last evaluation on held-out data."""
        final = self.record.get("metrics")
        return final if final else (self.epochs[-1].metrics if self.epochs else {})

    @property
    def title(self) -> str:
        """Method, data set and variant."""
        return title_of(self.record)

    @property
    def seeded(self) -> bool:
        """Whether its noise can be computed again."""
        return self.record["seed"] is not None or (self.plan.is_private and not self.record["for_release"])

    @property
    def complete(self) -> bool:
        """Whether every planned step was taken or counted."""
        return bool(self.record["status"] == "finished")


def title_of(record: Record) -> str:
    """Method, data set and variant in a line."""
    data = f" on {record['dataset']}" if record["dataset"] else ""
    variant = f" ({record['variant']})" if record["variant"] else ""
    return f"{record['method']}{data}{variant}"


def read_run(path: Path) -> ReportedRun:
    """Everything public about the run in a folder, its ledger verified, and what else of it does not fit.

    Raises:
        DataError: there is no run, or one of its files is damaged.
        PrivacyError: the ledger does not verify, or is not the one that checkpoint and record know.
    """
    run = Run.open(path)
    run.check_ledger()
    return ReportedRun(
        name=run.name,
        record=run.record,
        plan=run.plan,
        epochs=run.epochs,
        spans=run.spans,
        layout=run.layout,
        support=run.support,
        scores=run.scores,
        ledger=run.ledger,
        warmup=_warmup(run),
        audit=saved_audit(path, run.ledger.head),
        problems=verify(path, independent=False).reasons,
    )


def run_of(result: Result) -> ReportedRun:
    """The run behind a result that kept no folder."""
    plan = result.plan
    record = {
        "status": "finished" if result.complete else "stopped",
        "dataset": None,
        "model": type(result.model).__name__,
        "method": result.method,
        "variant": None,
        "seed": None,
        "for_release": result.for_release,
        "private": result.private,
        "epsilon": result.epsilon,
        "epsilon_spent": result.ledger.epsilon,
        "steps_charged": result.ledger.steps,
        "metrics": dict(result.metrics),
        "settings": None,
        "versions": None,
    }
    return ReportedRun(
        name="this run",
        record=record,
        plan=plan,
        epochs=result.history,
        spans=result.supports,
        layout=Layout.of(result.model),
        support=result.support,
        scores=result.scores,
        ledger=None,
    )


def _warmup(run: Run) -> Mapping[str, Any] | None:
    from sparsedp.diagnostics import summarize_warmup  # SciPy, which takes a while to load

    return summarize_warmup(run)
