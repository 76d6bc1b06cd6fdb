"""A run as a report reads it: from its folder, or from the result of a run that kept none. Public values only."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, final

from torch import Tensor

from sparsedp.auditing.result import saved_audit
from sparsedp.core.errors import DataError, PrivacyError
from sparsedp.core.files import read_json
from sparsedp.core.layout import Layout
from sparsedp.core.support import Support
from sparsedp.privacy.ledger import FileLedger
from sparsedp.privacy.ledger_record import LedgerRecord
from sparsedp.privacy.plan import Plan
from sparsedp.runs.checkpoint import read_layout
from sparsedp.runs.folder import RunFolder
from sparsedp.runs.history import EpochReport, SupportSpan
from sparsedp.training.result import Result

Record = Mapping[str, Any]
RECORD_FORMAT = 1
WARMUP, WARMUP_FORMAT = "warmup.json", 1


@final
@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Run:
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
        warmup: what `warmup.json` holds; None if the run kept none.
        audit: what an audit of the run as it is found; None without one.
    """

    name: str
    record: Record = field(repr=False)
    plan: Plan = field(repr=False)
    epochs: tuple[EpochReport, ...] = field(repr=False)
    spans: tuple[SupportSpan, ...] = field(repr=False)
    layout: Layout = field(repr=False)
    support: Support
    scores: Tensor | None = field(repr=False)
    ledger: LedgerRecord | None = field(repr=False)
    warmup: Mapping[str, Any] | None = field(default=None, repr=False)
    audit: Mapping[str, Any] | None = field(default=None, repr=False)

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


def read_run(path: Path) -> Run:
    """Everything public about the run in a folder, its ledger verified.

    Raises:
        DataError: there is no run, or one of its files is damaged.
        PrivacyError: the ledger does not verify, or is not the one that checkpoint and record know.
    """
    folder = RunFolder.open(path)
    record, plan, checkpoint = read_record(path), folder.plan(), folder.checkpoint()
    ledger = FileLedger.read(folder.ledger_file)
    _check_ledger(ledger, plan, [checkpoint.state["ledger"], record["ledger"]])
    layout = read_layout(checkpoint.identity["layout"])
    journal = checkpoint.state["journal"]
    return Run(
        name=path.resolve().name,
        record=record,
        plan=plan,
        epochs=folder.metrics(),
        spans=tuple(SupportSpan.from_json(span) for span in journal["spans"]),
        layout=layout,
        support=Support(journal["support"], layout.dimension),
        scores=checkpoint.state["controller"]["tensors"].get("scores"),
        ledger=ledger,
        warmup=_read_warmup(path / WARMUP),
        audit=saved_audit(path, ledger.head),
    )


def run_of(result: Result) -> Run:
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
    return Run(
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


def read_record(path: Path) -> Record:
    """The record of the run in a folder.

    Raises:
        DataError: it is missing, damaged, or of another format.
    """
    record = RunFolder(path).record()
    if not isinstance(record, dict) or record.get("format") != RECORD_FORMAT:
        found = record.get("format") if isinstance(record, dict) else type(record).__name__
        raise DataError(
            f"{path / 'record.json'}: got format {found!r}, expected {RECORD_FORMAT}; "
            "read it with the version of sparsedp that wrote it"
        )
    return record


def find_runs(path: Path) -> list[Path]:
    """The folders of all runs at or below a folder, in order of their names; hidden folders are passed over.

    Raises:
        DataError: there is none.
    """
    found = sorted(
        file.parent
        for file in path.rglob("record.json")
        if not any(part.startswith(".") for part in file.relative_to(path).parts)
    )
    if not found:
        raise DataError(f"{path} holds no run (no record.json at or below it); give the folder of a run")
    return found


def _read_warmup(file: Path) -> Mapping[str, Any] | None:
    if not file.is_file():
        return None
    content = read_json(file)
    if not isinstance(content, dict) or content.get("format") != WARMUP_FORMAT:
        raise DataError(f"{file}: expected format {WARMUP_FORMAT}; read it with the sparsedp that wrote it")
    return content


def _check_ledger(ledger: LedgerRecord, plan: Plan, known: Iterable[Mapping[str, Any] | None]) -> None:
    if ledger.plan != plan.fingerprint:
        raise PrivacyError("the ledger belongs to another plan than plan.json; files of two runs were mixed")
    for place in known:
        if place is not None:
            ledger.expect(place["head"], place["length"])
