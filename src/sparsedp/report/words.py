"""What a plan guarantees and what it does not, in words."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, final

from sparsedp._validate import rounded_up
from sparsedp.guarantee import guarantee
from sparsedp.privacy.accounting import plan_epsilon
from sparsedp.privacy.calibration import UNDERSHOOT
from sparsedp.privacy.ledger import VerifiedLedger
from sparsedp.privacy.plan import Plan
from sparsedp.report.numbers import count, significant

BEYOND_FILES = (
    "Who can watch the process at work (its memory, which rows it loads) is not kept out.",
    "Files rewritten all together, or a copied run continued twice: no file can show that it was not so.",
)


@final
@dataclass(frozen=True, slots=True)
class Words:
    """The guarantee in sentences.

    Attributes:
        statement: the guarantee in one sentence.
        promises: what it means.
        limits: what it does not cover.
        warning: what must be read first, if anything.
    """

    statement: str
    promises: tuple[str, ...]
    limits: tuple[str, ...]
    warning: str | None


def in_words(plan: Plan, *, seeded: bool, complete: bool, evaluated: bool) -> Words:
    """The guarantee of a run of a plan.

    Args:
        plan: what was planned.
        seeded: whether the run's noise came from a seed.
        complete: whether all planned steps were taken.
        evaluated: whether the run shows numbers from held-out data.
    """
    warning = _warning(plan, seeded)
    limits = _limits(plan, complete, evaluated)
    return Words(guarantee(plan), _promises(plan), limits, warning)


def run_in_words(plan: Plan, ledger: VerifiedLedger | None, record: Mapping[str, Any] | None) -> Words:
    """The guarantee of a run; a run whose record cannot be read counts as seeded."""
    return in_words(
        plan,
        seeded=record is None or record.get("seed") is not None,
        complete=ledger is not None and ledger.charged >= plan.total_steps,
        evaluated=record is None or bool(record.get("metrics")),
    )


def promised(words: Words) -> list[str]:
    """What is guaranteed."""
    return [words.statement, *words.promises]


def not_covered(words: Words) -> list[str]:
    """What is not; the seed and missing privacy first."""
    return [*([words.warning] if words.warning else []), *words.limits, *BEYOND_FILES]


def _warning(plan: Plan, seeded: bool) -> str | None:
    if not plan.is_private:
        return "Not private: this run protects nobody. It is an ablation, for comparison only."
    if seeded:
        return (
            "Reproducible, not for release: noise and batches came from a seed. Whoever knows the seed can subtract "
            "the noise, so the guarantee below is that of the same run without a seed."
        )
    return None


def _promises(plan: Plan) -> tuple[str, ...]:
    if not plan.is_private:
        return ()
    unit, delta = plan.unit, plan.delta
    odds = []
    if delta is not None:
        epsilon = _stated_epsilon(plan)
        odds.append(
            f"Whatever anybody concludes from what this run released is at most e^{rounded_up(epsilon)} = "
            f"{rounded_up(math.exp(epsilon), 3)} times as likely with any one {unit} in the training data as without "
            f"it, but for a probability of {significant(delta)}."
        )
    return (
        *odds,
        f"Neighbouring data sets differ by one {unit} added or removed. Replacing one {unit} by another is two such "
        "changes and costs up to twice the epsilon.",
        _about_unit(plan),
        "It covers everything made from the training data here: weights, supports, scores, and every number of the "
        "training phase in this run's files but the time it took. Using them in any way costs nothing more.",
    )


def _stated_epsilon(plan: Plan) -> float:
    """The target where the plan costs just that, to the accuracy of calibration; else what it costs."""
    cost, target = plan_epsilon(plan), plan.target_epsilon
    return target if target is not None and (1 - UNDERSHOOT) * target <= cost <= target else cost


def _about_unit(plan: Plan) -> str:
    if plan.unit == "row":
        return (
            f"The unit is a row, not a person or patient: no unit was named, and each of {count(plan.units)} rows is "
            "protected by itself. Somebody with m rows has about m times the epsilon."
        )
    whole = f"{count(plan.units)} of them, each sampled and clipped as a whole"
    return f"The unit is one {plan.unit} with all its rows: {whole}."


def _limits(plan: Plan, complete: bool, evaluated: bool) -> tuple[str, ...]:
    held_out = (
        "Held-out data is outside the guarantee: accuracy and all other evaluation numbers here are exact. If people "
        "in the evaluation set need protection, do not publish them."
    )
    stopped = (
        "The run stopped before its plan was done. The planned epsilon holds; the smaller one of the ledger holds "
        "only if the decision to stop did not depend on anything released."
    )
    always = (
        f"Public by declaration: the number of {plan.unit}s, the sampling rate, delta, the classes, bounds and "
        "schema of the data, and every setting.",
        "Each further run on the same data costs again. Tuning, other seeds and comparisons are not in this epsilon.",
        "How long a step takes, and how much memory, is not protected.",
    )
    if not plan.is_private:
        return (held_out,) if evaluated else ()
    return (
        *((held_out,) if evaluated else ()),
        *((stopped,) if not complete else ()),
        *always,
    )
