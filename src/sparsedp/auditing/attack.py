"""All attacks in turn, and the lower bound they come to."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

from rich.console import Console
from rich.progress import Progress
from torch import nn

from sparsedp.auditing.composed import Composition, one_step, releases_of
from sparsedp.auditing.draws import Draws
from sparsedp.auditing.estimators import epsilons_of, noise_at_most
from sparsedp.auditing.judged import MeasuredRelease, check_all
from sparsedp.auditing.leave_one_out import count_pairs, gradient_sums, leave_one_out
from sparsedp.auditing.mechanism import audit_release, count_releases
from sparsedp.auditing.model import Training, audit_model
from sparsedp.auditing.record_canaries import record_scores
from sparsedp.auditing.result import AuditResult
from sparsedp.auditing.subject import Setting, Subject
from sparsedp.auditing.sums import explicit_sums
from sparsedp.auditing.whole_plan import run_plan
from sparsedp.privacy.accountants import plan_epsilon

STEPS = 200
RECORD_RELEASES = 100
UNITS_LEFT_OUT = 6
"""Random units left out at each batch size, for each sum."""

Tick = Callable[[int], None]


def attack(
    subject: Subject,
    *,
    confidence: float,
    steps: int,
    progress: bool,
    run: str | None,
    fresh: nn.Module,
    training: Training | None,
) -> AuditResult:
    """The whole plan with canaries, then every release of it alone, and units of the data left out of every sum.

    Of the chance of a false alarm, half goes to single releases; an eighth each to sampling, and to the guesses, the
    thresholds and the shape of the scores of the whole plan. Models that are trained take an eighth beforehand.
    """
    whole_risk, plan, composition = 1 - confidence, subject.plan, Composition(subject.plan)
    risk = whole_risk if training is None else whole_risk * 7 / 8
    layout = subject.make_engine().layout
    with _bar(progress, subject, steps, training) as tick:
        whole = run_plan(subject, layout, steps, tick("plan"))
        settings, targets = list(whole.settings.values()), list(whole.targets.values())
        sums = [*gradient_sums(subject, settings), *explicit_sums(subject, layout)]
        moved = leave_one_out(subject, sums, units=UNITS_LEFT_OUT, tick=tick("units"))
        share = risk / 2 / len(targets)
        found = [audit_release(target, share * 0.8, tick("noise")) for target in targets]
        records = _records(subject, settings, share * 0.2, tick("records"))
        models = (
            None
            if training is None
            else audit_model(subject, fresh, training, whole_risk - risk, tick("models"))
        )
    rates, odd_draws = _sampling(whole.draws, risk / 8 / len(plan.phases))
    measured = [
        MeasuredRelease(target, finding, moved.get(target.name), records.get(target.name))
        for target, finding in zip(targets, found, strict=True)
    ]
    noise = {one.name: one.effective_noise for one in measured}
    together = releases_of(targets)
    composed = composition.epsilon(
        (rates[each.phase.name], each.noise(noise), each.times) for each in together
    )
    estimates = {
        "composed": composed,
        **epsilons_of(whole.scores, plan.delta or 0.0, risk * 3 / 8),
        **({} if models is None else {"models": models.lower_bound}),
    }
    claimed = plan_epsilon(plan)
    return AuditResult(
        method=plan.method,
        unit=plan.unit,
        delta=plan.delta or 0.0,
        claimed_epsilon=claimed,
        lower_bound=max(estimates.values()),
        one_step=one_step(composition, together, rates, noise),
        estimates=estimates,
        confidence=confidence,
        canaries=whole.scores.count + sum(finding.canaries for finding in found),
        steps=whole.steps,
        planned_steps=plan.total_steps,
        dimension=layout.dimension,
        checks=check_all(measured, list(moved.values()), odd_draws, estimates, claimed),
        attacked=tuple(one.words for one in measured),
        accountant=composition.accountant,
        run=run,
        model=None if models is None else models.to_json(),
    )


def _records(subject: Subject, settings: list[Setting], risk: float, tick: Tick) -> dict[str, float]:
    found = {}
    for setting in settings:
        scores = record_scores(subject, setting, RECORD_RELEASES, tick)
        found[setting.phase.name] = noise_at_most(scores, risk)
    return found


def _sampling(draws: Mapping[str, Draws], risk: float) -> tuple[dict[str, float], list[str]]:
    """Lower limits on the rates, for half the risk, and what is odd about the draws."""
    rates, problems = {}, []
    for name, found in draws.items():
        found.draw_enough(risk / 16)
        rates[name] = found.rate(risk / 2)
        problems += found.problems(risk / 2)
    return rates, problems


@contextmanager
def _bar(
    shown: bool, subject: Subject, steps: int, training: Training | None
) -> Iterator[Callable[[str], Tick]]:
    """A progress bar with a line for each part, where there is a terminal."""
    console = Console(stderr=True)
    phases = subject.plan.phases
    totals = {
        "plan": (f"{subject.plan.method}: the plan with canaries", len(subject.some_steps(steps))),
        "units": ("leaving units out", count_pairs(subject, len(phases), UNITS_LEFT_OUT)),
        "noise": ("releases one by one", sum(count_releases(phase.noise_multiplier) for phase in phases)),
        "records": ("records through the engine", len(subject.phases) * RECORD_RELEASES),
    }
    if training is not None:
        totals["models"] = ("models with planted records", training.trainings * subject.plan.training_steps)
    with Progress(console=console, transient=True, disable=not (shown and console.is_terminal)) as bar:
        tasks = {name: bar.add_task(words, total=total) for name, (words, total) in totals.items()}
        yield lambda name: lambda done: bar.advance(tasks[name], done)
