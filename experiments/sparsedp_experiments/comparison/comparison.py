"""The report of many runs: methods at matched privacy, over seeds."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import final

from sparsedp.errors import DataError
from sparsedp.privacy.plan import Plan
from sparsedp.report.coordinates import layers_figure, score_figure
from sparsedp.report.figure import (
    Table,
    badge,
    badges,
    banner,
    bullets,
    card,
    folded,
    grid,
    stack,
    tile,
    tiles,
)
from sparsedp.report.guarantee import ROW, guarantee_cards, settings_card, statement, unit_badge, unverified
from sparsedp.report.markup import Child, Html, join
from sparsedp.report.metric import leading
from sparsedp.report.numbers import NONE, count, epsilon_text, percent
from sparsedp.report.page import Page, Section
from sparsedp.report.rendering import part
from sparsedp.report.run import Record, read_run, title_of
from sparsedp.report.words import in_words
from sparsedp.report.write import write_page
from sparsedp.runs.directory import REPORT, find_runs
from sparsedp.runs.record import EpochMetrics
from sparsedp.runs.run import Run
from sparsedp.runs.verify import verify
from sparsedp_experiments.comparison.comparison_figures import (
    curves_figure,
    epsilon_curve,
    layers_card,
    noise_card,
)
from sparsedp_experiments.comparison.groups import BASELINE, Group, group_records
from sparsedp_experiments.comparison.interval_figures import differences_figure, means_figure, means_table

_SAME = "Every method has the same guarantee here."
_NONE_AT_ALL = "These runs protect nobody; they are here to compare with."
MOST_DETAILS = 16
"""Single runs shown in detail; beyond, the page would be too long to read."""


@final
@dataclass(frozen=True, slots=True, eq=False)
class _Entry:
    """A run as the comparison needs it."""

    path: Path
    record: Record
    plan: Plan
    epochs: tuple[EpochMetrics, ...]
    problems: tuple[str, ...]


def comparison_page(name: str, folders: Sequence[Path]) -> Page:
    """All there is to say about some runs side by side.

    Raises:
        DataError: none of them is finished and evaluated, or a file is damaged.
    """
    entries = [_read(path) for path in folders]
    groups = group_records(entry.record for entry in entries)
    if not groups:
        raise DataError(
            f"{name}: none of the {len(entries)} runs is finished and was evaluated; there is nothing to compare. "
            "Report on one of them by its own folder"
        )
    by_record = {id(entry.record): entry for entry in entries}
    sections: list[Section | None] = [*_overviews(groups)]
    sections += [*(_group_section(i, group, by_record) for i, group in enumerate(groups))]
    sections += [
        _details_section(groups, by_record),
        _guarantee_section(groups, by_record),
        _runs_section(entries),
    ]
    return Page(
        title=_title(groups),
        subtitle=_subtitle(groups, entries),
        head=join(unverified(_problems(entries)), _badges(entries), _tiles(groups)),
        sections=[section for section in sections if section is not None],
        footer="Made from the runs' own files. This page loads nothing from the network.",
    )


def _read(path: Path) -> _Entry:
    run = Run.open(path)
    return _Entry(path, run.record, run.plan, run.epochs, verify(path, independent=False).reasons)


def _problems(entries: Sequence[_Entry]) -> tuple[str, ...]:
    """What does not fit, run by run: the first reason of each."""
    return tuple(f"{entry.path.name}: {entry.problems[0]}" for entry in entries if entry.problems)


def _title(groups: Sequence[Group]) -> str:
    what = list(dict.fromkeys(group.task.what for group in groups))
    return f"Methods compared on {what[0]}" if len(what) == 1 else f"Methods compared on {len(what)} tasks"


def _subtitle(groups: Sequence[Group], entries: Sequence[_Entry]) -> str:
    methods = {arm.method for group in groups for arm in group.arms}
    budgets = list(dict.fromkeys(group.task.privacy for group in groups))
    return f"{len(methods)} methods at {', '.join(budgets)}; {len(entries)} runs"


def _badges(entries: Sequence[_Entry]) -> Html:
    seeded = sum(entry.record["seed"] is not None for entry in entries)
    unfinished = sum(entry.record["status"] != "finished" for entry in entries)
    marks = [badge(f"{len(entries) - unfinished} finished", "good")]
    if unfinished:
        marks.append(badge(f"{unfinished} not finished, left out", "warn"))
    if seeded:
        marks.append(badge(f"{seeded} seeded: not for release", "warn"))
    if any(entry.plan.is_private and entry.plan.unit == ROW for entry in entries):
        marks.append(unit_badge(ROW))
    return badges(marks)


def _tiles(groups: Sequence[Group]) -> Html:
    shown: list[Child] = []
    for group in groups[:4]:
        label = f"{group.metric.title}, {group.task.privacy}"
        shown.append(tile(label, *_headline(group)))
    return tiles(shown)


def _headline(group: Group) -> tuple[str, str]:
    """The winner's mean if there is a winner, else the range of all means; and what can be said of them."""
    metric, winner = group.metric, group.winner
    means = sorted(arm.estimate.mean for arm in group.arms)
    if len(means) == 1:
        return metric.text(means[0]), group.arms[0].label
    if winner is not None:
        dense = group.baseline
        against = "" if dense in (None, winner) else f"; {BASELINE} {metric.text(dense.estimate.mean)}"
        return metric.text(winner.estimate.mean), f"{winner.label}, better than each other method{against}"
    better = ", ".join(arm.label for arm in group.improvements)
    said = f"; better than {BASELINE}: {better}" if better else ""
    return (
        f"{metric.text(means[0])} to {metric.text(means[-1])}",
        f"means; no method is resolved as best{said}",
    )


