"""Checking a run: the ledger alone says what was spent, and every claim of every other file must follow from it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar, final

from sparsedp.errors import DataError, SparseDPError
from sparsedp.privacy.ledger import VerifiedLedger
from sparsedp.privacy.plan import Plan
from sparsedp.runs import checks as claims
from sparsedp.runs.checks import Check
from sparsedp.runs.documents import digest_of, is_canonical_metrics, is_canonical_plan, is_canonical_record
from sparsedp.runs.folder import CHECKPOINT, LEDGER, METRICS, PLAN, RECORD, RunFolder, holds_run
from sparsedp.runs.independent import independent_epsilons
from sparsedp.runs.reader import Run
from sparsedp.runs.record import Record

T = TypeVar("T")

AS_GIVEN = ("dataset", "model", "variant", "schema", "checksum", "config", "versions")
"""Claims of a record that follow from no other file."""
TIMING = f"{RECORD}: timing (it may depend on the data, so not even a hash is made from it)"


@final
@dataclass(frozen=True, slots=True)
class Verification:
    """What a run's files say.

    Attributes:
        path: the run's folder.
        checks: everything looked at, in order.
        bound: claims that nothing can compute again, but that the ledger's chain shows to be as the run wrote them.
        not_checked: what nothing was compared with.
        epsilons: of the ledger, by independent accountants; empty when it is not private or cannot be read.
        ledger: the verified ledger.
        plan: the plan, if it can be read.
        record: the record, if it can be read.
    """

    path: Path
    checks: tuple[Check, ...]
    bound: tuple[str, ...]
    not_checked: tuple[str, ...]
    epsilons: Mapping[str, float]
    ledger: VerifiedLedger | None = field(repr=False)
    plan: Plan | None = field(repr=False)
    record: Record | None = field(repr=False)

    @property
    def passed(self) -> bool:
        """Whether everything fits."""
        return all(check.passed for check in self.checks)

    @property
    def reasons(self) -> tuple[str, ...]:
        """What does not fit, in words."""
        return tuple(f"{check.what}: {check.problem}" for check in self.checks if not check.passed)


def verify(path: Path | str, *, independent: bool = True) -> Verification:
    """Read all of a run's files and compare every claim with what the plan, the ledger and the checkpoint imply.

    Args:
        path: the folder of a run.
        independent: also count epsilon by accountants that share no code with the plan's; takes seconds.

    **Privacy.** It shows files that do not agree, or were changed after the run wrote them. All of them rewritten
    together, or a copied run continued twice, no file can show.
    **Edge cases.** The run of an older format fails: its ledger and plan are not read.

    Raises:
        DataError: there is no run.
    """
    folder = RunFolder(Path(path))
    if not holds_run(folder.path):
        raise DataError(f"{folder.path} holds no run (no {LEDGER} and no {PLAN})")
    run, checks = Run(folder), _Checks()
    ledger = checks.read("the ledger's hash chain", lambda: run.ledger)
    plan = checks.read("the plan can be read", lambda: run.plan)
    checkpoint = checks.read("the checkpoint's checksum", lambda: run.checkpoint)
    record = checks.read("the record can be read", lambda: run.record)
    epochs = checks.read("the metrics can be read", lambda: run.epochs)
    checks.canonical(folder)
    epsilons: Mapping[str, float] = {}
    if ledger is not None:
        if independent:
            epsilons = checks.read("independent accountants", lambda: independent_epsilons(ledger)) or {}
        checks.bound(folder, ledger)
        if plan is not None:
            checks.add("plan and ledger", lambda: claims.plan_and_ledger(plan, ledger, epsilons))
        if checkpoint is not None:
            checks.add("checkpoint and ledger", lambda: claims.checkpoint_and_ledger(checkpoint, ledger))
    if ledger is not None and plan is not None and checkpoint is not None:
        checks.add("checkpoint and plan", lambda: claims.checkpoint_and_plan(checkpoint, plan))
        if epochs is not None:
            checks.add("metrics", lambda: claims.metrics_and_rest(epochs, checkpoint, plan, ledger))
        if record is not None:
            checks.add("record", lambda: claims.record_and_rest(record, checkpoint, plan, ledger, epochs))
    bound, unchecked = _beyond(folder, ledger is not None)
    return Verification(folder.path, tuple(checks.done), bound, unchecked, epsilons, ledger, plan, record)


@final
class _Checks:
    """Checks as they are made: whatever one stumbles over is what does not fit, never a traceback."""

    def __init__(self) -> None:
        self.done: list[Check] = []

    def read(self, what: str, read: Callable[[], T]) -> T | None:
        """What can be read, or a check that says why not."""
        try:
            found = read()
        except (SparseDPError, OSError) as error:
            self.done.append(Check(what, str(error)))
            return None
        except Exception as error:
            self.done.append(Check(what, f"it is damaged ({type(error).__name__}: {error})"))
            return None
        self.done.append(Check(what))
        return found

    def add(self, what: str, make: Callable[[], Iterable[Check]]) -> None:
        """Some checks of files that were read."""
        try:
            self.done += make()
        except Exception as error:
            self.done.append(Check(what, f"cannot be compared ({type(error).__name__}: {error})"))

    def canonical(self, folder: RunFolder) -> None:
        """Each JSON file is the one text of its value, so nothing else can be read from it."""
        for file, is_canonical in (
            (folder.plan_file, is_canonical_plan),
            (folder.record_file, is_canonical_record),
            (folder.metrics_file, is_canonical_metrics),
        ):
            what = f"{file.name} is in canonical form"
            try:
                fits = is_canonical(file.read_bytes())
            except Exception as error:
                self.done.append(Check(what, f"{type(error).__name__}: {error}"))
                continue
            self.done.append(
                Check(what, None if fits else "this library did not write it so; restore the file")
            )

    def bound(self, folder: RunFolder, ledger: VerifiedLedger) -> None:
        """Each file is the one that the ledger's chain knows."""
        for name in (CHECKPOINT, METRICS, RECORD):
            what = f"{name} is as the run wrote it, by the ledger"
            try:
                known = digest_of(name, (folder.path / name).read_bytes()) in ledger.known(name)
            except Exception as error:
                self.done.append(Check(what, f"{type(error).__name__}: {error}"))
                continue
            problem = (
                "its SHA-256 is not the one in the ledger: one of them was changed afterwards; restore them"
            )
            self.done.append(Check(what, None if known else problem))


def _beyond(folder: RunFolder, chained: bool) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """What was not computed again: bound by the chain, and not looked at at all."""
    ours = {PLAN, LEDGER, CHECKPOINT, METRICS, RECORD}
    others = sorted(
        file.relative_to(folder.path).as_posix()
        for file in folder.path.rglob("*")
        if file.is_file() and file.relative_to(folder.path).as_posix() not in ours
    )
    claimed = (
        f"{LEDGER}: created",
        *(f"{RECORD}: {name}" for name in AS_GIVEN),
        f"{RECORD}: metrics of a run that ended inside an epoch",
        f"{METRICS}: learning_rate, metrics",
        f"{CHECKPOINT}: weights, optimizer, scheduler, average, scores, and which coordinates are active",
    )
    return (claimed, (TIMING, *others)) if chained else ((), (*claimed, TIMING, *others))
