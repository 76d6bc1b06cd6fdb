"""The guarantee in words: what is promised, what it means, and what it does not cover.

The one source of these words: the command line, records, reports and the estimators' page all print them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, final

from sparsedp._validate import count, rounded_up, significant
from sparsedp.privacy.accounting import ACCOUNTANTS, plan_epsilon
from sparsedp.privacy.calibration import UNDERSHOOT
from sparsedp.privacy.ledger import LedgerState
from sparsedp.privacy.plan import Plan

ROUNDING = 1e-6
"""Relative excess over a target that rounding on another machine may explain."""
BEYOND_FILES = (
    "An observer of the process itself (its memory, which rows it loads) is outside the guarantee.",
    "Files that were all rewritten together, or a copied run that was continued twice: no file can show this.",
)


def epsilons(plan: Plan) -> dict[str, float]:
    """Epsilon of the whole plan by every accountant; empty without a delta, and where earlier runs count too."""
    if plan.delta is None or (plan.continuation is not None and plan.continuation.ledgers):
        return {}
    return {name: plan_epsilon(plan, name) for name in ACCOUNTANTS}


def guarantee(plan: Plan) -> str:
    """The guarantee in a sentence; it never leaves out what a unit is.

    Formal guarantees: Epsilon is accounted for anew. The target is named in its place only when the plan costs just
    that, to the accuracy of calibration: a plan edited by hand says what it costs.
    """
    noiseless = [phase.name for phase in plan.phases if not phase.noise_multiplier]
    if noiseless:
        return f"No guarantee: there is no noise in the phases {', '.join(noiseless)}."
    if plan.delta is None:
        return f"Noise without a target: epsilon for one {plan.unit} of {plan.units} depends on the delta chosen."
    cost, target = plan_epsilon(plan), plan.target_epsilon
    at_most = f"({rounded_up(_stated(cost, target))}, {plan.delta:g})"
    if target is not None:
        at_most = f"At most {at_most}"
    earlier = len(plan.continuation.ledgers) if plan.continuation else 0
    whole = f" together with {earlier} earlier run{'s' if earlier > 1 else ''}" if earlier else ""
    excess = f" That is more than its target of {target:.4g}." if exceeds_target(plan, cost) else ""
    return (
        f"{at_most}-differential privacy{whole} for adding or removing one {plan.unit} of {plan.units}, by the "
        f"{plan.accountant or 'pld'} accountant.{excess}"
    )


def exceeds_target(plan: Plan, cost: float) -> bool:
    """Whether a plan costs more than it was calibrated to, beyond rounding; False without a target."""
    return plan.target_epsilon is not None and not cost <= plan.target_epsilon * (1 + ROUNDING)


@final
@dataclass(frozen=True, slots=True)
class Guarantee:
    """The guarantee of a run in sentences: what it is, what it means, what it leaves out, what must be read first."""

    statement: str
    promises: tuple[str, ...]
    limitations: tuple[str, ...]
    warning: str | None = None

    @property
    def guaranteed(self) -> list[str]:
        """The statement and what it means."""
        return [self.statement, *self.promises]

    @property
    def not_guaranteed(self) -> list[str]:
        """What is not covered, the warning first, and what no file can show last."""
        return [*([self.warning] if self.warning else []), *self.limitations, *BEYOND_FILES]


def describe(plan: Plan, *, seeded: bool = False, complete: bool = True, evaluated: bool = True) -> Guarantee:
    """Describe the guarantee of a run: its noise from a seed, all steps taken, held-out numbers shown beside it."""
    stopped = (
        "The run stopped before its plan was done. The planned epsilon holds; the smaller one of the ledger holds "
        "only if the decision to stop did not depend on anything released."
    )
    held_out = (
        "Held-out data is outside the guarantee: accuracy and all other evaluation numbers are exact. If people in "
        "the evaluation set need protection, do not publish them."
    )
    limitations = (
        *([held_out] if evaluated else []),
        *([] if complete else [stopped]),
        f"Public by declaration: the number of {plan.unit}s, the sampling rate, delta, the classes, bounds and "
        "schema of the data, and every setting.",
        "Each further run on the same data costs again. Tuning, other seeds and comparisons are not in this epsilon.",
        "How long a step takes, and how much memory, is not protected.",
    )
    warning = (
        "Reproducible, not for release: noise and batches came from a seed. Whoever knows the seed can subtract the "
        "noise, so the guarantee below is that of the same run without a seed."
    )
    return Guarantee(guarantee(plan), _promises(plan), limitations, warning if seeded else None)


def describe_run(plan: Plan, ledger: LedgerState | None, record: Mapping[str, Any] | None) -> Guarantee:
    """Describe the guarantee of a run by its files; a run whose record cannot be read counts as seeded."""
    return describe(
        plan,
        seeded=record is None or record.get("seed") is not None or not record.get("publishable", True),
        complete=ledger is not None and ledger.charged >= plan.total_steps,
        evaluated=record is None or bool(record.get("metrics")),
    )


def posterior(chance: float, epsilon: float) -> tuple[float, float]:
    """Return the lowest and the highest a belief can become: its odds times e^-epsilon and times e^epsilon."""
    odds = chance / (1 - chance)
    low, high = (odds * math.exp(min(sign * epsilon, 500.0)) for sign in (-1, 1))
    return low / (1 + low), high / (1 + high)


def _promises(plan: Plan) -> tuple[str, ...]:
    unit = plan.unit
    odds: tuple[str, ...] = ()
    if plan.delta is not None:
        epsilon = _stated(plan_epsilon(plan), plan.target_epsilon)
        odds = (
            f"Whatever anybody concludes from what this run released is at most e^{rounded_up(epsilon)} = "
            f"{rounded_up(math.exp(epsilon), 3)} times as likely with any one {unit} in the training data as without "
            f"it, but for a probability of {significant(plan.delta)}.",
        )
    about_unit = (
        f"The unit is a row, not a person or patient: no unit was named, and each of {count(plan.units)} rows is "
        "protected by itself. Somebody with m rows has about m times the epsilon."
        if unit == "row"
        else f"The unit is one {unit} with all its rows: {count(plan.units)} of them, each sampled and clipped as a "
        "whole."
    )
    return (
        *odds,
        f"Neighbouring data sets differ by one {unit} added or removed. Replacing one {unit} by another is two such "
        "changes and costs up to twice the epsilon.",
        about_unit,
        "It covers everything made from the training data here: weights, supports, scores, and every number of the "
        "training phase in this run's files but the time it took. Using them in any way costs nothing more.",
    )


def _stated(cost: float, target: float | None) -> float:
    """The target where the plan costs just that, to the accuracy of calibration; else what it costs."""
    return target if target is not None and (1 - UNDERSHOOT) * target <= cost <= target else cost
