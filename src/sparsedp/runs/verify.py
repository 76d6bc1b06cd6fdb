"""Verifying a run: the ledger alone says what was spent, and what a reader would quote must follow from it."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any, TypeVar, final

from sparsedp._files import readable_json
from sparsedp._serialization import json_equal
from sparsedp.errors import DataError, SparseDPError
from sparsedp.privacy.accounting import epsilon_by_epoch, plan_accountant, silence_dp_accounting
from sparsedp.privacy.ledger import ChargeBlock, LedgerState
from sparsedp.privacy.plan import Plan, SampledGaussian, dp_event, merge_events
from sparsedp.runs.checkpoint import Checkpoint, setup_names
from sparsedp.runs.directory import CHECKPOINT, LEDGER, METRICS, PLAN, RECORD, digest_of, holds_run
from sparsedp.runs.record import (
    FINISHED,
    FORMAT,
    OUTCOME,
    RUNNING,
    STOPPED,
    EpochMetrics,
    LedgerPlace,
    RunRecord,
    epochs_json,
    metrics_bytes,
    plan_bytes,
    stated,
)
from sparsedp.runs.run import Run

T = TypeVar("T")

TIGHTEST = "PLD (dp-accounting)"
TOLERANCE = 0.01
"""How far apart two accountants that bound the same number by privacy loss distributions may be."""
UNCHECKED = (
    f"{LEDGER}: created (as the run wrote it)",
    *(
        f"{RECORD}: {name} (as the run wrote it)"
        for name in ("dataset", "model", "variant", "schema", "checksum", "config", "versions")
    ),
    f"{RECORD}: metrics of a run that ended inside an epoch (as the run wrote them)",
    f"{METRICS}: learning_rate, metrics (as the run wrote them, and as its checkpoint has them)",
    f"{CHECKPOINT}: values of weights, optimizer, scores and support (as the run wrote them)",
    f"{RECORD}: timing (it may depend on the data, so not even a hash is made from it)",
)
"""What nothing computes again. "As the run wrote it": the file's digest is in the ledger's chain."""


@dataclass(frozen=True, slots=True)
class Check:
    """One thing that was compared; `problem` says what does not fit."""

    name: str
    problem: str | None = None

    @property
    def passed(self) -> bool:
        """Whether it fits."""
        return self.problem is None


@final
@dataclass(frozen=True, slots=True)
class Verification:
    """What a run's files say.

    Attributes:
        path: the run's directory.
        checks: everything compared, in order.
        unchecked: every claim and every file that nothing was compared with, or only with its own digest.
        epsilons: of the ledger, by other accountants; empty when it is not private or cannot be read.
        ledger, plan, record: those that can be read.
    """

    path: Path
    checks: tuple[Check, ...]
    unchecked: tuple[str, ...]
    epsilons: Mapping[str, float]
    ledger: LedgerState | None = field(repr=False)
    plan: Plan | None = field(repr=False)
    record: RunRecord | None = field(repr=False)

    @property
    def passed(self) -> bool:
        """Whether everything fits."""
        return all(check.passed for check in self.checks)

    @property
    def reasons(self) -> tuple[str, ...]:
        """What does not fit, in words."""
        return tuple(f"{check.name}: {check.problem}" for check in self.checks if not check.passed)


def verify(path: Path | str, *, independent: bool = True) -> Verification:
    """Compare what a run's files claim with its ledger: epsilon, delta, unit, N, steps, method, status, digests.

    Args:
        path: the directory of a run.
        independent: also compute epsilon by other accountants (`other_epsilons`); takes seconds.

    Formal guarantees: It shows files that do not agree, or were changed after the run wrote them. The chain has no
    key: somebody who writes all files anew, ledger included, or continues two copies of a run, is not found out.
    """
    path = Path(path)
    if not holds_run(path):
        raise DataError(f"{path} holds no run (no {LEDGER} and no {PLAN})")
    run, checks = Run(path), _Checks()
    ledger = checks.read("the ledger's hash chain", lambda: run.ledger)
    plan = checks.read("the plan can be read", lambda: run.plan)
    checkpoint = checks.read("the checkpoint's checksum", lambda: run.checkpoint)
    record = checks.read("the record can be read", lambda: run.record)
    epochs = checks.read("the metrics can be read", lambda: run.epochs)
    written = {
        PLAN: plan and plan_bytes(plan),
        RECORD: record and readable_json(record),
        METRICS: None if epochs is None else metrics_bytes(epochs),
    }
    checks.add("canonical form", lambda: _canonical(path, written))
    epsilons: Mapping[str, float] = {}
    if ledger is not None:
        if independent:
            epsilons = checks.read("other accountants", lambda: other_epsilons(ledger)) or {}
        checks.add("files and ledger", lambda: _files(path, ledger))
        if plan is not None:
            checks.add("plan and ledger", lambda: _plan_and_ledger(plan, ledger, epsilons))
        if checkpoint is not None:
            checks.add("checkpoint and ledger", lambda: _checkpoint_and_ledger(checkpoint, ledger))
    if ledger is not None and plan is not None and checkpoint is not None:
        if epochs is not None:
            checks.add("metrics", lambda: _metrics(epochs, checkpoint, plan, ledger))
        if record is not None:
            checks.add("record", lambda: _record(record, checkpoint, plan, ledger, epochs))
    ours = {PLAN, LEDGER, CHECKPOINT, METRICS, RECORD}
    names = (file.relative_to(path).as_posix() for file in path.rglob("*") if file.is_file())
    unchecked = (*UNCHECKED, *sorted(name for name in names if name not in ours))
    return Verification(path, tuple(checks.done), unchecked, epsilons, ledger, plan, record)


@final
class _Checks:
    """Collects checks; whatever one raises is what does not fit, never a traceback."""

    def __init__(self) -> None:
        self.done: list[Check] = []

    def read(self, name: str, read: Callable[[], T]) -> T | None:
        found, problem = None, None
        try:
            found = read()
        except (SparseDPError, OSError) as error:
            problem = str(error)
        except Exception as error:
            problem = f"it is damaged ({type(error).__name__}: {error})"
        self.done.append(Check(name, problem))
        return found

    def add(self, name: str, make: Callable[[], Iterable[Check]]) -> None:
        try:
            self.done += make()
        except Exception as error:
            self.done.append(Check(name, f"cannot be compared ({type(error).__name__}: {error})"))


def _canonical(path: Path, written: Mapping[str, bytes | None]) -> Iterator[Check]:
    """Each JSON file is the one text of its value, so nothing else can be read from it."""
    problem = "this library did not write it so; restore the file"
    for name, content in written.items():
        if content is not None:
            fits = (path / name).read_bytes() == content
            yield _fits(f"{name} is in canonical form", fits, problem)


def _files(path: Path, ledger: LedgerState) -> Iterator[Check]:
    for name in (CHECKPOINT, METRICS, RECORD):
        problem = "its SHA-256 is not the one in the ledger: one of them was changed; restore them"
        try:
            fits = digest_of(name, (path / name).read_bytes()) in ledger.expected_digests(name)
        except Exception as error:
            fits, problem = False, f"{type(error).__name__}: {error}"
        yield _fits(f"{name} is as the run wrote it, by the ledger", fits, problem)


def _plan_and_ledger(plan: Plan, ledger: LedgerState, epsilons: Mapping[str, float]) -> Iterator[Check]:
    """The ledger was opened for this plan, and holds no more than it allows."""
    phases = [(one.name, one.steps, one.sampling_rate, one.noise_multiplier) for one in plan.phases]
    opened = [(one.phase, one.steps, one.sampling_rate, one.noise_multiplier) for one in ledger.planned]
    yield _equal("the ledger was opened for this plan", ledger.plan, plan.fingerprint)
    yield _equal("the plan's phases, rates and noise are the ledger's", phases, opened)
    yield _equal("delta", plan.delta, ledger.delta)
    yield _equal("the unit of privacy", (plan.unit, plan.units), (ledger.unit, ledger.units))
    if plan.target_epsilon is not None:
        spent = _epsilon_of(plan, ledger.blocks)
        yield _at_most("epsilon spent is within the target", spent or 0.0, plan.target_epsilon)
        if epsilons:
            limit = plan.target_epsilon * (1 + TOLERANCE)
            yield _at_most("another accountant agrees that it is", epsilons[TIGHTEST], limit)


def _checkpoint_and_ledger(checkpoint: Checkpoint, ledger: LedgerState) -> Iterator[Check]:
    yield _place("the ledger goes on from where the checkpoint knew it", checkpoint.state["ledger"], ledger)
    yield _at_most("the checkpoint's steps were all paid for", checkpoint.step, ledger.charged)
    yield _equal("the checkpoint's plan is the ledger's", checkpoint.identity["plan"], ledger.plan)


def _metrics(
    epochs: Sequence[EpochMetrics], checkpoint: Checkpoint, plan: Plan, ledger: LedgerState
) -> Iterator[Check]:
    """Every line of the metrics: step, phase and epsilon are the plan's, and the checkpoint has the same lines."""
    saved = checkpoint.state["journal"]["epochs"]
    same = json_equal(epochs_json(epochs[: len(saved)]), saved)
    name = "the metrics go on from where the checkpoint knew them"
    yield _fits(name, same, "its epochs are not those of the checkpoint")
    ends, costs, problem = plan.epoch_ends(), _by_epoch(plan), None
    for before, line in zip([0, *(one.epoch for one in epochs)], epochs, strict=False):
        if not before < line.epoch <= len(ends):
            problem = f"epoch {line.epoch} is out of order"
            break
        step, cost = ends[line.epoch - 1], costs[line.epoch - 1]
        claimed, expected = (line.step, line.phase), (step, plan.phase_at(step - 1).name)
        if claimed != expected:
            problem = f"epoch {line.epoch} ends with {claimed}, the plan says {expected}"
        elif not _bounds(line.epsilon, cost, plan):
            problem = f"epoch {line.epoch} says epsilon {line.epsilon}, the plan amounts to {cost}"
        elif line.step > ledger.charged:
            problem = f"epoch {line.epoch} ends at step {line.step}, which was not paid for"
    yield Check("the metrics' steps, phases and epsilons", problem)