def _overviews(groups: Sequence[Group]) -> Iterator[Section]:
    private = [group for group in groups if group.task.epsilon is not None]
    for number, (_, members) in enumerate(
        groupby(private, key=lambda group: (group.task.what, group.task.unit))
    ):
        found = list(members)
        drawn = epsilon_curve(found)
        if drawn is not None:
            heading = f"{found[0].task.what}: what privacy costs"
            yield Section(f"overview-{number}", f"{heading[0].upper()}{heading[1:]}", grid(drawn))


def _group_section(number: int, group: Group, by_record: dict[int, _Entry]) -> Section:
    curves = {key: entry.epochs for key, entry in by_record.items()}
    plans = {key: entry.plan for key, entry in by_record.items()}
    table = card("In numbers", means_table(group).html(f"Methods at {group.task.privacy}"))
    return Section(
        f"group-{number}",
        f"{group.task.privacy[0].upper()}{group.task.privacy[1:]}",
        stack(
            grid(means_figure(group), differences_figure(group)),
            grid(curves_figure(group, curves)),
            table,
            noise_card(group, plans),
            layers_card(group),
        ),
        lead=f"{group.task.what}. {_SAME if group.task.epsilon is not None else _NONE_AT_ALL}",
    )


def _details_section(groups: Sequence[Group], by_record: dict[int, _Entry]) -> Section | None:
    arms = [(group, arm) for group in groups for arm in group.arms]
    if len(arms) > MOST_DETAILS:
        return None
    shown = []
    for group, arm in arms:
        run = read_run(by_record[id(arm.records[0])].path)
        title = f"{arm.label}, {group.task.privacy}, run {run.name}"
        sparse = [] if run.support.is_full else [layers_figure(run)]
        scored = [] if run.scores is None else [score_figure(run)]
        shown.append(folded(title, grid(scored, sparse, settings_card(run)), "card"))
    return Section(
        "details",
        "One run of each method",
        stack(shown),
        lead="The first seed: its scores, which coordinates stayed active, and its settings.",
    )


def _guarantee_section(groups: Sequence[Group], by_record: dict[int, _Entry]) -> Section:
    parts: list[Child] = []
    seeded = any(entry.record["seed"] is not None for entry in by_record.values())
    for group in groups:
        plan = by_record[id(group.arms[0].records[0])].plan
        words = in_words(plan, seeded=seeded, complete=True, evaluated=True)
        parts.append(statement(words, f"{group.task.what}, {group.task.privacy}"))
    first = by_record[id(groups[0].arms[0].records[0])].plan
    words = in_words(first, seeded=seeded, complete=True, evaluated=True)
    which = f", at {groups[0].task.privacy}" if len(groups) > 1 else ""
    together = card(
        "All runs together",
        bullets(
            [
                f"Each statement is about one run alone. The {len(by_record)} runs here were made on the same data: "
                "releasing several costs more than any one of them, and choosing the best by its accuracy is a "
                "release too.",
                "Compare on public data, or plan the whole comparison as one budget.",
            ]
        ),
    )
    warning = banner(words.warning, "warn" if first.is_private else "bad")
    return Section(
        "guarantee",
        "The guarantee, in words",
        join(warning, parts, stack(together, grid(guarantee_cards(words, which)))),
    )


def _runs_section(entries: Sequence[_Entry]) -> Section:
    rows = tuple(_run_row(entry) for entry in entries)
    headings = ("run", "what", "seed", "status", "epsilon", "target", "delta", "active", "held-out")
    table = Table(headings, rows, frozenset({0, 1, 3}))
    return Section("runs", "All runs", card(None, part("runs", len(entries), table)))


def _run_row(entry: _Entry) -> tuple[Child, ...]:
    record = entry.record
    metric = leading([record["metrics"]]) if record["metrics"] else None
    return (
        entry.path.name,
        title_of(record),
        NONE if record["seed"] is None else str(record["seed"]),
        record["status"],
        epsilon_text(record["epsilon"]),
        epsilon_text(record["target_epsilon"]),
        NONE if record["delta"] is None else f"{record['delta']:g}",
        NONE if record["k"] is None else f"{count(record['k'])} ({percent(record['active_ratio'], 0)})",
        NONE if metric is None else f"{metric.text(record['metrics'][metric.key])}",
    )


def write_comparison(folder: Path, out: Path | None = None) -> Path:
    """Write one HTML file that compares the runs below a folder, and say where it is.

    Raises:
        DataError: no run there, or a damaged file.
        PrivacyError: a ledger does not verify.
    """
    page = comparison_page(folder.resolve().name, find_runs(folder))
    return write_page(page, folder / REPORT if out is None else out)
