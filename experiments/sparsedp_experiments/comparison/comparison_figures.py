"""The other figures of a comparison: curves, noise, layers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from sparsedp.privacy.plan import Plan
from sparsedp.report.chart import Level, Series, line_chart
from sparsedp.report.energy import Stretch, energy_share, stretches
from sparsedp.report.figure import Legend, Table, card, figure
from sparsedp.report.markup import Child, Html, tag
from sparsedp.report.metric import MetricStyle
from sparsedp.report.numbers import NONE, count, epsilon_text, percent, significant
from sparsedp.report.references import drawn, told
from sparsedp.report.run import Record
from sparsedp.report.scale import Axis, linear_axis
from sparsedp.runs.record import EpochMetrics, SupportSpan
from sparsedp_experiments.comparison.groups import Group
from sparsedp_experiments.comparison.statistics import Estimate

Curves = Mapping[int, tuple[EpochMetrics, ...]]
"""The epochs of a run, by the identity of its record."""


def curves_figure(group: Group, curves: Curves) -> Html | None:
    """Every arm's mean epoch by epoch."""
    metric = group.metric
    series = []
    for arm in group.arms:
        runs = [curves[id(record)] for record in arm.records if curves.get(id(record))]
        points = _mean_curve(runs, metric.key)
        if points:
            series.append(Series(arm.label, points, arm.style, dots=False))
    if not series:
        return None
    values = [y for line in series for _, y in line.points]
    x = linear_axis("epoch", 0, max(line.points[-1][0] for line in series), whole=True)
    y = linear_axis(metric.title, min(values), max(values), text=metric.tick)
    epochs = sorted({epoch for line in series for epoch, _ in line.points})
    by_epoch = [dict(line.points) for line in series]
    return figure(
        "Over time",
        lambda width: line_chart(
            width, x, y, series, f"Mean {metric.title} of {len(series)} methods by epoch.", height=290
        ),
        f"Mean over seeds of the {metric.title} after each epoch.",
        Table(
            ("epoch", *(line.name for line in series)),
            tuple((f"{e:g}", *(_maybe(metric, line.get(e)) for line in by_epoch)) for e in epochs),
        ),
        Legend(tuple((line.name, line.style) for line in series)),
    )


def epsilon_curve(groups: Sequence[Group]) -> Html | None:
    """Means against epsilon, where one task was run at several."""
    if len(groups) < 2 or len({group.metric for group in groups}) > 1:
        return None
    metric = groups[0].metric
    names = list(dict.fromkeys(arm.label for group in groups for arm in group.arms))
    series = [
        _slope(groups, name, aside) for name, aside in zip(names, _side_by_side(len(names)), strict=True)
    ]
    said = [epsilon_text(group.task.epsilon) for group in groups]
    places = tuple(float(i) for i in range(len(groups)))
    x = Axis("epsilon", -0.15, len(groups) - 0.85, places, lambda value: said[round(value)])
    values = [y for line in series for _, y in line.points]
    values += [end for line in series for interval in line.intervals for end in interval or ()]
    common = list(dict.fromkeys(one for group in groups for one in group.references))
    shown = drawn(common, min(values), max(values))
    values += [one.value for one in shown]
    y = linear_axis(metric.title, min(values), max(values), text=metric.tick)
    return figure(
        f"{metric.title[0].upper()}{metric.title[1:]} against epsilon",
        lambda width: line_chart(
            width,
            x,
            y,
            series,
            f"Mean {metric.title} of {len(series)} methods at epsilon {', '.join(said)}.",
            height=290,
            levels=[Level(one.value, one.name) for one in shown],
        ),
        "What more privacy costs: smaller epsilon is stricter. Bars are 95 % intervals of the mean over seeds, drawn "
        f"side by side.{told(common, metric)}",
        epsilon_table(groups),
        Legend(tuple((line.name, line.style) for line in series)),
        unfolded=True,
    )


def _side_by_side(lines: int) -> list[float]:
    """How far each line is moved to the side, so that intervals at one epsilon do not cover each other."""
    return [0.2 * (i - (lines - 1) / 2) / max(lines, 5) for i in range(lines)]


def _slope(groups: Sequence[Group], name: str, aside: float) -> Series:
    """One method's means against epsilon, with their intervals."""
    found = [(i, arm) for i, group in enumerate(groups) for arm in group.arms if arm.label == name]
    return Series(
        name,
        tuple((place + aside, arm.estimate.mean) for place, arm in found),
        found[0][1].style,
        intervals=tuple(_interval(arm.estimate, groups[0].metric) for _, arm in found),
    )