def _record(
    record: RunRecord,
    checkpoint: Checkpoint,
    plan: Plan,
    ledger: LedgerState,
    epochs: Sequence[EpochMetrics] | None,
) -> Iterator[Check]:
    """Every claim of the record that follows from the other files."""
    values: Mapping[str, Any] = record
    identity, journal = checkpoint.identity, checkpoint.state["journal"]
    dimension = sum(math.prod(shape) for _, shape in identity["layout"])
    expected: dict[str, object] = {
        "format": FORMAT,
        **stated(plan, identity["seed"]),
        "public_seed": identity["public_seed"],
        "d": dimension,
        "plan": ledger.plan,
        "settings": {name: identity[name] for name in ("method", *setup_names(identity))},
    }
    if record["status"] == RUNNING:
        known = [name for name in OUTCOME if values[name] is not None]
        yield _fits("the record's status", not known, f"it says running, and knows {known} already")
    else:
        allowed = (STOPPED, FINISHED) if checkpoint.step >= plan.total_steps else (STOPPED,)
        said = record["status"]
        yield _fits("the record's status", said in allowed, f"it says {said!r}, expected {allowed}")
        yield _place("the record's ledger head", record["ledger"], ledger)
        for name, blocks in (("epsilon", ledger.planned), ("epsilon_spent", ledger.blocks)):
            cost, said = _epsilon_of(plan, blocks), values[name]
            problem = f"it says {said}, the ledger amounts to {cost}"
            yield _fits(f"the record's {name}", _bounds(said, cost, plan), problem)
        size = journal["support"].numel()
        expected |= {
            "steps_charged": ledger.charged,
            "k": size,
            "active_ratio": size / dimension,
            "supports": journal["spans"],
            "test_accuracy": (record["metrics"] or {}).get("accuracy"),
        }
        if epochs and (epochs[-1].step == checkpoint.step or record["status"] == STOPPED):
            expected["metrics"] = dict(epochs[-1].metrics)
    for name, value in expected.items():
        yield _equal(f"the record's {name}", values[name], value)


