"""`audit`: attack a plan, a model and a data set, and put what was achieved beside what is claimed."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Unpack

from rich.console import Console
from rich.progress import Progress
from torch import Tensor, nn
from torch.utils.data import Dataset

from sparsedp.auditing.canaries import Setting, Subject
from sparsedp.auditing.estimators import epsilons_of, noise_at_most
from sparsedp.auditing.mechanism import audit_release, count_releases
from sparsedp.auditing.model import Training, audit_model
from sparsedp.auditing.one_run import Composition, one_step, releases_of, run_plan
from sparsedp.auditing.result import AuditResult, MeasuredRelease, check_all
from sparsedp.auditing.sampling import Draws
from sparsedp.auditing.sensitivity import (
    count_pairs,
    explicit_sums,
    gradient_sums,
    leave_one_out,
    record_scores,
)
from sparsedp.batch import PerExampleLoss, Rows, per_sample_loss
from sparsedp.errors import PrivacyError, SparseDPError
from sparsedp.loading import DataConfig
from sparsedp.methods import Method, MethodOptions, build_plan
from sparsedp.methods.plan_config import METHOD, Asked, check_asked
from sparsedp.privacy.accounting import plan_epsilon
from sparsedp.privacy.normalization import NORMALISE
from sparsedp.privacy.plan import Plan
from sparsedp.ranks.here import refuse_ranks
from sparsedp.runs.run import Run, load_weights
from sparsedp.training.data import count_channels, count_units
from sparsedp.training.normalization import Normalised, check_normalisation

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


def audit(
    model: nn.Module,
    train_dataset: Dataset[Any],
    criterion: Callable[[Any, Tensor], Tensor] | PerExampleLoss,
    plan: Plan | None = None,
    *,
    method: str | Method | None = None,
    options: MethodOptions | None = None,
    unit_ids: Tensor | Sequence[int] | None = None,
    rows_per_unit: int = 1,
    max_physical_batch: int | None = None,
    collate_fn: Callable[[list[Any]], Rows] | None = None,
    engine: str = "bookkeeping",
    confidence: float = 0.95,
    steps: int = STEPS,
    training: Training | None = None,
    progress: bool = True,
    run: Path | str | None = None,
    **asked: Unpack[Asked],
) -> AuditResult:
    """Attack what `fit` would run, and give an empirical lower bound on epsilon beside the claim.

    >>> result = audit(model, data, nn.CrossEntropyLoss(reduction="none"), epsilon=3)  # doctest: +SKIP

    Args:
        model: as it would be trained; it is not moved, and the checks that `fit` makes first are left out.
        train_dataset: the data that would be protected.
        criterion: as for `fit`.
        plan: the claim, from `build_plan` or of a run; if not given, made of `method`, `options` and
            `asked` as `fit` does.
        method: as for `fit`; not with a plan, which has its own.
        options: changes to the method; not with a plan.
        unit_ids: the unit each row belongs to.
        rows_per_unit: rows drawn of a sampled unit.
        max_physical_batch: most rows loaded at once.
        collate_fn: makes a batch of items of the data set.
        engine: "bookkeeping", or "reference".
        confidence: chance that an honest mechanism raises no alarm; 0.95 by default, `1 - 1e-6` for a gate.
        steps: run at most so many steps of the plan with canaries.
        training: also train models with planted records, and tell those from the models' losses alone: minutes.
        progress: show a progress bar on a terminal.
        run: the folder of a run: its plan is the claim, and a copy of the model with its weights is audited. Give the
            method's options as `fit` got them.
        asked: epsilon, delta, epochs, batch_size, max_grad_norm and all else of a plan, as for `fit`; not with a
        plan.

    **Privacy.** It looks at private rows without noise: the result is for whoever answers for the guarantee, and not
    for release. Nothing is charged, and no run is touched.

    Raises:
        PrivacyError: the plan claims nothing.
        DataError: there is no run in the folder, or it is damaged.
    """
    refuse_ranks("an audit")
    if not 0 < confidence < 1:
        raise SparseDPError(f"confidence: got {confidence}, expected a number in (0, 1), such as 0.95")
    if steps < 2:
        raise SparseDPError(f"steps: got {steps}, expected at least 2")
    check_asked(asked, "audit")
    told = {"method": method, "options": options, **asked}
    given: dict[str, Any] = {name: value for name, value in told.items() if value is not None}
    head, trained = None, model
    if run is not None:
        if plan is not None:
            raise SparseDPError("audit: got a run and a plan; the run has its own, so drop one of them")
        plan, trained, head = _of_run(Path(run), model)
    if plan is not None and given:
        raise SparseDPError(
            f"audit: got a plan and {sorted(given)}; the plan has its own, so drop them or it"
        )
    found = count_units(train_dataset, unit_ids)
    claimed = plan or build_plan(**{"method": METHOD, **given}, units=found)
    if not claimed.is_private or claimed.delta is None:
        raise PrivacyError(
            f"audit: {claimed.method} claims no privacy, so there is nothing to audit; give a private method"
        )
    loading = DataConfig(
        unit_ids=unit_ids,
        rows_per_unit=rows_per_unit,
        max_physical_batch=max_physical_batch,
        collate_fn=collate_fn,
    )
    if claimed.preliminary(NORMALISE) is not None and not isinstance(model, Normalised):
        model = trained = Normalised(model, count_channels(train_dataset, collate_fn))
    check_normalisation(claimed, trained)
    subject = Subject(
        model=trained,
        dataset=train_dataset,
        loss=per_sample_loss(criterion),
        plan=claimed,
        loading=loading,
        engine=engine,
    )
    if found != claimed.units:
        raise SparseDPError(f"audit: the data set has {found} units, the plan is for {claimed.units}")
    return attack(
        subject,
        confidence=confidence,
        steps=steps,
        progress=progress,
        run=head,
        fresh=model,
        training=training,
    )


def _of_run(folder: Path, model: nn.Module) -> tuple[Plan, nn.Module, str]:
    """What a run claims, a copy of the model with its weights, and where its ledger ends; nothing is written."""
    there = Run.open(folder)
    trained = copy.deepcopy(model)
    load_weights(folder, trained)
    return there.plan, trained, there.ledger.head
