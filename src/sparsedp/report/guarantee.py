"""What is guaranteed, what was planned and spent, and how to run it again."""

from __future__ import annotations

import json
from collections.abc import Sequence

from sparsedp.guarantee import summarize
from sparsedp.methods.method import SELECT
from sparsedp.methods.support_scheduler import noise_on_mean
from sparsedp.privacy.plan import Phase, Plan
from sparsedp.report.figure import Table, badge, banner, bullets, card, code, folded
from sparsedp.report.markup import Child, Html, tag
from sparsedp.report.numbers import NONE, count, epsilon_text, significant
from sparsedp.report.rendering import part
from sparsedp.report.run import ReportedRun
from sparsedp.report.words import Words, in_words

ACCOUNTANT_NAMES = {
    "pld": "PLD, the tightest",
    "rdp": "RDP, tight conversion",
    "rdp-classic": "RDP, classic conversion",
}


ROW = "row"
"""The unit of a run that named none."""


def unit_badge(unit: str) -> Html:
    """What is protected; a row is a warning, since whoever has several is protected less."""
    if unit == ROW:
        return badge("protects each row, not whoever has several", "warn")
    return badge(f"protects each {unit}", "plain")


def words_of(run: ReportedRun) -> Words:
    """The guarantee of a run in words."""
    evaluated = any(report.metrics for report in run.epochs)
    return in_words(
        run.plan,
        seeded=run.seeded,
        complete=run.complete,
        evaluated=evaluated,
    )


def guarantee_cards(words: Words, which: str = "") -> list[Html]:
    """What is promised and what is not; `which` says for which of several guarantees."""
    cards = [card("What it does not cover", bullets(words.limits))] if words.limits else []
    return [card(f"What is promised{which}", bullets(words.promises)), *cards] if words.promises else cards


def unverified(problems: Sequence[str]) -> Html | None:
    """Says that files do not agree, and where; nothing if they do."""
    if not problems:
        return None
    words = "Not verified: the files do not agree, so do not rely on what this page says. "
    return banner(words + "; ".join(problems), "bad")


def plan_card(plan: Plan) -> Html:
    """The phases and their noise, and epsilon by every accountant."""
    table = Table(
        (
            "phase",
            "support",
            "steps",
            "sampling rate",
            "expected batch",
            "clip norm",
            "noise multiplier",
            "ν",
        ),
        tuple(_phase_row(plan, phase) for phase in plan.phases),
        frozenset({0, 1}),
    )
    parts: list[Child] = [table.html("The plan's phases")]
    summary = summarize(plan)
    if summary.epsilons and plan.is_private:
        rows = tuple(
            (ACCOUNTANT_NAMES.get(name, name), epsilon_text(value))
            for name, value in summary.epsilons.items()
        )
        parts += [
            tag("p", None, "Epsilon of the whole plan by each accountant:"),
            Table(("accountant", f"epsilon at delta {significant(plan.delta or 0)}"), rows).html(
                "Epsilon by accountant"
            ),
        ]
    return card("The plan", *parts)


def ledger_card(run: ReportedRun) -> Html:
    """What the ledger says was spent, and what it was checked against."""
    record, ledger, plan = run.record, run.ledger, run.plan
    if ledger is None:
        return card(
            "The ledger",
            tag(
                "p",
                None,
                f"This run kept no folder, so its ledger lived in memory: {count(record['steps_charged'])} of "
                f"{count(plan.total_steps)} planned steps were charged. Nothing is left to verify.",
            ),
        )
    known = record.get("epsilon_spent")
    spent = None if known is None else epsilon_text(known)
    charged = f"{count(ledger.charged)} of {count(ledger.planned_steps)} planned"
    return card(
        "The ledger",
        part(
            "ledger",
            ledger,
            run.name,
            charged,
            spent if plan.is_private else "∞",
            count(ledger.length),
            ledger.torn,
        ),
    )


def settings_card(run: ReportedRun) -> Html:
    """All settings of the run, its plan and versions, as JSON."""
    names = ("config", "settings", "schema", "checksum", "versions", "public_seed")
    settings = {name: run.record[name] for name in names if run.record.get(name) is not None}
    settings["plan"] = json.loads(run.plan.to_json())
    shown = folded("Show", code(json.dumps(settings, indent=2), "Settings"))
    return card("All settings, plan and versions", shown)


def _phase_row(plan: Plan, phase: Phase) -> tuple[Child, ...]:
    return (
        phase.name,
        _support(phase),
        count(phase.steps),
        significant(phase.sampling_rate, 4),
        significant(plan.expected_batch_size(phase), 5),
        NONE if phase.clip_norm is None else significant(phase.clip_norm),
        significant(phase.noise_multiplier, 4) if phase.noise_multiplier else NONE,
        significant(noise_on_mean(plan, phase)),
    )


def _support(phase: Phase) -> str:
    rule = phase.support.plain()
    if not phase.trains:
        return "rows of tables" if phase.name == SELECT.name else "statistics of the inputs"
    if rule["rule"] == "full":
        return "all coordinates"
    if "schedule" not in rule:
        return f"{rule['rule']} {', '.join(rule['scope'])}".strip()
    ranking = rule["rule"]["name"] if isinstance(rule["rule"], dict) else rule["rule"]
    schedule = rule.get("schedule", {}).get("name", "")
    return f"{ranking}, {schedule} {rule.get('active_ratio', '')}".strip()


def statement(words: Words, name: str | None = None) -> Html:
    """The guarantee in a sentence."""
    return part("statement", words.statement, name)
