"""Checking a run: the ledger alone says what was spent; everything else must agree with it."""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sparsedp.core.errors import SparseDPError
from sparsedp.core.ratio import exact_ratio
from sparsedp.methods import AUTO, Granularity
from sparsedp.methods.schedules import active_count
from sparsedp.privacy import FileLedger, LedgerRecord, Plan, accountant, accountant_for
from sparsedp.privacy.quiet import quiet
from sparsedp.runs.checkpoint import Checkpoint, read_checkpoint
from sparsedp.runs.folder import RunFolder

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


@dataclass(frozen=True, slots=True)
class Verification:
    """What a run's files say.

    Attributes:
        checks: everything looked at, in order.
        epsilons: of the ledger, by independent accountants; empty when it is not private or cannot be read.
        ledger: the verified ledger.
        plan: the plan, if it can be read.
        record: the record, if it can be read.
    """

    checks: tuple[Check, ...]
    epsilons: Mapping[str, float]
    ledger: LedgerRecord | None
    plan: Plan | None
    record: Mapping[str, Any] | None

    @property
    def passed(self) -> bool:
        """Whether everything fits."""
        return all(check.passed for check in self.checks)


def verify_run(path: Path) -> Verification:
    """Read a run's files and compare them with each other and with the ledger."""
    folder = RunFolder(path)
    checks: list[Check] = []
    ledger = _try(checks, "the ledger's hash chain", lambda: FileLedger.read(folder.ledger_file))
    plan = _try(checks, "the plan can be read", folder.plan)
    checkpoint = _try(checks, "the checkpoint's checksum", lambda: read_checkpoint(folder.checkpoint_file))
    record = _try(checks, "the record can be read", folder.record)
    epsilons: dict[str, float] = {}
    if ledger is not None:
        epsilons = independent_epsilons(ledger)
        checks += _against_plan(ledger, plan, epsilons) if plan is not None else []
        checks += _against_checkpoint(ledger, plan, checkpoint) if checkpoint is not None else []
        checks += _against_record(ledger, plan, record, epsilons) if isinstance(record, dict) else []
        if checkpoint is not None and isinstance(record, dict):
            checks += _checkpoint_and_record(checkpoint, record)
    return Verification(tuple(checks), epsilons, ledger, plan, record)


def independent_epsilons(ledger: LedgerRecord) -> dict[str, float]:
    """Epsilon of everything charged, by accountants that share no code with the one that planned.

    `dp_accounting`'s own PLD and RDP accountants, and Opacus's two where it is installed.
    """
    import dp_accounting as dp

    if ledger.delta is None or any(block.noise_multiplier == 0 for block in ledger.blocks):
        return {}
    with quiet():
        made = {"PLD (dp-accounting)": dp.pld.PLDAccountant(), "RDP (dp-accounting)": dp.rdp.RdpAccountant()}
        found = {
            name: float(one.compose(ledger.event()).get_epsilon(ledger.delta)) for name, one in made.items()
        }
    return {**found, **_by_opacus(ledger, ledger.delta)}


def _by_opacus(ledger: LedgerRecord, delta: float) -> dict[str, float]:
    if importlib.util.find_spec("opacus") is None:
        return {}
    import warnings

    from opacus.accountants import PRVAccountant, RDPAccountant

    history = [(block.noise_multiplier, block.sampling_rate, block.steps) for block in ledger.blocks]
    found = {}
    for name, made in (("RDP (Opacus)", RDPAccountant()), ("PRV (Opacus)", PRVAccountant())):
        made.history = _merged(history)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            found[name] = float(made.get_epsilon(delta)) if history else 0.0
    return found


def _merged(history: list[tuple[float, float, int]]) -> list[tuple[float, float, int]]:
    steps: dict[tuple[float, float], int] = {}
    for noise, rate, count in history:
        steps[noise, rate] = steps.get((noise, rate), 0) + count
    return [(noise, rate, count) for (noise, rate), count in steps.items()]


def _try(checks: list[Check], what: str, read: Callable[[], Any]) -> Any:
    try:
        found = read()
    except (SparseDPError, OSError) as error:
        checks.append(Check(what, str(error)))
        return None
    checks.append(Check(what))
    return found


def _against_plan(ledger: LedgerRecord, plan: Plan, epsilons: Mapping[str, float]) -> list[Check]:
    names = [(phase.name, phase.steps, phase.sampling_rate, phase.noise_multiplier) for phase in plan.phases]
    opened = [
        (block.phase, block.steps, block.sampling_rate, block.noise_multiplier) for block in ledger.planned
    ]
    checks = [
        _equal("the ledger was opened for this plan", ledger.plan, plan.fingerprint),
        _equal("the plan's phases, rates and noise are the ledger's", names, opened),
        _equal("delta", plan.delta, ledger.delta),
        _equal("the unit of privacy", (plan.unit, plan.units), (ledger.unit, ledger.units)),
    ]
    if plan.target_epsilon is not None and epsilons:
        own = accountant_for(plan).epsilon(ledger.event(), plan.delta or 0.0)
        checks.append(_at_most("epsilon spent is within the target", own, plan.target_epsilon))
        tightest = epsilons["PLD (dp-accounting)"]
        checks.append(
            _at_most(
                "an independent accountant agrees that it is", tightest, plan.target_epsilon * (1 + TOLERANCE)
            )
        )
    return checks


