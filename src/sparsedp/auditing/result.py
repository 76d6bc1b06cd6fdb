"""What an audit found: numbers for machines, sentences for people, a folder of its own."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, final

from sparsedp._files import read_json, write_json
from sparsedp.errors import DataError, SparseDPError
from sparsedp.runs.verify import Check

FORMAT = 3
"""Audits of earlier formats mixed attacks on the plan with recomposed steps, so they are not shown."""
FILE = "audit.json"
MARK = "NOT-FOR-RELEASE.txt"
WARNING = (
    "Not for release: an audit looks at private records without noise and plants records of its own. Nothing in\n"
    "this folder is covered by the guarantee of the run it audits, and that run was not touched.\n"
)


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class AuditResult:
    """An empirical lower bound on epsilon beside the claim.

    Attributes:
        method: of the plan.
        unit: what is protected.
        delta: of the claim and of every bound.
        claimed_epsilon: what the plan guarantees.
        lower_bound: what an attack on the whole plan achieved, at the confidence. Infinite if some unit's membership
            can be determined with certainty.
        recomposed: single steps as they were measured, composed over the plan by an accountant: the epsilon one would
            have to claim for them. It is no attack on the plan, and more than an attack can show.
        one_step: claim and lower bound for a single step of the phase that leaks most.
        estimates: the bounds the lower bound is the largest of, by estimator.
        confidence: chance that an honest mechanism stays below its claim in this audit.
        canaries: how many were scored.
        steps: of the plan that were run with canaries.
        planned_steps: of the plan.
        dimension: of the model.
        checks: everything tried.
        attacked: in words, every release of the plan and how often it was made with canaries.
        accountant: which composed the measured steps.
        run: the audited run's ledger head, if it was one.
    """

    method: str
    unit: str
    delta: float
    claimed_epsilon: float
    lower_bound: float
    recomposed: float
    one_step: Mapping[str, float]
    estimates: Mapping[str, float]
    confidence: float
    canaries: int
    steps: int
    planned_steps: int
    dimension: int
    checks: tuple[Check, ...]
    attacked: tuple[str, ...]
    accountant: str
    run: str | None = None

    @property
    def passed(self) -> bool:
        """Whether no bound passes its claim and no check found anything."""
        shown = max(self.lower_bound, self.recomposed)
        return shown <= self.claimed_epsilon and all(check.passed for check in self.checks)

    def to_json(self) -> dict[str, Any]:
        """JSON values; an infinite bound is the word."""
        values = {entry.name: getattr(self, entry.name) for entry in fields(self) if entry.name != "checks"}
        checks = [{"what": c.name, "passed": c.passed, "problem": c.problem} for c in self.checks]
        said = {"checks": checks, "summary": self.summary()}
        return {"format": FORMAT, "passed": self.passed, **_plain(values), **said}

    def summary(self) -> list[str]:
        """What was tried, what it shows and what it cannot show, for people who answer for privacy."""
        failed = [check for check in self.checks if not check.passed]
        shown, claimed = max(self.lower_bound, self.recomposed), _number(self.claimed_epsilon)
        if self.passed:
            verdict = (
                "No leak beyond the claim was found: an attack on the whole plan shows epsilon of at least "
                f"{_number(self.lower_bound)}, the plan claims {claimed} per {self.unit}, at delta {self.delta:g}."
            )
        elif failed and shown <= self.claimed_epsilon:
            verdict = "The claim does not stand: something was seen that an honest mechanism never shows."
        else:
            verdict = (
                f"The claim is broken: the audit shows epsilon of at least {_number(shown)}, more than the {claimed} "
                f"claimed per {self.unit}, at delta {self.delta:g}."
            )
        found = self.estimates
        return [
            verdict,
            *(f"{check.name}: {check.problem}." for check in failed),
            f"{self.canaries:,} canaries (planted {self.unit}s with gradients the attacker knows) went through the "
            f"real sampling, clipping and noise, one step at a time and over {self.steps} of the plan's "
            f"{self.planned_steps} steps, on a model of {self.dimension:,} numbers.",
            f"Every release of the plan was attacked by itself: {'; '.join(self.attacked)}.",
            f"The {self.steps} steps attacked in one go show epsilon of at least {_number(found['gdp'])} if scores "
            f"are taken as normally distributed, and {_number(max(found['threshold'], found['guesses']))} if nothing "
            "is taken for granted.",
            f"Single steps, measured and composed over the plan by the accountant {self.accountant}, cost "
            f"{_number(self.recomposed)}: what would have to be claimed for them, and more than an attack can show.",
            f"If everything is as claimed, an audit like this raises an alarm with a chance of at most "
            f"{1 - self.confidence:.3g}.",
            *LIMITATIONS,
        ]


ESTIMATOR_NAMES = {
    "gdp": "scores taken as normal",
    "threshold": "by error rates",
    "guesses": "by guesses of coins",
}
"""The estimates in words."""

LIMITATIONS = (
    "An audit can find a leak; it cannot prove that there is none. A bound below the claim says that these attacks "
    "did no better, not that others could not.",
    "It does not see what happens around training: data copied elsewhere, timing, memory, other runs on the same "
    "data.",
)


def audit_folder(run: Path) -> Path:
    """Where the audit of a run lies: beside it, never in it."""
    path = run.resolve()
    return path.with_name(f"{path.name}-audit")


def check_folder(folder: Path) -> None:
    """Refuse a place that an audit cannot be written to: no folder, or one that holds something else."""
    there = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    if not there.is_dir():
        raise SparseDPError(f"out: {there} is a file, expected a folder or a new name; give another folder")
    if there == folder and any(folder.iterdir()) and not (folder / MARK).is_file():
        raise SparseDPError(f"out: {folder} holds something that is no audit; give another folder")


def save(result: AuditResult, folder: Path) -> Path:
    """Write an audit to a folder of its own, marked as not for release."""
    check_folder(folder)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / MARK).write_text(WARNING)
    write_json(folder / FILE, result.to_json())
    return folder / FILE


def saved_audit(run: Path, head: str | None) -> dict[str, Any] | None:
    """The audit that lies beside a run and was made of it as it is (by its ledger's head); None without one."""
    file = audit_folder(run) / FILE
    try:
        found = read_json(file)
    except DataError:
        return None
    known = isinstance(found, dict) and (found.get("format"), found.get("run")) == (FORMAT, head)
    return found if known and head is not None and {"summary", "passed"} <= found.keys() else None


def _number(value: float) -> str:
    return "any size" if math.isinf(value) else f"{value:.3g}"


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {name: _plain(inner) for name, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(inner) for inner in value]
    return "inf" if isinstance(value, float) and math.isinf(value) else value
