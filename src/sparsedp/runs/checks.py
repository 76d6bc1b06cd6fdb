"""A run's claims, computed again: each check compares one with what plan, ledger and checkpoint imply."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from sparsedp._validate import exact_ratio
from sparsedp.errors import SparseDPError
from sparsedp.methods import Granularity
from sparsedp.methods.schedules import active_count
from sparsedp.privacy.accounting import accountant_for, epsilon_by_epoch
from sparsedp.privacy.ledger import PaidSteps, VerifiedLedger
from sparsedp.privacy.mechanism import NOISE
from sparsedp.privacy.plan import Plan, Spend, merged
from sparsedp.runs.checkpoint import Checkpoint
from sparsedp.runs.history import EpochReport
from sparsedp.runs.identity import alike, setup_names
from sparsedp.runs.independent import TIGHTEST
from sparsedp.runs.record import FINISHED, FORMAT, OUTCOME, RUNNING, STOPPED, Record

TOLERANCE = 0.01
"""How far apart two accountants that bound the same number by privacy loss distributions may be."""


@dataclass(frozen=True, slots=True)
class Check:
    """One thing that was looked at; `problem` says what does not fit."""

    what: str
    problem: str | None = None

    @property
    def passed(self) -> bool:
        """Whether it fits."""
        return self.problem is None


def plan_and_ledger(plan: Plan, ledger: VerifiedLedger, epsilons: Mapping[str, float]) -> Iterator[Check]:
    """The ledger was opened for this plan, and holds no more than it allows."""
    phases = [(phase.name, phase.steps, phase.sampling_rate, phase.noise_multiplier) for phase in plan.phases]
    opened = [
        (block.phase, block.steps, block.sampling_rate, block.noise_multiplier) for block in ledger.planned
    ]
    yield _equal("the ledger was opened for this plan", ledger.plan, plan.fingerprint)
    yield _equal("the plan's phases, rates and noise are the ledger's", phases, opened)
    yield _equal("delta", plan.delta, ledger.delta)
    yield _equal("the unit of privacy", (plan.unit, plan.units), (ledger.unit, ledger.units))
    yield _equal("the ledger's blocks", ledger.block, max(1, plan.total_steps // 100))
    if plan.target_epsilon is not None:
        spent = _epsilon_of(plan, ledger.blocks)
        yield _at_most("epsilon spent is within the target", spent or 0.0, plan.target_epsilon)
        if epsilons:
            limit = plan.target_epsilon * (1 + TOLERANCE)
            yield _at_most("an independent accountant agrees that it is", epsilons[TIGHTEST], limit)


def checkpoint_and_ledger(checkpoint: Checkpoint, ledger: VerifiedLedger) -> Iterator[Check]:
    """The checkpoint's place in the ledger, and its plan."""
    place = checkpoint.state["ledger"]
    problem = None
    try:
        ledger.expect(place["head"], place["length"])
    except SparseDPError as error:
        problem = str(error)
    yield Check("the ledger goes on from where the checkpoint knew it", problem)
    yield _at_most("the checkpoint's steps were all paid for", checkpoint.step, ledger.charged)
    yield _equal("the checkpoint's plan is the ledger's", checkpoint.identity["plan"], ledger.plan)


def checkpoint_and_plan(checkpoint: Checkpoint, plan: Plan) -> Iterator[Check]:
    """The support is of this model's coordinates, and is what the journal and the plan's phases say."""
    what = "the checkpoint's support fits the plan"
    dimension = dimension_of(checkpoint)
    journal = checkpoint.state["journal"]
    support, spans = journal["support"], journal["spans"]
    yield _equal("the checkpoint's method is the plan's", checkpoint.identity["method"]["name"], plan.method)
    if support.numel() and not 0 <= int(support.min()) <= int(support.max()) < dimension:
        yield Check(what, f"an active coordinate lies outside the model's {dimension}")
        return
    if spans and spans[-1]["active"] != support.numel():
        yield Check(what, f"it has {support.numel()} coordinates, its journal says {spans[-1]['active']}")
        return
    for span in spans:
        phase = plan.phase_at(span["step"])
        expected = _planned_size(phase.support.plain(), dimension)
        if (
            sum(span["by_parameter"].values()) != span["active"]
            or (expected or span["active"]) != span["active"]
        ):
            yield Check(
                what,
                f"in phase {phase.name} {span['active']} coordinates were active, its rule says {expected}",
            )
            return
    yield Check(what)