@lru_cache(maxsize=256)
def _epsilon_of(plan: Plan, blocks: tuple[ChargeBlock, ...]) -> float | None:
    """What some steps of a plan cost by its own accountant; None when it is not private."""
    if plan.delta is None:
        return None
    events = (SampledGaussian(block.sampling_rate, block.noise_multiplier, block.steps) for block in blocks)
    return plan_accountant(plan).epsilon(merge_events(events), plan.delta)


@lru_cache(maxsize=64)
def _by_epoch(plan: Plan) -> tuple[float | None, ...]:
    if plan.delta is None:
        return (None,) * len(plan.epoch_ends())
    return epsilon_by_epoch(plan)


def _bounds(claimed: float | None, cost: float | None, plan: Plan) -> bool:
    """Whether a claimed epsilon bounds what is computed now: an older accountant may be looser, never tighter."""
    if claimed is None or cost is None:
        return claimed is cost
    return cost * (1 - 1e-6) <= claimed <= max(cost * (1 + 1e-6), plan.target_epsilon or 0.0)


def _place(name: str, place: LedgerPlace | None, ledger: LedgerState) -> Check:
    if place is None:
        return Check(name, "it names no place in the ledger")
    try:
        ledger.check_extends(str(place["head"]), place["length"])
    except SparseDPError as error:
        return Check(name, str(error))
    return Check(name)


