"""The report of one run."""

from __future__ import annotations

from sparsedp.report.audit import audit_card
from sparsedp.report.coordinates import layers_figure, score_figure
from sparsedp.report.energy import energy_share
from sparsedp.report.figure import badge, badges, banner, grid, stack, tile, tiles
from sparsedp.report.guarantee import (
    guarantee_cards,
    ledger_card,
    plan_card,
    settings_card,
    statement,
    unit_badge,
    unverified,
    words_of,
)
from sparsedp.report.markup import Child, Html, join
from sparsedp.report.metric import leading
from sparsedp.report.nonprivate import diagnostics_section
from sparsedp.report.numbers import count, epsilon_text, percent, significant
from sparsedp.report.page import Page, Section
from sparsedp.report.references import majority
from sparsedp.report.run import ReportedRun
from sparsedp.report.table_card import table_card
from sparsedp.report.trajectory import accuracy_figure, energy_figure, epsilon_figure, run_stretches
from sparsedp.report.warmup import warmup_figure
from sparsedp.report.words import Words
from sparsedp.runs.nonprivate_file import Diagnostics


def run_page(run: ReportedRun, diagnostics: Diagnostics | None = None) -> Page:
    """All there is to say about one run."""
    words = words_of(run)
    warning = banner(words.warning, "warn" if run.plan.is_private else "bad")
    sections = [
        Section("progress", "How it went", grid(accuracy_figure(run), epsilon_figure(run))),
        Section(
            "coordinates",
            "Which coordinates it trained",
            grid(
                energy_figure(run), score_figure(run), warmup_figure(run), layers_figure(run), table_card(run)
            ),
        ),
        Section("guarantee", "The guarantee, in words", join(statement(words), grid(_promises(run, words)))),
        Section("plan", "Plan and ledger", stack(plan_card(run.plan), ledger_card(run))),
        Section("settings", "Settings", settings_card(run)),
    ]
    if diagnostics is not None:
        sections.append(diagnostics_section(diagnostics))
    head = join(unverified(run.problems), _badges(run), statement(words), warning, _tiles(run))
    versions = run.record["versions"]
    made = f"sparsedp {versions['sparsedp']}, PyTorch {versions['torch']}" if versions else "sparsedp"
    kind = "Differentially private training" if run.plan.is_private else "Training without privacy"
    return Page(
        title=run.title,
        subtitle=f"{kind} of {run.record['model']}, {count(run.layout.dimension)} trainable "
        f"numbers, {count(run.plan.units)} {run.plan.unit}s",
        head=head,
        sections=sections,
        footer=f"Made from the run's own files ({made}). This page loads nothing from the network.",
    )


def _promises(run: ReportedRun, words: Words) -> list[Html]:
    return [*guarantee_cards(words), *([audit_card(run.audit)] if run.audit is not None else [])]


def _badges(run: ReportedRun) -> Html:
    status = run.record["status"]
    marks = [badge(status, "good" if status == "finished" else "warn")]
    if not run.plan.is_private:
        marks.append(badge("not private", "bad"))
    elif run.seeded:
        marks.append(badge("reproducible, not for release", "warn"))
    else:
        marks.append(badge("noise from the operating system", "good"))
    if run.plan.is_private:
        marks.append(unit_badge(run.plan.unit))
    return badges(marks)


def _tiles(run: ReportedRun) -> Html:
    plan, k, d = run.plan, run.support.size, run.layout.dimension
    shown: list[Child] = []
    metric = leading([run.metrics])
    value = run.metrics.get(metric.key) if metric else None
    if metric and value is not None:
        guess = majority(run.record, metric)
        beside = "" if guess is None else f"{guess.name} {metric.text(guess.value)}; "
        shown.append(tile(metric.title, metric.text(value), f"{beside}outside the guarantee"))
    epsilon = run.record.get("epsilon") if plan.is_private else None
    if plan.is_private and epsilon is None:
        epsilon = plan.target_epsilon
    cost = f"at delta {significant(plan.delta)}, for one {plan.unit}" if plan.delta else "protects nobody"
    shown.append(tile("epsilon", epsilon_text(epsilon), cost))
    shown.append(tile("active at the end", percent(k / d), f"{count(k)} of {count(d)} coordinates"))
    share = energy_share(run_stretches(run), d)
    if share is not None:
        shown.append(tile("noise energy", percent(share), "of dense training's, over the run"))
    return tiles(shown)
