"""How a run went: accuracy and epsilon over time, and the noise it added."""

from __future__ import annotations

from collections.abc import Sequence

from sparsedp.methods.method import WARM_UP
from sparsedp.privacy.plan import Plan
from sparsedp.report.chart import Band, Level, Series, line_chart
from sparsedp.report.energy import Stretch, energy_share, stretches
from sparsedp.report.figure import Legend, Table, figure, remark
from sparsedp.report.markup import Html
from sparsedp.report.metric import leading, metric_named
from sparsedp.report.numbers import NONE, count, epsilon_text, percent, significant
from sparsedp.report.references import drawn, majority, told
from sparsedp.report.run import ReportedRun
from sparsedp.report.scale import linear_axis
from sparsedp.runs.directory import RECORD
from sparsedp.runs.record import EpochMetrics

MORE_METRICS = ("accuracy", "balanced_accuracy", "sensitivity", "specificity")
MOST_ROWS = 200
"""Of the table of noise energies; a support may change at every step."""
STYLES = ("main", "second", "third", "fourth", "fifth")


def accuracy_figure(run: ReportedRun) -> Html:
    """Held-out numbers epoch by epoch."""
    if not run.epochs:
        return _nothing_yet("Held-out numbers")
    metric = leading([report.metrics for report in run.epochs])
    if metric is None:
        return remark("Held-out numbers", "This run was not evaluated on held-out data.")
    keys = [metric.key]
    if metric.key in ("auc", "accuracy"):
        keys += [key for key in MORE_METRICS if key in run.epochs[-1].metrics and key not in keys]
    series = [
        Series(metric_named(key).title, _points(run.epochs, key), style)
        for key, style in zip(keys, STYLES, strict=False)
    ]
    values = [y for line in series for _, y in line.points]
    guess = majority(run.record, metric)
    shown = drawn(() if guess is None else (guess,), min(values), max(values))
    values += [one.value for one in shown]
    y = linear_axis(metric.title, min(values), max(values), text=metric.tick)
    x = linear_axis("epoch", 0, run.epochs[-1].epoch, whole=True)
    names = sorted({name for report in run.epochs for name in report.metrics})
    rows = tuple(
        (str(report.epoch), *(_number(report.metrics.get(name)) for name in names)) for report in run.epochs
    )
    last = series[0].points[-1][1]
    return figure(
        f"{metric.title[0].upper()}{metric.title[1:]}",
        lambda width: line_chart(
            width,
            x,
            y,
            series,
            f"{metric.title} by epoch, ending at {metric.text(last)} after epoch {run.epochs[-1].epoch}.",
            bands=warm_up_bands(run.plan),
            levels=[Level(one.value, one.name) for one in shown],
        ),
        f"{metric.text(last)} after the last epoch. Measured on held-out data, which is outside the guarantee."
        f"{told(() if guess is None else (guess,), metric)}",
        Table(("epoch", *names), rows),
        Legend(tuple((line.name, line.style) for line in series)) if len(series) > 1 else None,
    )


def epsilon_figure(run: ReportedRun) -> Html:
    """The plan's epsilon epoch by epoch, under its target."""
    if not run.epochs and run.plan.is_private:
        return _nothing_yet("Privacy spent")
    points = tuple((float(r.epoch), r.epsilon) for r in run.epochs if r.epsilon is not None)
    if not points:
        return remark("Privacy spent", "This run is not private: its epsilon is infinite throughout.")
    target = run.plan.target_epsilon
    highest = max(target or 0.0, *(y for _, y in points))
    x = linear_axis("epoch", 0, run.epochs[-1].epoch, whole=True)
    y = linear_axis("epsilon", 0, highest * 1.08)
    levels = () if target is None else (Level(target, f"target {epsilon_text(target)}"),)
    series = [Series("epsilon", ((0.0, 0.0), *points), "main", filled=True)]
    rows = tuple((str(r.epoch), count(r.step), r.phase, epsilon_text(r.epsilon)) for r in run.epochs)
    return figure(
        "Privacy spent: epsilon",
        lambda width: line_chart(
            width,
            x,
            y,
            series,
            f"Epsilon by epoch, rising to {epsilon_text(points[-1][1])}; the target is {epsilon_text(target)}.",
            bands=warm_up_bands(run.plan),
            levels=levels,
        ),
        f"Epsilon of the plan's steps so far, for one {run.plan.unit}, at delta {significant(run.plan.delta or 0)}, "
        f"by the {run.plan.accountant} accountant. The guarantee is the whole plan's, also of a run stopped early.",
        Table(("epoch", "steps", "phase", "epsilon"), rows, frozenset({0, 2})),
    )


