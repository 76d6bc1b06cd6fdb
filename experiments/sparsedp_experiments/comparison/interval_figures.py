"""Means with intervals and paired differences: what a comparison over seeds can say."""

from __future__ import annotations

from collections.abc import Sequence

from sparsedp.report.figure import Table, figure
from sparsedp.report.markup import Child, Html, join, tag
from sparsedp.report.metric import MetricStyle
from sparsedp.report.numbers import NONE, count
from sparsedp.report.references import drawn, told
from sparsedp.report.scale import linear_axis
from sparsedp_experiments.comparison.groups import BASELINE, Arm, Group
from sparsedp_experiments.comparison.interval_chart import Interval, interval_chart
from sparsedp_experiments.comparison.statistics import Estimate


def means_figure(group: Group) -> Html:
    """Every arm's mean with its interval, and every seed."""
    metric = group.metric
    rows = [
        Interval(
            arm.label,
            arm.values,
            arm.estimate.mean,
            arm.estimate.low,
            arm.estimate.high,
            arm.style,
            _said(arm, metric),
        )
        for arm in group.arms
    ]
    ends = [
        metric.within(v) for row in rows for v in (*row.dots, row.mean, row.low, row.high) if v is not None
    ]
    beside = drawn(group.references, min(ends), max(ends))
    rows += [Interval(one.name, (), one.value, None, None, "quiet", metric.text(one.value)) for one in beside]
    ends += [one.value for one in beside]
    x = linear_axis(metric.title, min(ends), max(ends), text=metric.tick)
    means = [arm.estimate.mean for arm in group.arms]
    return figure(
        f"{metric.title[0].upper()}{metric.title[1:]}",
        lambda width: interval_chart(
            width,
            x,
            rows,
            f"{metric.title} of {len(means)} methods at {group.task.privacy}; means from "
            f"{metric.text(min(means))} to {metric.text(max(means))}.",
        ),
        f"Diamonds are means over seeds, bars 95 % intervals of the mean, dots single seeds. {_seeds(group)} "
        f"Final epoch, held-out data.{told(group.references, metric)}{_unpaired(group)}",
        means_table(group),
    )


def differences_figure(group: Group) -> Html | None:
    """Every arm less dp-sgd, seed by seed; nothing if no arm shares a seed with it."""
    metric, baseline = group.metric, group.baseline
    if baseline is None:
        return None
    found = [(arm, arm.against(baseline)) for arm in group.arms if arm is not baseline]
    rows = [
        Interval(
            arm.label,
            tuple(
                arm.by_seed[s] - baseline.by_seed[s]
                for s in sorted(arm.by_seed.keys() & baseline.by_seed.keys())
            ),
            difference.mean,
            difference.low,
            difference.high,
            arm.style,
            difference_text(difference, metric),
        )
        for arm, difference in found
        if difference is not None
    ]
    if not rows:
        return None
    ends = [0.0, *(v for row in rows for v in (*row.dots, row.low, row.high) if v is not None)]
    scale = 100 if metric.share else 1
    x = linear_axis(
        f"difference in {metric.unit}", min(ends), max(ends), text=lambda v: f"{scale * v:+.3g}" if v else "0"
    )
    return figure(
        f"Difference to {BASELINE}",
        lambda width: interval_chart(
            width,
            x,
            rows,
            f"Paired differences to {BASELINE} at {group.task.privacy}: {_summary(rows)}",
            reference=0.0,
        ),
        f"Paired over seeds: runs of one seed share batches and noise stream. Right of the dashed line is better "
        f"than {BASELINE}. Intervals are 95 % each, not adjusted for the number of methods.",
        Table(
            ("method", "pairs", "difference", "95 % interval", "verdict"),
            tuple(
                (
                    arm.label,
                    count(d.count),
                    metric.difference(d.mean),
                    interval_text(d, metric),
                    verdict_mark(d),
                )
                for arm, d in found
                if d is not None
            ),
        ),
    )


def means_table(group: Group) -> Table:
    """Mean, difference to dp-sgd, spread and interval of every arm; what a phone cuts off comes last."""
    metric = group.metric
    rows: list[tuple[Child, ...]] = []
    for arm in group.arms:
        found = arm.estimate
        difference = None if group.baseline in (None, arm) else arm.against(group.baseline)
        rows.append(
            (
                arm.label,
                metric.text(found.mean),
                NONE if difference is None else _in_two_lines(difference, metric),
                count(found.count),
                NONE if found.std is None else metric.difference(found.std).lstrip("+"),
                _range(found, metric),
            )
        )
    rows += [(one.name, metric.text(one.value), NONE, NONE, NONE, NONE) for one in group.references]
    return Table(
        (
            "method",
            "mean",
            f"paired difference to {BASELINE}",
            "seeds",
            "standard deviation",
            "95 % interval",
        ),
        tuple(rows),
    )


def difference_text(found: Estimate, metric: MetricStyle) -> str:
    """A paired difference with its interval."""
    interval = interval_text(found, metric)
    return metric.difference(found.mean) + ("" if interval == NONE else f" ({interval})")


def _in_two_lines(found: Estimate, metric: MetricStyle) -> Html:
    """The same, the interval in a line of its own."""
    interval = interval_text(found, metric)
    below = () if interval == NONE else (tag("span", {"class": "below"}, f"({interval})"),)
    return join(metric.difference(found.mean), " ", *below)


def interval_text(found: Estimate, metric: MetricStyle) -> str:
    """The interval of a difference."""
    if found.low is None or found.high is None:
        return NONE
    return f"{metric.difference(found.low)} to {metric.difference(found.high)}"


def verdict(found: Estimate) -> str:
    """What the interval of a difference says."""
    if found.low is None or found.high is None:
        return "one seed, no interval"
    return "better" if found.low > 0 else "worse" if found.high < 0 else "not resolved"


def verdict_mark(found: Estimate) -> Html:
    """The verdict, coloured."""
    said = verdict(found)
    return tag("span", {"class": said if said in ("better", "worse") else None}, said)


def _said(arm: Arm, metric: MetricStyle) -> str:
    return f"mean {metric.text(arm.estimate.mean)} over {arm.estimate.count} seeds"


def _seeds(group: Group) -> str:
    counts = sorted({arm.estimate.count for arm in group.arms})
    if counts == [1]:
        return "One seed each: no interval can be given, and differences may be chance."
    return f"{counts[0]} seeds each." if len(counts) == 1 else f"{counts[0]} to {counts[-1]} seeds each."


def _unpaired(group: Group) -> str:
    """Why there are no differences to show, where there are none."""
    if len(group.arms) < 2:
        return ""
    if group.baseline is None:
        return f" There is no single {BASELINE} to compare with here."
    alone = all(arm is group.baseline or arm.against(group.baseline) is None for arm in group.arms)
    return f" No other method shares a seed with {BASELINE}, so nothing can be paired." if alone else ""


def _summary(rows: Sequence[Interval]) -> str:
    return "; ".join(f"{row.name} {row.text}" for row in rows) + "."


def _range(found: Estimate, metric: MetricStyle) -> str:
    if found.low is None or found.high is None:
        return NONE
    return f"{metric.text(found.low)} to {metric.text(found.high)}"