def _interval(found: Estimate, metric: MetricStyle) -> tuple[float, float] | None:
    if found.low is None or found.high is None:
        return None
    return metric.within(found.low), metric.within(found.high)


def epsilon_table(groups: Sequence[Group]) -> Table:
    """Mean and standard deviation of every method at every epsilon."""
    metric = groups[0].metric
    names = list(dict.fromkeys(arm.label for group in groups for arm in group.arms))
    rows = []
    for name in names:
        found = [next((arm.estimate for arm in group.arms if arm.label == name), None) for group in groups]
        rows.append((name, *(NONE if one is None else _mean_and_std(one, metric) for one in found)))
    for one in dict.fromkeys(one for group in groups for one in group.references):
        has = [metric.text(one.value) if one in group.references else NONE for group in groups]
        rows.append((one.name, *has))
    return Table(
        ("method", *(f"epsilon {epsilon_text(group.task.epsilon)}" for group in groups)), tuple(rows)
    )


def noise_card(group: Group, plans: Mapping[int, Plan]) -> Html:
    """How many coordinates each arm trained and how much noise it added."""
    rows: list[tuple[Child, ...]] = []
    for arm in group.arms:
        record = arm.records[0]
        plan = plans[id(record)]
        share = energy_share(_stretches(record, plan), record["d"])
        main = plan.phases[-1]
        rows.append(
            (
                arm.label,
                count(record["k"]),
                percent(record["active_ratio"]),
                significant(main.noise_multiplier, 4) if main.noise_multiplier else NONE,
                NONE if share is None else percent(share),
            )
        )
    table = Table(
        ("method", "active at the end", "of all", "noise multiplier", "noise energy of dense"), tuple(rows)
    )
    return card(
        "Coordinates and noise",
        tag(
            "p",
            {"class": "note"},
            "Noise energy is the expected squared length of the added noise, k·ν² a step, summed over the run, "
            "against d·ν² for the same steps on all coordinates. First seed of each method.",
        ),
        table.html("Coordinates and noise by method"),
    )


def layers_card(group: Group) -> Html | None:
    """Each arm's final share of every parameter, averaged over seeds; stronger is more."""
    sizes = _sizes(group)
    if sizes is None:
        return None
    rows = []
    for arm in group.arms:
        cells: list[Child] = []
        for name, size in sizes.items():
            kept = [record["supports"][-1]["by_parameter"][name] / size for record in arm.records]
            share = sum(kept) / len(kept)
            swatch = tag("span", {"class": "swatch", "style": f"opacity:{max(0.04, 0.42 * share):.2f}"})
            cells.append(tag("span", {"class": "heat"}, swatch, percent(share, 0)))
        rows.append((arm.label, *cells))
    return card(
        "Share of each parameter that stays active",
        Table(("method", *sizes), tuple(rows)).html("Active share by method and parameter"),
    )


def _mean_and_std(found: Estimate, metric: MetricStyle) -> str:
    spread = "" if found.std is None else f" ± {metric.difference(found.std).lstrip('+')}"
    return f"{metric.text(found.mean)}{spread}"


def _maybe(metric: MetricStyle, value: float | None) -> str:
    return NONE if value is None else metric.text(value)


def _mean_curve(runs: Sequence[tuple[EpochMetrics, ...]], key: str) -> tuple[tuple[float, float], ...]:
    by_epoch: dict[int, list[float]] = {}
    for run in runs:
        for report in run:
            value = report.metrics.get(key)
            if value is not None:
                by_epoch.setdefault(report.epoch, []).append(value)
    return tuple((float(epoch), sum(found) / len(found)) for epoch, found in sorted(by_epoch.items()))


def _stretches(record: Record, plan: Plan) -> tuple[Stretch, ...]:
    spans = tuple(SupportSpan(**span) for span in record["supports"])
    return stretches(plan, spans, record["d"], plan.total_steps)


def _sizes(group: Group) -> dict[str, int] | None:
    """Coordinates of each parameter: the largest count any support of any run had, if they add up to d."""
    sizes: dict[str, int] = {}
    for arm in group.arms:
        for record in arm.records:
            for span in record["supports"]:
                for name, kept in span["by_parameter"].items():
                    sizes[name] = max(kept, sizes.get(name, 0))
    return sizes if sum(sizes.values()) == group.arms[0].records[0]["d"] and min(sizes.values()) > 0 else None
