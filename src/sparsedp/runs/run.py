"""A run on disk, read file by file as it is asked for; its trained weights; and its successor under one budget."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from functools import cached_property
from pathlib import Path
from typing import Any, Self, final

import torch
from torch import Tensor, nn

from sparsedp.errors import DataError, PrivacyError
from sparsedp.methods.support_scheduler import WARMUP
from sparsedp.parameters import ParameterLayout, Support
from sparsedp.privacy.calibration import BudgetSplit, EqualNoise, RdpFilter
from sparsedp.privacy.ledger import Ledger, LedgerState, closing_line
from sparsedp.privacy.plan import Plan
from sparsedp.runs.checkpoint import Checkpoint, load_model_state, read_checkpoint, read_layout
from sparsedp.runs.directory import CHECKPOINT, LEDGER, METRICS, PLAN, RECORD, RunDirectory
from sparsedp.runs.record import EpochMetrics, RunRecord, SupportSpan, read_metrics, read_plan, read_record


@final
class Run:
    """What a run directory holds. Each file is read when it is first asked for; a damaged one is a `DataError`."""

    def __init__(self, path: Path) -> None:
        """Use `open`."""
        self.path = path

    @classmethod
    def open(cls, path: Path | str) -> Self:
        """Open the run in a directory."""
        path = Path(path)
        if not (path / PLAN).is_file():
            raise DataError(f"{path} holds no run (no {PLAN}); to start one there, drop resume")
        return cls(path)

    @property
    def name(self) -> str:
        """The directory's name."""
        return self.path.resolve().name

    @cached_property
    def plan(self) -> Plan:
        """What was planned."""
        return read_plan(self.path / PLAN)

    @cached_property
    def record(self) -> RunRecord:
        """What the run was and how it ended."""
        return read_record(self.path / RECORD)

    @cached_property
    def epochs(self) -> tuple[EpochMetrics, ...]:
        """The metrics of each epoch so far."""
        return read_metrics(self.path / METRICS)

    @cached_property
    def ledger(self) -> LedgerState:
        """What was spent, its chain verified."""
        return Ledger.read(self.path / LEDGER)

    @cached_property
    def checkpoint(self) -> Checkpoint:
        """The newest state."""
        return read_checkpoint(self.path / CHECKPOINT)

    @cached_property
    def layout(self) -> ParameterLayout:
        """Names and shapes of the trainable parameters."""
        return read_layout(self.checkpoint.identity["layout"])

    @cached_property
    def support(self) -> Support:
        """The last step's; all coordinates before the first."""
        return Support(self.checkpoint.state["journal"]["support"], self.layout.dimension)

    @cached_property
    def active(self) -> Support:
        """The support that the next step would start from: the method's own."""
        controller = self.checkpoint.state["controller"]
        return Support(controller["tensors"]["support"], int(controller["values"]["dimension"]))

    @cached_property
    def spans(self) -> tuple[SupportSpan, ...]:
        """Its supports, in order."""
        return tuple(SupportSpan(**span) for span in self.checkpoint.state["journal"]["spans"])

    @property
    def scores(self) -> Tensor | None:
        """What the last ranking was made from; None for dense and random methods."""
        found: Tensor | None = self.checkpoint.state["controller"]["tensors"].get("scores")
        return found

    @cached_property
    def warmup(self) -> Mapping[str, Tensor] | None:
        """Statistics of its warm-up; None before its end, and for a run without."""
        return self._watched if "first" in self._watched else None

    @property
    def warming_up(self) -> bool:
        """Whether the warm-up is still going on."""
        return "over" in self._watched and not bool(self._watched["over"])

    @property
    def _watched(self) -> Mapping[str, Tensor]:
        tensors = self.checkpoint.state["controller"]["tensors"]
        return {name.removeprefix(WARMUP): one for name, one in tensors.items() if name.startswith(WARMUP)}

    @property
    def method(self) -> Mapping[str, Any]:
        """The row of the methods table, as the run's controller describes it."""
        described: Mapping[str, Any] = self.checkpoint.state["controller"]["values"]["method"]
        return described

    def check_ledger(self) -> None:
        """Check that the ledger is this plan's, and goes on from where checkpoint and record know it."""
        if self.ledger.plan != self.plan.fingerprint:
            raise PrivacyError(
                f"the ledger belongs to another plan than {PLAN}; files of two runs were mixed"
            )
        for place in (self.checkpoint.state["ledger"], self.record["ledger"]):
            if place is not None:
                self.ledger.check_extends(place["head"], place["length"])


