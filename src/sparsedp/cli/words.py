"""The guarantee of a verified run in words: what holds, and what does not."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from sparsedp.privacy import Plan
from sparsedp.report.words import Words, in_words
from sparsedp.runs.verified_ledger import VerifiedLedger

BEYOND_FILES = (
    "Who can watch the process at work (its memory, which rows it loads) is not kept out.",
    "Files rewritten all together, or a copied run continued twice: no file can show that it was not so.",
)


def run_in_words(plan: Plan, ledger: VerifiedLedger | None, record: Mapping[str, Any] | None) -> Words:
    """The guarantee of a run; a run whose record cannot be read counts as seeded."""
    return in_words(
        plan,
        seeded=record is None or record.get("seed") is not None,
        complete=ledger is not None and ledger.charged >= plan.total_steps,
        evaluated=record is None or bool(record.get("metrics")),
        float_noise=record is None or record.get("noise") is None,
    )


def promised(words: Words) -> list[str]:
    """What is guaranteed."""
    return [words.statement, *words.promises]


def not_covered(words: Words) -> list[str]:
    """What is not; the seed and missing privacy first."""
    return [*([words.warning] if words.warning else []), *words.limits, *BEYOND_FILES]
