"""The page of many runs: methods at matched privacy, over seeds. Each run has its own report."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from itertools import groupby
from pathlib import Path
from typing import Any, final

from jinja2 import Environment, PackageLoader, StrictUndefined

from sparsedp._files import write_atomically
from sparsedp._validate import NONE, epsilon_text
from sparsedp.errors import DataError, SparseDPError
from sparsedp.guarantee import describe
from sparsedp.privacy.plan import Plan
from sparsedp.report import energy_share, noise_segments, run_title
from sparsedp.report.svg import Axis, Line, line_chart, round_axis
from sparsedp.runs.directory import REPORT, find_runs
from sparsedp.runs.record import EpochMetrics, SupportSpan
from sparsedp.runs.run import Run
from sparsedp.runs.verify import verify
from sparsedp_experiments.comparison.groups import BASELINE, Arm, Group, Record, group_records
from sparsedp_experiments.comparison.metric import MetricStyle, leading
from sparsedp_experiments.comparison.statistics import Estimate

_KEPT = 2.0
"""A reference is drawn unless it would squeeze a chart below this share of its height, as one over it."""


@final
@dataclass(frozen=True, slots=True, eq=False)
class _Entry:
    """A run as the comparison needs it."""

    path: Path
    record: Record
    plan: Plan
    epochs: tuple[EpochMetrics, ...]
    problems: tuple[str, ...]


def write_comparison(folder: Path, out: Path | None = None) -> Path:
    """Write one HTML file that compares the runs below a folder, and say where it is.

    Raises:
        DataError: no finished and evaluated run there, or a damaged file.
        PrivacyError: a ledger does not verify.
    """
    entries = []
    for path in find_runs(folder):
        run = Run.open(path)
        problems = verify(path, independent=False).reasons
        entries.append(_Entry(path, run.record, run.plan, run.epochs, problems))
    target = folder / REPORT if out is None else out
    page = _environment().get_template("comparison.html").render(_content(folder.resolve().name, entries))
    try:
        write_atomically(target, page.encode())
    except OSError as error:
        raise SparseDPError(f"report: cannot write {target} ({error}); give another out=") from error
    return target


@cache
def _environment() -> Environment:
    found = Environment(
        loader=PackageLoader("sparsedp_experiments", "comparison"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    found.globals["style"] = files("sparsedp.report").joinpath("report.css").read_text(encoding="utf-8")
    return found


def _content(name: str, entries: Sequence[_Entry]) -> Mapping[str, Any]:
    groups = group_records(entry.record for entry in entries)
    if not groups:
        raise DataError(
            f"{name}: none of the {len(entries)} runs is finished and was evaluated; there is nothing to compare. "
            "Report on one of them by its own folder"
        )
    by_record = {id(entry.record): entry for entry in entries}
    tasks = list(dict.fromkeys(group.task.what for group in groups))
    budgets = list(dict.fromkeys(group.task.privacy for group in groups))
    methods = {arm.method for group in groups for arm in group.arms}
    finished = sum(entry.record["status"] == "finished" for entry in entries)
    seeded = sum(entry.record["seed"] is not None for entry in entries)
    return {
        "title": f"Methods compared on {tasks[0] if len(tasks) == 1 else f'{len(tasks)} tasks'}",
        "subtitle": f"{len(methods)} methods at {', '.join(budgets)}; {len(entries)} runs",
        "problems": [f"{entry.path.name}: {entry.problems[0]}" for entry in entries if entry.problems],
        "finished": finished,
        "unfinished": len(entries) - finished,
        "seeded": seeded,
        "by_row": any(entry.plan.is_private and entry.plan.unit == "row" for entry in entries),
        "tiles": [(f"{g.metric.title}, {g.task.privacy}", *_headline(g)) for g in groups[:4]],
        "overviews": [chart for _, found in _by_task(groups) if (chart := _epsilon_chart(found)) is not None],
        "groups": [_shown(group, by_record) for group in groups],
        "guarantee": describe(by_record[id(groups[0].arms[0].records[0])].plan, seeded=seeded > 0),
        "statements": [
            (
                f"{group.task.what}, {group.task.privacy}",
                describe(by_record[id(group.arms[0].records[0])].plan).statement,
            )
            for group in groups
        ],
        "runs": [_run_row(entry) for entry in entries],
    }


def _by_task(groups: Sequence[Group]) -> Sequence[tuple[Any, list[Group]]]:
    private = [group for group in groups if group.task.epsilon is not None]
    return [
        (key, list(found))
        for key, found in groupby(private, key=lambda group: (group.task.what, group.task.unit))
    ]


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


def _shown(group: Group, by_record: Mapping[int, _Entry]) -> Mapping[str, Any]:
    """One task at one budget: the table of its methods, and their curves over time."""
    metric = group.metric
    counts = sorted({arm.estimate.count for arm in group.arms})
    if counts == [1]:
        seeds = "One seed each: no interval can be given, and differences may be chance."
    else:
        seeds = f"{counts[0]} seeds each." if len(counts) == 1 else f"{counts[0]} to {counts[-1]} seeds each."
    references = "".join(
        f" {one.name[0].upper()}{one.name[1:]}: {metric.text(one.value)}." for one in group.references
    )
    return {
        "privacy": group.task.privacy,
        "what": group.task.what,
        "private": group.task.epsilon is not None,
        "rows": [_arm_row(group, arm, by_record) for arm in group.arms],
        "said": f"Final epoch, held-out data; 95 % intervals over seeds. {seeds}{references}{_unpaired(group)}",
        "curves": _curves(group, by_record),
    }


def _arm_row(group: Group, arm: Arm, by_record: Mapping[int, _Entry]) -> tuple[str, ...]:
    metric, found, record = group.metric, arm.estimate, arm.records[0]
    difference = None if group.baseline in (None, arm) else arm.against(group.baseline)
    plan = by_record[id(record)].plan
    spans = tuple(SupportSpan(**span) for span in record["supports"])
    share = energy_share(noise_segments(plan, spans, record["d"], plan.total_steps), record["d"])
    return (
        arm.label,
        metric.text(found.mean),
        NONE if difference is None else difference_text(difference, metric),
        NONE if difference is None else verdict(difference),
        str(found.count),
        NONE if found.std is None else metric.difference(found.std).lstrip("+"),
        NONE
        if found.low is None or found.high is None
        else f"{metric.text(found.low)} to {metric.text(found.high)}",
        f"{record['k']:,} ({100 * record['active_ratio']:.0f} %)",
        NONE if share is None else f"{100 * share:.1f} %",
    )


def difference_text(found: Estimate, metric: MetricStyle) -> str:
    """Write a paired difference with its interval."""
    if found.low is None or found.high is None:
        return metric.difference(found.mean)
    return (
        f"{metric.difference(found.mean)} ({metric.difference(found.low)} to {metric.difference(found.high)})"
    )


def verdict(found: Estimate) -> str:
    """Say what the interval of a difference shows."""
    if found.low is None or found.high is None:
        return "one seed, no interval"
    return "better" if found.low > 0 else "worse" if found.high < 0 else "not resolved"


def _unpaired(group: Group) -> str:
    """Why there are no differences to show, where there are none."""
    if len(group.arms) < 2:
        return ""
    if group.baseline is None:
        return f" There is no single {BASELINE} to compare with here."
    alone = all(arm is group.baseline or arm.against(group.baseline) is None for arm in group.arms)
    return f" No other method shares a seed with {BASELINE}, so nothing can be paired." if alone else ""


def _curves(group: Group, by_record: Mapping[int, _Entry]) -> Mapping[str, Any] | None:
    """Every arm's mean over seeds, epoch by epoch."""
    metric, lines = group.metric, []
    for arm in group.arms:
        by_epoch: dict[int, list[float]] = {}
        for record in arm.records:
            for report in by_record[id(record)].epochs:
                value = report.metrics.get(metric.key)
                if value is not None:
                    by_epoch.setdefault(report.epoch, []).append(value)
        if by_epoch:
            means = tuple((float(epoch), sum(v) / len(v)) for epoch, v in sorted(by_epoch.items()))
            lines.append(Line(arm.label, means, arm.style))
    if not lines:
        return None
    x = round_axis("epoch", (0, max(line.points[-1][0] for line in lines)), whole=True)
    y = round_axis(metric.title, [value for line in lines for _, value in line.points], metric.tick)
    alt = f"Mean {metric.title} of {len(lines)} methods by epoch."
    return {
        "title": "Over time",
        "svg": line_chart(x, y, lines, alt),
        "legend": [(one.name, one.style) for one in lines],
    }


