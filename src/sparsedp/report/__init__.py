"""Pages of public values, each one self-contained HTML file: the report of a run, and an estimator's guarantee."""

from __future__ import annotations

import json
from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from functools import cache, partial
from importlib.resources import files
from itertools import groupby
from math import exp
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from sparsedp._files import write_atomically
from sparsedp._validate import NONE, count, epsilon_text, percent, rounded_up, significant
from sparsedp.errors import SparseDPError
from sparsedp.guarantee import describe, describe_run, epsilons, posterior
from sparsedp.methods.method import SELECT, WARM_UP
from sparsedp.methods.support_scheduler import noise_on_mean
from sparsedp.privacy.plan import Phase, Plan
from sparsedp.report.svg import line_chart, round_axis
from sparsedp.results import Result
from sparsedp.runs.directory import REPORT
from sparsedp.runs.record import SupportSpan
from sparsedp.runs.run import Run
from sparsedp.runs.verify import UNCHECKED, Verification, verify

if TYPE_CHECKING:
    from jinja2 import Environment

MAX_SEGMENTS = 24
"""Rows of the table of noise energies; a support may change at every step."""
MAX_NAMES = 60
"""Names of used features of a table."""
METRICS = {
    "auc": "held-out AUC",
    "accuracy": "held-out accuracy",
    "balanced_accuracy": "balanced accuracy",
    "loss": "held-out loss",
}
"""The metrics a report leads with, the first one there is."""


def write_report(source: Path | str | Result, out: Path | str | None = None) -> Path:
    """Write one self-contained HTML file about a run, and return its path.

    Args:
        source: a run directory, or the result of `fit` with one.
        out: the file to write; `report.html` in that directory if not given. An old report is replaced.

    Formal guarantees:
        Released and public values only. Held-out numbers are exact, and the page says so.

    Edge cases:
        The same files give the same bytes. A run whose ledger does not verify gets no report; one whose other files
        do not agree with it gets one that says so first, in red.

    Raises:
        DataError: no run there, or a damaged file.
        PrivacyError: the ledger does not verify.
    """
    folder = source.out if isinstance(source, Result) else Path(source)
    if folder is None:
        raise SparseDPError(
            "report: this run kept no directory to report on; give fit a directory for the run"
        )
    run = Run.open(folder)
    run.check_ledger()
    content = _content(run, verify(folder, independent=False))
    return _write("report.html", content, folder / REPORT if out is None else Path(out))


def write_guarantee(model: Any, path: Path | str) -> Path:
    """Write what the fit of an estimator guarantees on one page to print, and return its path."""
    plan, result = model.result_.plan, model.result_
    # The promise is the target; what the plan costs is a little less.
    epsilon = max(float(model.epsilon_), float(plan.target_epsilon or 0.0))
    content = {
        "model": model,
        "plan": plan,
        "ledger": result.ledger,
        "epsilon": epsilon,
        "odds": exp(min(epsilon, 500.0)),
        "beliefs": {chance: posterior(chance, epsilon) for chance in (0.001, 0.01, 0.1, 0.5)},
        "limitations": describe(plan, evaluated=bool(result.metrics)).limitations,
    }
    return _write("guarantee.html", content, Path(path))


def _write(template: str, content: Mapping[str, Any], target: Path) -> Path:
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(target, _environment().get_template(template).render(content).encode())
    except OSError as error:
        raise SparseDPError(f"report: cannot write {target} ({error}); give another path") from error
    return target