def metrics_and_rest(
    epochs: Sequence[EpochReport], checkpoint: Checkpoint, plan: Plan, ledger: VerifiedLedger
) -> Iterator[Check]:
    """Every line of the metrics: its numbers are the plan's, and the checkpoint has the same lines."""
    saved = [EpochReport.from_json(value) for value in checkpoint.state["journal"]["epochs"]]
    found = [report.to_json() for report in epochs]
    kept = [report.to_json() for report in saved]
    yield Check(
        "the metrics go on from where the checkpoint knew them",
        None if alike(found[: len(kept)], kept) else "its epochs are not those of the checkpoint",
    )
    ends, costs, spans = plan.epoch_ends(), _by_epoch(plan), checkpoint.state["journal"]["spans"]
    problem = None
    for before, report in zip([None, *epochs], epochs, strict=False):
        problem = problem or _line_problem(report, before, plan, ends, costs)
        if report in saved:
            active = [span["active"] for span in spans if span["step"] < report.step]
            if (
                not active
                or report.active != active[-1]
                or _ratio(report.active, checkpoint) != report.active_ratio
            ):
                problem = problem or f"epoch {report.epoch}: {report.active} active coordinates"
        elif report.step > ledger.charged:
            problem = problem or f"epoch {report.epoch} ends at step {report.step}, which was not paid for"
    yield Check("the metrics' steps, phases, epsilons and supports", problem)


def _line_problem(
    report: EpochReport,
    before: EpochReport | None,
    plan: Plan,
    ends: Sequence[int],
    costs: Sequence[float | None],
) -> str | None:
    if not 1 <= report.epoch <= len(ends) or (before is not None and report.epoch <= before.epoch):
        return f"epoch {report.epoch} is out of order"
    if report.step != ends[report.epoch - 1]:
        return f"epoch {report.epoch} ends at step {report.step}, the plan says {ends[report.epoch - 1]}"
    if report.phase != plan.phase_at(report.step - 1).name:
        return f"epoch {report.epoch} is in phase {report.phase!r}"
    cost = costs[report.epoch - 1]
    if not _bounds(report.epsilon, cost, plan):
        return f"epoch {report.epoch} says epsilon {report.epsilon}, the plan amounts to {cost}"
    return None


def record_and_rest(
    record: Record,
    checkpoint: Checkpoint,
    plan: Plan,
    ledger: VerifiedLedger,
    epochs: Sequence[EpochReport] | None,
) -> Iterator[Check]:
    """Every claim of the record that follows from the other files."""
    values: Mapping[str, Any] = record
    for name, expected in _stated(checkpoint, plan, ledger).items():
        yield _equal(f"the record's {name}", values[name], expected)
    identity, settings = checkpoint.identity, record["settings"]
    same = {name: settings.get(name) for name in ("method", *setup_names(identity))}
    yield _equal("the record's settings", same, {name: identity[name] for name in same})
    if record["status"] == RUNNING:
        known = [name for name in OUTCOME if values[name] is not None]
        problem = f"it says running, and knows {known} already" if known else None
        yield Check("the record's status", problem)
        return
    yield from _outcome(record, checkpoint, plan, ledger, epochs)


def _stated(checkpoint: Checkpoint, plan: Plan, ledger: VerifiedLedger) -> dict[str, object]:
    """What a record says from the first moment on."""
    seed = checkpoint.identity["seed"]
    return {
        "format": FORMAT,
        "method": plan.method,
        "seed": seed,
        "public_seed": checkpoint.identity["public_seed"],
        "for_release": seed is None and plan.is_private,
        "private": plan.is_private,
        "noise": NOISE if plan.is_private else None,
        "target_epsilon": plan.target_epsilon,
        "delta": plan.delta,
        "accountant": plan.accountant,
        "unit": plan.unit,
        "units": plan.units,
        "d": dimension_of(checkpoint),
        "batch_size": plan.expected_batch_size(plan.training[0]),
        "epochs": len(plan.epoch_ends()),
        "steps": plan.total_steps,
        "plan": ledger.plan,
    }