def load_weights(path: Path | str, model: nn.Module) -> None:
    """Load a run's trained weights into a model of the same architecture.

    Args:
        path: the run's folder, or its checkpoint file.
        model: gets the weights; the averaged ones if the run kept an average.

    Raises:
        DataError: there is no checkpoint, or it is damaged.
        ModelError: the checkpoint belongs to another architecture.
    """
    path = Path(path)
    checkpoint = read_checkpoint(path / CHECKPOINT if path.is_dir() else path)
    load_model_state(model, checkpoint)
    average = checkpoint.state.get("average")
    if average is not None:
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if name in average["weights"]:
                    parameter.copy_(average["weights"][name])


def declared_filter(earlier: Sequence[Path | str]) -> RdpFilter:
    """The cap that runs were made under, all of those that spend from it.

    Raises:
        PrivacyError: one declared no cap, or another than the first; or one that they continue is not among them.
    """
    runs = [Run.open(one) for one in earlier]
    filters, heads, needed = set(), set(), []
    for run in runs:
        plan, prior = run.plan, run.plan.continuation
        if prior is None or plan.target_epsilon is None or plan.delta is None:
            raise PrivacyError(
                f"continue_from: the run at {run.path} declared no cap before its first release; only a run "
                "made with RunConfig(total_epsilon=...) can be continued. Start a run of its own, whose epsilon adds "
                "to the other's"
            )
        filters.add((plan.target_epsilon, plan.delta, prior.order, plan.unit, plan.units))
        heads |= {run.ledger.charged_head, plan.fingerprint}
        heads |= {successor.fingerprint for successor in run.ledger.successors}
        needed += [(run.path, head) for head in prior.ledgers]
    if len(filters) != 1:
        raise PrivacyError(
            f"continue_from: got {len(filters)} caps or kinds of unit, expected runs under one cap"
        )
    missing = [path for path, head in needed if head not in heads]
    if missing:
        raise PrivacyError(
            f"continue_from: the run at {missing[0]} continues a run that is not named; give the folders of all"
        )
    ((epsilon, delta, order, _, _),) = filters
    return RdpFilter(epsilon, delta, order)


def continue_runs(
    chosen: RdpFilter,
    plan: Plan,
    earlier: Sequence[Path | str],
    split: BudgetSplit = EqualNoise(),  # noqa: B008
    run: str = "",
) -> Plan:
    """Calibrate a plan to what earlier runs left of a cap, and close the earlier runs for it.

    An earlier run can be resumed, and two later plans could both count on what it has left. So, under the lock of
    every earlier ledger, what is left is calibrated away to one plan, and each ledger gets a closing line that holds
    that plan.

    Args:
        chosen: the cap, settled before any release was looked at.
        plan: what to run next.
        earlier: directories of all earlier runs on the same units.
        split: how phases without noise share what is left.
        run: names the run that the plan is for; a plan for another counts beside it.

    Formal guarantees: On return every earlier ledger is closed on disk, for the returned plan: its run cannot be
    resumed. A plan that got an earlier run's remainder counts whole unless the directory of its run is among
    `earlier`. Run the returned plan once.
    Edge cases: A process killed on the way may have closed some ledgers. The same call then gives the same plan,
    except when the kill cut a ledger's line: then the plan that nobody saw counts whole.

    Raises:
        PrivacyError: nothing is left, or an earlier run is still going on.
    """
    with ExitStack() as locks:
        runs = [Run.open(one) for one in earlier]
        ledgers = [
            locks.enter_context(Ledger.resume(one.path / LEDGER, one.plan, even_closed=True)) for one in runs
        ]
        for one in runs:
            one.check_ledger()
            if (one.plan.units, one.plan.unit) != (plan.units, plan.unit):
                raise PrivacyError(
                    f"the run at {one.path} protects {one.plan.units} units ({one.plan.unit}), the plan {plan.units} "
                    f"({plan.unit}); one cap is over the same units"
                )
        known = {one.plan.fingerprint for one in runs}
        promised = {one.fingerprint: one for ledger in ledgers for one in ledger.state.successors}
        # What is committed once all are closed, which they are before anybody sees the plan.
        closed = [
            one.state if one.state.closed else one.state.after(closing_line(plan), "") for one in ledgers
        ]
        spent = [(one.charged_head, one.committed()) for one in closed]
        found = chosen.calibrate(plan, spent, split, run)
        lost = [one for name, one in promised.items() if name not in known | {found.fingerprint}]
        if lost:
            spent += [(one.fingerprint, one.events()) for one in lost]
            found = chosen.calibrate(plan, spent, split, run)
        for one, ledger in zip(runs, ledgers, strict=True):
            if found not in ledger.state.successors:
                ledger.retire(found)
                RunDirectory(one.path, ledger).write_checkpoint(one.checkpoint)
    return found