def _against_checkpoint(ledger: LedgerRecord, plan: Plan | None, checkpoint: Checkpoint) -> list[Check]:
    """The checkpoint's place in the ledger, its plan, and its support against what the ledger allows."""
    place = checkpoint.state["ledger"]
    problem = None
    try:
        ledger.expect(place["head"], place["length"])
    except SparseDPError as error:
        problem = str(error)
    checks = [
        Check("the ledger goes on from where the checkpoint knew it", problem),
        _at_most("the checkpoint's steps were all paid for", checkpoint.step, ledger.charged),
        _equal("the checkpoint's plan is the ledger's", checkpoint.identity["plan"], ledger.plan),
    ]
    if plan is not None:
        checks.append(_support(checkpoint, plan))
    return checks


def _support(checkpoint: Checkpoint, plan: Plan) -> Check:
    """The support is of this model's coordinates, and is what the journal and the plan's phase say."""
    what = "the checkpoint's support fits the plan"
    dimension = sum(math.prod(shape) for _, shape in checkpoint.identity["layout"])
    journal = checkpoint.state["journal"]
    support, spans = journal["support"], journal["spans"]
    if support.numel() and not 0 <= int(support.min()) <= int(support.max()) < dimension:
        return Check(what, f"an active coordinate lies outside the model's {dimension}")
    if spans and spans[-1]["active"] != support.numel():
        return Check(what, f"it has {support.numel()} coordinates, its journal says {spans[-1]['active']}")
    for span in spans:
        phase = plan.phase_at(span["step"])
        expected = _planned_size(phase.support.plain(), dimension)
        if expected is not None and span["active"] != expected:
            return Check(
                what,
                f"in phase {phase.name} {span['active']} coordinates were active, its rule says {expected}",
            )
    return Check(what)


def _planned_size(rule: Mapping[str, Any], dimension: int) -> int | None:
    """How many coordinates a support rule keeps, where that follows from the rule alone."""
    if rule["rule"] == "full":
        return dimension
    fixed = rule["schedule"]["name"] == "constant" and rule["granularity"] == Granularity.COORDINATES.value
    if not fixed or rule["active_ratio"] == AUTO:
        return None
    return active_count(exact_ratio(rule["active_ratio"]), dimension)


def _against_record(
    ledger: LedgerRecord, plan: Plan | None, record: Mapping[str, Any], epsilons: Mapping[str, float]
) -> list[Check]:
    checks = [
        _equal("the record's plan is the ledger's", record.get("plan"), ledger.plan),
        _equal("the record's delta", record.get("delta"), ledger.delta),
        _equal("the record's unit", (record.get("unit"), record.get("units")), (ledger.unit, ledger.units)),
    ]
    if plan is not None:
        checks.append(
            _equal("the record's target epsilon", record.get("target_epsilon"), plan.target_epsilon)
        )
        checks.append(_equal("the record says whether it is private", record.get("private"), plan.is_private))
    known = record.get("ledger")
    if record.get("status") == "running" or known is None:
        return checks
    checks += [
        _equal("the record's ledger head", (known["head"], known["length"]), (ledger.head, ledger.length)),
        _equal("the record's count of steps charged", record.get("steps_charged"), ledger.charged),
    ]
    if epsilons and plan is not None and ledger.delta is not None:
        name = plan.accountant or "pld"
        counted = accountant_for(plan) if name == plan.accountant else accountant(name)
        again = counted.epsilon(ledger.event(), ledger.delta)
        stated = record.get("epsilon_spent")
        fits = isinstance(stated, float) and math.isclose(stated, again, rel_tol=1e-6)
        checks.append(
            Check(
                "the record's epsilon spent",
                None if fits else f"it says {stated}, the ledger amounts to {again:.6g}",
            )
        )
    return checks


def _checkpoint_and_record(checkpoint: Checkpoint, record: Mapping[str, Any]) -> list[Check]:
    dimension = sum(math.prod(shape) for _, shape in checkpoint.identity["layout"])
    return [
        _equal("the record's number of parameters", record.get("d"), dimension),
        _equal("the record's seed", record.get("seed"), checkpoint.identity["seed"]),
    ]


def _equal(what: str, found: object, expected: object) -> Check:
    return Check(what, None if found == expected else f"got {found!r}, expected {expected!r}")


def _at_most(what: str, found: float, limit: float) -> Check:
    return Check(what, None if found <= limit else f"got {found:.6g}, expected at most {limit:.6g}")