@cache
def _environment() -> Environment:
    from jinja2 import Environment, PackageLoader, StrictUndefined

    loader = PackageLoader("sparsedp", "report")
    found = Environment(
        loader=loader, autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    found.globals["style"] = files("sparsedp.report").joinpath("report.css").read_text(encoding="utf-8")
    for function in (count, epsilon_text, metric_text, percent, rounded_up, significant):
        found.globals[function.__name__] = function
    return found


def _content(run: Run, found: Verification) -> Mapping[str, Any]:
    """What the template shows."""
    from sparsedp.auditing.result import saved_audit

    plan, record, ledger = run.plan, run.record, run.ledger
    metrics = record["metrics"] or (run.epochs[-1].metrics if run.epochs else {})
    primary = primary_metric(metrics)
    segments = noise_segments(plan, run.spans, run.layout.dimension, run.epochs[-1].step if run.epochs else 0)
    names = ("config", "settings", "schema", "checksum", "versions", "public_seed")
    settings = {name: value for name in names if (value := record.get(name)) is not None}
    return {
        "run": run,
        "plan": plan,
        "record": record,
        "ledger": ledger,
        "guarantee": describe_run(plan, ledger, record),
        "verification": found,
        "unchecked": UNCHECKED,
        "metrics": metrics,
        "primary": primary,
        "primary_name": METRICS.get(primary or "", primary),
        "no_skill": None if primary is None else _no_skill(run, primary),
        "energy_share": energy_share(segments, run.layout.dimension),
        "support_of": _support_of,
        "noise_of": partial(noise_on_mean, plan),
        "epsilons": epsilons(plan),
        "charts": _charts(run),
        "active": run.spans[-1].by_parameter if run.spans else {slot.name: slot.size for slot in run.layout},
        "active_count": run.spans[-1].active if run.spans else run.layout.dimension,
        "features": _features(run),
        "segments": segments,
        "most_segments": MAX_SEGMENTS,
        "audit": saved_audit(run.path, ledger.head),
        "settings": json.dumps({**settings, "plan": json.loads(plan.to_json())}, indent=2),
    }


def primary_metric(metrics: Mapping[str, float | None]) -> str | None:
    """The metric to lead with: AUC, else accuracy, else the first by name; None if there is none."""
    known = [name for name, value in metrics.items() if value is not None]
    return next((name for name in (*METRICS, *sorted(known)) if name in known), None)


def metric_text(key: str, value: float | None) -> str:
    """A metric's value; shares of examples as percentages."""
    if value is None:
        return NONE
    return percent(value) if key in ("accuracy", "balanced_accuracy") else significant(value, 4)


def _no_skill(run: Run, key: str) -> tuple[str, float] | None:
    """What a model without skill reaches, and how; None where the record counts no classes."""
    counts = (run.record.get("schema") or {}).get("held_out_counts")
    if not counts or not sum(counts):
        return None
    return {
        "accuracy": ("majority class", max(counts) / sum(counts)),
        "auc": ("chance", 0.5),
        "balanced_accuracy": ("chance", 1 / sum(number > 0 for number in counts)),
    }.get(key)


def _support_of(phase: Phase) -> str:
    """A phase's support, in words."""
    rule = phase.support.plain()
    if not phase.trains:
        return "rows of tables" if phase.name == SELECT.name else "statistics of the inputs"
    if "schedule" in rule:
        ranking = rule["rule"]["name"] if isinstance(rule["rule"], dict) else rule["rule"]
        return f"{ranking}, {rule['schedule'].get('name', '')} {rule.get('active_ratio', '')}".strip()
    return "all coordinates" if rule["rule"] == "full" else " ".join((rule["rule"], *rule.get("scope", ())))


def _charts(run: Run) -> list[Mapping[str, Any]]:
    """The primary metric, the private training loss if there is one, and epsilon; epoch by epoch."""
    plan, epochs = run.plan, run.epochs
    if not epochs:
        return []
    charts, target = [], plan.target_epsilon
    if (key := primary_metric(epochs[-1].metrics)) is not None:
        points = [(float(e.epoch), value) for e in epochs if (value := e.metrics.get(key)) is not None]
        said, text = "Measured on held-out data, which is outside the guarantee.", partial(metric_text, key)
        charts.append(_chart(run, METRICS.get(key, key), points, said, text, _no_skill(run, key)))
    losses = [(float(e.epoch), e.training_loss) for e in epochs if e.training_loss is not None]
    if losses:
        said = "The mean loss of each epoch's last batch, released with noise, so it is within the guarantee."
        charts.append(_chart(run, "training loss", losses, said))
    said = (
        f"Of the plan's steps so far, for one {plan.unit}, at delta {significant(plan.delta or 0)}, by the "
        f"{plan.accountant} accountant. The guarantee is the whole plan's, also of a run stopped early."
    )
    level = None if target is None else (f"target {epsilon_text(target)}", target)
    points = [(0.0, 0.0), *((float(e.epoch), e.epsilon) for e in epochs)]
    return [*charts, _chart(run, "epsilon", points, said, epsilon_text, level)]


def _chart(
    run: Run,
    title: str,
    points: list[tuple[float, float]],
    caption: str,
    text: Callable[[float], str] = significant,
    level: tuple[str, float] | None = None,
) -> Mapping[str, Any]:
    """A line by epoch, with the warm-up marked."""
    first, last = run.plan.training[0], run.epochs[-1].epoch
    warm_up = ("warm-up", first.steps / run.plan.steps_per_epoch) if first.name == WARM_UP.name else None
    svg = line_chart(
        round_axis("epoch", (0, last), whole=True),
        round_axis(title, [y for _, y in points] + ([] if level is None else [level[1]]), text),
        points,
        f"{title} by epoch, ending at {text(points[-1][1])} after epoch {last}.",
        band=warm_up,
        level=level,
    )
    rows = [(f"{x:g}", text(y)) for x, y in points]
    return {"title": title, "svg": svg, "caption": caption, "rows": rows}


def _features(run: Run) -> str | None:
    """The features of an estimator's table that an active coordinate multiplies, by name."""
    schema = run.record.get("schema") or {}
    if schema.get("features") is None:
        return None
    used = run.support.inputs(run.layout, schema["features"])
    names = schema.get("feature_names") or [f"feature {number}" for number in range(schema["features"])]
    shown = ", ".join(str(names[number]) for number in used[:MAX_NAMES]) or "none but the bias"
    more = f" and {len(used) - MAX_NAMES} more" if len(used) > MAX_NAMES else ""
    return f"{count(len(used))} of {count(schema['features'])}: {shown}{more}"


class NoiseSegment(NamedTuple):
    """Consecutive steps of one phase with k active coordinates, and the noise nu on each of the mean gradient."""

    first: int
    steps: int
    phase: str
    active: int
    noise_std: float

    @property
    def energy(self) -> float:
        """Of the noise in one step: k nu^2."""
        return self.active * self.noise_std**2


def noise_segments(plan: Plan, spans: Sequence[SupportSpan], dimension: int, stop: int) -> list[NoiseSegment]:
    """The training steps before `stop` by phase and size of the support; before the first support all are active."""
    places = [span.step for span in spans]

    def kind(step: int) -> tuple[str, int]:
        known = bisect_right(places, step)
        return plan.phase_at(step).name, spans[known - 1].active if known else dimension

    noise = {phase.name: noise_on_mean(plan, phase) for phase in plan.training}
    segments, first = [], min(plan.first_step(phase.name) for phase in plan.training)
    for (phase, active), steps in groupby(range(first, stop), kind):
        taken = list(steps)
        segments.append(NoiseSegment(taken[0], len(taken), phase, active, noise[phase]))
    return segments


def energy_share(segments: Sequence[NoiseSegment], dimension: int) -> float | None:
    """Noise energy as a share of what the same steps would add on all coordinates; None without noise."""
    dense = sum(part.steps * dimension * part.noise_std**2 for part in segments)
    return sum(part.steps * part.energy for part in segments) / dense if dense else None