def _outcome(
    record: Record,
    checkpoint: Checkpoint,
    plan: Plan,
    ledger: VerifiedLedger,
    epochs: Sequence[EpochReport] | None,
) -> Iterator[Check]:
    """What a record says when the run has stopped or ended."""
    complete = checkpoint.step >= plan.total_steps
    allowed = (STOPPED, FINISHED) if complete else (STOPPED,)
    problem = None if record["status"] in allowed else f"it says {record['status']!r}, expected {allowed}"
    yield Check("the record's status", problem)
    place, problem = record["ledger"], None
    try:
        if place is None:
            raise SparseDPError("it names no place in the ledger")
        ledger.expect(place["head"], place["length"])
    except SparseDPError as error:
        problem = str(error)
    yield Check("the record's ledger head", problem)
    yield _equal("the record's steps_charged", record["steps_charged"], ledger.charged)
    yield _epsilon("the record's epsilon", record["epsilon"], _epsilon_of(plan, ledger.planned), plan)
    spent = _epsilon_of(plan, ledger.blocks)
    yield _epsilon("the record's epsilon_spent", record["epsilon_spent"], spent, plan)
    journal = checkpoint.state["journal"]
    size = journal["support"].numel()
    yield _equal("the record's k", record["k"], size)
    yield _equal("the record's active_ratio", record["active_ratio"], _ratio(size, checkpoint))
    yield _equal("the record's supports", record["supports"], journal["spans"])
    metrics = record["metrics"] or {}
    yield _equal("the record's test_accuracy", record["test_accuracy"], metrics.get("accuracy"))
    if epochs and (epochs[-1].step == checkpoint.step or record["status"] == STOPPED):
        yield _equal("the record's metrics", record["metrics"], dict(epochs[-1].metrics))


def dimension_of(checkpoint: Checkpoint) -> int:
    """The number of trainable scalars."""
    return sum(math.prod(shape) for _, shape in checkpoint.identity["layout"])


def _ratio(size: int, checkpoint: Checkpoint) -> float:
    return size / dimension_of(checkpoint)


def _planned_size(rule: Mapping[str, Any], dimension: int) -> int | None:
    """How many coordinates a support rule keeps, where that follows from the rule alone."""
    if rule["rule"] == "full":
        return dimension
    if "scope" in rule or "always" in rule or "schedule" not in rule:
        return None
    fixed = rule["schedule"]["name"] == "constant" and rule["granularity"] == Granularity.COORDINATES.value
    if not fixed:
        return None
    return active_count(exact_ratio(rule["active_ratio"]), dimension)


@lru_cache(maxsize=256)
def _epsilon_of(plan: Plan, blocks: tuple[PaidSteps, ...]) -> float | None:
    """What some steps of a plan cost by its own accountant; None when it is not private."""
    if not plan.is_private or plan.delta is None:
        return None
    spends = (Spend(block.sampling_rate, block.noise_multiplier, block.steps) for block in blocks)
    return accountant_for(plan).epsilon(merged(spends), plan.delta)


@lru_cache(maxsize=64)
def _by_epoch(plan: Plan) -> tuple[float | None, ...]:
    if not plan.is_private or plan.delta is None:
        return (None,) * len(plan.epoch_ends())
    return epsilon_by_epoch(plan)


def _bounds(stated: float | None, cost: float | None, plan: Plan) -> bool:
    """Whether a stated epsilon bounds what is computed now: an older accountant may be looser, never tighter."""
    if stated is None or cost is None:
        return stated is cost
    return cost * (1 - 1e-6) <= stated <= max(cost * (1 + 1e-6), plan.target_epsilon or 0.0)


def _epsilon(what: str, stated: float | None, cost: float | None, plan: Plan) -> Check:
    return Check(
        what, None if _bounds(stated, cost, plan) else f"it says {stated}, the ledger amounts to {cost}"
    )


def _equal(what: str, found: object, expected: object) -> Check:
    return Check(what, None if alike(found, expected) else f"got {found!r}, expected {expected!r}")


def _at_most(what: str, found: float, limit: float) -> Check:
    return Check(what, None if found <= limit else f"got {found:.6g}, expected at most {limit:.6g}")