def _equal(name: str, found: object, expected: object) -> Check:
    return _fits(name, json_equal(found, expected), f"got {found!r}, expected {expected!r}")


def _at_most(name: str, found: float, limit: float) -> Check:
    return _fits(name, found <= limit, f"got {found:.6g}, expected at most {limit:.6g}")


def _fits(name: str, fits: bool, problem: str) -> Check:
    return Check(name, None if fits else problem)


def other_epsilons(ledger: LedgerState) -> dict[str, float]:
    """Compute epsilon of everything charged by `dp_accounting`'s own accountants, and by Opacus's if installed.

    Formal guarantees: Only Opacus's are independent of the plan's accountant. `dp_accounting` composes and reads off
    the plan's loss distributions too; what differs here is how a step's loss is discretised. Both families take
    sampling rate, noise and steps from the ledger, so an error there is in all of them.
    Edge cases: Empty when the run is not private.
    """
    import dp_accounting as dp

    if ledger.delta is None or any(block.noise_multiplier == 0 for block in ledger.blocks):
        return {}
    events = ledger.events()
    width = min((_discretization(event) for event in events), default=1e-4)
    with silence_dp_accounting():
        made = {
            TIGHTEST: dp.pld.PLDAccountant(value_discretization_interval=width),
            "RDP (dp-accounting)": dp.rdp.RdpAccountant(),
        }
        found = {
            name: float(one.compose(dp_event(events)).get_epsilon(ledger.delta)) for name, one in made.items()
        }
    return {**found, **_by_opacus(events, ledger.delta)}


def _discretization(event: SampledGaussian) -> float:
    """A grid for one step's privacy loss: at small rates the default is coarser than all of it."""
    rate, noise = event.sampling_rate, event.noise_multiplier
    deviation = rate * math.sqrt(math.expm1(min(1 / noise**2, 50.0)))
    largest = math.log1p(rate * math.expm1(min(10 / noise + 0.5 / noise**2, 500.0)))
    return min(1e-4, max(deviation / 16, largest / 400_000))


def _by_opacus(events: Sequence[SampledGaussian], delta: float) -> dict[str, float]:
    try:
        from opacus.accountants import PRVAccountant, RDPAccountant
    except ImportError:
        return {}
    found = {}
    for name, made in (("RDP (Opacus)", RDPAccountant()), ("PRV (Opacus)", PRVAccountant())):
        made.history = [(one.noise_multiplier, one.sampling_rate, one.steps) for one in events]
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            found[name] = float(made.get_epsilon(delta)) if events else 0.0
    return found