def _epsilon_chart(groups: Sequence[Group]) -> Mapping[str, Any] | None:
    """Means against epsilon with their intervals side by side, where one task was run at several."""
    if len(groups) < 2 or len({group.metric for group in groups}) > 1:
        return None
    metric = groups[0].metric
    names = list(dict.fromkeys(arm.label for group in groups for arm in group.arms))
    lines = []
    for number, name in enumerate(names):
        aside = 0.2 * (number - (len(names) - 1) / 2) / max(len(names), 5)
        found = [(i, arm) for i, group in enumerate(groups) for arm in group.arms if arm.label == name]
        lines.append(
            Line(
                name,
                tuple((place + aside, arm.estimate.mean) for place, arm in found),
                found[0][1].style,
                tuple(_interval(arm.estimate, metric) for _, arm in found),
            )
        )
    said = [epsilon_text(group.task.epsilon) for group in groups]
    values = [y for line in lines for _, y in line.points]
    values += [end for line in lines for interval in line.intervals for end in interval or ()]
    room = _KEPT * (max(values) - min(values))
    shown = [
        one
        for one in dict.fromkeys(one for group in groups for one in group.references)
        if max(*values, one.value) - min(*values, one.value) <= room
    ]
    places = tuple(float(i) for i in range(len(groups)))
    x = Axis("epsilon", (-0.15, *places, len(groups) - 0.85), lambda v: said[round(v)] if v in places else "")
    y = round_axis(metric.title, [*values, *(one.value for one in shown)], metric.tick)
    alt = f"Mean {metric.title} of {len(lines)} methods at epsilon {', '.join(said)}."
    return {
        "title": f"{groups[0].task.what}: {metric.title} against epsilon",
        "svg": line_chart(x, y, lines, alt, levels=[(one.value, one.name) for one in shown]),
        "legend": [(one.name, one.style) for one in lines],
    }


def _interval(found: Estimate, metric: MetricStyle) -> tuple[float, float] | None:
    return (
        None
        if found.low is None or found.high is None
        else (metric.within(found.low), metric.within(found.high))
    )


def _run_row(entry: _Entry) -> tuple[str, ...]:
    record = entry.record
    metric = leading([record["metrics"]]) if record["metrics"] else None
    return (
        entry.path.name,
        run_title(record),
        NONE if record["seed"] is None else str(record["seed"]),
        record["status"],
        epsilon_text(record["epsilon"]),
        NONE if record["delta"] is None else f"{record['delta']:g}",
        NONE if metric is None else metric.text(record["metrics"][metric.key]),
    )
