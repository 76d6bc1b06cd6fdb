"""All attacks in turn, and the lower bound they come to."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

from rich.console import Console
from rich.progress import Progress
from torch import nn

from sparsedp.auditing.draws import Draws
from sparsedp.auditing.estimators import epsilons_of, noise_at_most
from sparsedp.auditing.leave_one_out import Movement, count_pairs, leave_one_out
from sparsedp.auditing.mechanism import PhaseFinding, audit_phase, count_releases, run_plan
from sparsedp.auditing.model import Training, audit_model
from sparsedp.auditing.record_canaries import record_scores
from sparsedp.auditing.result import AuditResult
from sparsedp.auditing.subject import Setting, Subject
from sparsedp.privacy.accountants import accountant, plan_epsilon
from sparsedp.privacy.events import Spend
from sparsedp.runs.checks import Check

STEPS = 200
RECORD_RELEASES = 100
UNITS_LEFT_OUT = 6
"""Random units left out at each batch size, in each phase."""

LEAST_NOISE = 0.25

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
    """The leave-one-out audit, then the mechanism audit one step at a time and over the plan.

    Of the chance of a false alarm, half goes to single steps; an eighth each to sampling, and to the guesses, the
    thresholds and the shape of the scores of the whole plan. Models that are trained take an eighth beforehand.
    """
    whole_risk, plan = 1 - confidence, subject.plan
    risk = whole_risk if training is None else whole_risk * 7 / 8
    layout = subject.make_engine().layout
    count = len(subject.phases)
    with _bar(progress, count, subject, steps, training) as tick:
        whole = run_plan(subject, layout, steps, tick("plan"))
        settings = list(whole.settings.values())
        moved = leave_one_out(subject, settings, units=UNITS_LEFT_OUT, tick=tick("units"))
        share = risk / 2 / count
        phases = [audit_phase(subject, one, layout, share * 0.8, tick("noise")) for one in settings]
        records = _records(subject, settings, share * 0.2, tick("records"))
        models = (
            None
            if training is None
            else audit_model(subject, fresh, training, whole_risk - risk, tick("models"))
        )
    rates, odd_draws = _sampling(whole.draws, risk / 8 / count)
    noise = {found.name: _effective(found, records[found.name], moved) for found in phases}
    estimates = {
        "composed": _epsilon(subject, rates, noise),
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
        one_step=_one_step(subject, rates, noise),
        estimates=estimates,
        confidence=confidence,
        canaries=whole.scores.count + sum(found.canaries for found in phases),
        steps=whole.steps,
        planned_steps=plan.total_steps,
        dimension=layout.dimension,
        checks=_checks(phases, moved, odd_draws, estimates, claimed, noise, subject),
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


def _effective(found: PhaseFinding, record: float, moved: Movement) -> float:
    """The least noise, over the farthest a unit moves the sum, that is beyond doubt."""
    return min(found.noise, found.worst_noise, record) / max(1.0, moved.ratio if not moved.within else 1.0)


def _epsilon(subject: Subject, rates: Mapping[str, float], noise: Mapping[str, float]) -> float:
    """Epsilon of releases with the rates and noise found; what could not be measured counts as released to nobody."""
    spends = [
        Spend(rates[phase.name], noise[phase.name], phase.steps)
        for phase in subject.phases
        if math.isfinite(noise[phase.name]) and rates[phase.name] > 0
    ]
    return _cost(spends, subject.plan.delta or 0.0)


def _cost(spends: list[Spend], delta: float) -> float:
    """Their epsilon; noise below `LEAST_NOISE` counts as that much: still a lower bound, and quick."""
    known = [
        s if s.noise_multiplier == 0 else s._replace(noise_multiplier=max(s.noise_multiplier, LEAST_NOISE))
        for s in spends
    ]
    return accountant("pld").epsilon(known, delta) if known else 0.0


def _one_step(subject: Subject, rates: Mapping[str, float], noise: Mapping[str, float]) -> dict[str, float]:
    """Claim and lower bound of the single step that leaks most."""
    delta = subject.plan.delta or 0.0
    bounds = []
    for phase in subject.phases:
        claim = _cost([Spend(phase.sampling_rate, phase.noise_multiplier, 1)], delta)
        known = math.isfinite(noise[phase.name]) and rates[phase.name] > 0
        bounds.append(
            (claim, _cost([Spend(rates[phase.name], noise[phase.name], 1)], delta) if known else 0.0)
        )
    claim, bound = max(bounds, key=lambda pair: pair[0])
    return {"claimed_epsilon": claim, "lower_bound": bound}


def _checks(
    phases: list[PhaseFinding],
    moved: Movement,
    odd_draws: list[str],
    estimates: Mapping[str, float],
    claimed: float,
    noise: Mapping[str, float],
    subject: Subject,
) -> tuple[Check, ...]:
    far = (
        f"{moved.unit} in a batch of {moved.batch} moved the sum of phase {moved.phase} by {moved.ratio:.4g} times "
        "the stated sensitivity; the model, the loss or the loading lets one unit change what others add"
    )
    checks = [
        Check(f"one unit moves the clipped sum by at most the clip norm ({moved.tried} pairs of batches)")
        if moved.within
        else Check("one unit moves the clipped sum by at most the clip norm", far),
        Check(
            "every unit is sampled by a coin of its own, at the planned rate", "; ".join(odd_draws) or None
        ),
    ]
    for found, phase in zip(phases, subject.phases, strict=True):
        if found.worst_noise < phase.noise_multiplier:
            where = (
                f"coordinate {found.worst_coordinate} has noise of at most {found.worst_noise:.3g} clip norms"
            )
            checks.append(Check(f"{found.name}: every active coordinate gets its noise", where))
        elif min(found.noise, noise[found.name] * max(1.0, moved.ratio)) < phase.noise_multiplier:
            what = f"a canary meets noise of at most {min(found.noise, noise[found.name]):.3g} times what it adds"
            checks.append(Check(f"{found.name}: noise of {phase.noise_multiplier:.3g} clip norms", what))
        else:
            checks.append(Check(f"{found.name}: all {found.active:,} active coordinates get their noise"))
        checks.append(Check(f"{found.name}: the noise has no pattern", "; ".join(found.problems) or None))
    over = [name for name, bound in estimates.items() if bound > claimed]
    problem = f"passed by {', '.join(over)}" if over else None
    return (*checks, Check("no lower bound passes the claimed epsilon", problem))


@contextmanager
def _bar(
    shown: bool, phases: int, subject: Subject, steps: int, training: Training | None
) -> Iterator[Callable[[str], Tick]]:
    """A progress bar with a line for each part, where there is a terminal."""
    console = Console(stderr=True)
    totals = {
        "plan": (f"{subject.plan.method}: the plan with canaries", len(subject.some_steps(steps))),
        "units": ("leaving units out", count_pairs(subject, phases, UNITS_LEFT_OUT)),
        "noise": ("releases of one step", sum(map(count_releases, subject.phases))),
        "records": ("records through the engine", phases * RECORD_RELEASES),
    }
    if training is not None:
        totals["models"] = ("models with planted records", training.trainings * subject.plan.training_steps)
    with Progress(console=console, transient=True, disable=not (shown and console.is_terminal)) as bar:
        tasks = {name: bar.add_task(words, total=total) for name, (words, total) in totals.items()}
        yield lambda name: lambda done: bar.advance(tasks[name], done)