def energy_figure(run: ReportedRun) -> Html:
    """Noise energy of every step on the support, against what it would be on all coordinates."""
    if not run.epochs and run.plan.is_private:
        return _nothing_yet("Noise energy")
    parts = run_stretches(run)
    d = run.layout.dimension
    share = energy_share(parts, d)
    if not parts or share is None:
        return remark("Noise energy", "No step of this run has added noise.")
    dense = [(part.first, part.steps, d * part.noise_std**2) for part in parts]
    sparse = [(part.first, part.steps, part.energy) for part in parts]
    per_epoch = run.plan.steps_per_epoch
    series = [
        Series("on all coordinates, d·ν²", _staircase(dense, per_epoch), "quiet", dashed=True, dots=False),
        Series("on the support, k·ν²", _staircase(sparse, per_epoch), "main", filled=True, dots=False),
    ]
    x = linear_axis("epoch", 0, series[0].points[-1][0], whole=True)
    y = linear_axis("noise energy of a step", 0, max(energy for _, _, energy in dense) * 1.04)
    rows = tuple(
        (
            f"{part.first} to {part.first + part.steps - 1}",
            part.phase,
            count(part.active),
            significant(part.noise_std),
            significant(part.energy),
            percent(part.active / d),
        )
        for part in parts[:MOST_ROWS]
    )
    if len(parts) > MOST_ROWS:
        rows += ((f"and {count(len(parts) - MOST_ROWS)} more, in {RECORD}", "", "", "", "", ""),)
    standardized = any(phase.geometry != "identity" for phase in run.plan.phases)
    extra = " Standardized coordinates rescale their own noise; that is not shown." if standardized else ""
    return figure(
        "Noise energy",
        lambda width: line_chart(
            width,
            x,
            y,
            series,
            f"Noise energy of each step. Over the run it adds up to {percent(share)} of dense training's.",
            bands=warm_up_bands(run.plan),
        ),
        f"Expected squared length of the noise in each released mean gradient. Noise falls on the k active of "
        f"d = {count(d)} coordinates only: over the whole run {percent(share)} of what the same steps would have "
        f"added on all of them.{extra}",
        Table(("steps", "phase", "k", "ν", "k·ν²", "of d·ν²"), rows, frozenset({0, 1})),
        Legend(tuple((line.name, f"{line.style}{' dashed' if line.dashed else ''}") for line in series)),
    )


def _nothing_yet(title: str) -> Html:
    return remark(title, "No epoch of this run is done yet, and this is shown epoch by epoch.")


def run_stretches(run: ReportedRun) -> tuple[Stretch, ...]:
    """The steps a run has taken, cut where the noise energy changes."""
    stop = run.epochs[-1].step if run.epochs else 0
    return stretches(run.plan, run.spans, run.layout.dimension, stop)


def warm_up_bands(plan: Plan) -> tuple[Band, ...]:
    """The warm-up, if there is one, in epochs."""
    first = plan.training[0]
    if first.name != WARM_UP.name:
        return ()
    return (Band(0, first.steps / plan.steps_per_epoch, "warm-up"),)


def _points(epochs: Sequence[EpochMetrics], key: str) -> tuple[tuple[float, float], ...]:
    found = ((float(report.epoch), report.metrics.get(key)) for report in epochs)
    return tuple((x, y) for x, y in found if y is not None)


def _staircase(levels: Sequence[tuple[int, int, float]], per_epoch: int) -> tuple[tuple[float, float], ...]:
    points: list[tuple[float, float]] = []
    for first, steps, value in levels:
        points += [(first / per_epoch, value), ((first + steps) / per_epoch, value)]
    return tuple(points)


def _number(value: float | None) -> str:
    return NONE if value is None else significant(value, 4)
