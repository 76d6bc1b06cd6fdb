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

from sparsedp.auditing.canaries import AuditTarget, Tick
from sparsedp.auditing.estimators import epsilons_of, noise_multiplier_upper_bound
from sparsedp.auditing.mechanism import audit_release, count_releases
from sparsedp.auditing.one_run import Composition, audit_one_run, group_by_step, one_step
from sparsedp.auditing.result import AuditResult, MeasuredRelease, check_all
from sparsedp.auditing.sampling import SamplerTest
from sparsedp.auditing.sensitivity import (
    count_pairs,
    explicit_sums,
    gradient_sums,
    leave_one_out,
    record_scores,
)
from sparsedp.batch import Batch, PerExampleLoss, per_sample_loss
from sparsedp.distributed import require_one_process
from sparsedp.errors import SparseDPError
from sparsedp.loading import DataConfig
from sparsedp.methods import Method
from sparsedp.methods.auto import AUTO_METHOD
from sparsedp.methods.plan_config import PlanArgs, check_asked
from sparsedp.privacy.accounting import plan_epsilon
from sparsedp.privacy.normalization import NORMALISE
from sparsedp.privacy.plan import Plan
from sparsedp.runs.run import Run, load_weights
from sparsedp.training.data import count_channels, count_units
from sparsedp.training.normalization import Normalised, check_normalisation
from sparsedp.training.planning import spec_for

STEPS = 200
RECORD_RELEASES = 100
UNITS_LEFT_OUT = 6
"""Random units left out at each batch size, for each sum."""


def attack(
    subject: AuditTarget, *, confidence: float, steps: int, progress: bool, run: str | None
) -> AuditResult:
    """Attack the whole plan with canaries, then every release of it alone; leave units of the data out of every sum.

    Of the chance of a false alarm, half goes to single releases; an eighth each to sampling, and to the guesses, the
    thresholds and the shape of the scores of the whole plan.
    """
    significance, plan, composition = 1 - confidence, subject.plan, Composition(subject.plan)
    layout = subject.make_engine().layout
    with _bar(progress, subject, steps) as tick:
        whole = audit_one_run(subject, layout, steps, tick("plan"))
        settings, targets = list(whole.settings.values()), list(whole.targets.values())
        sums = [*gradient_sums(subject, settings), *explicit_sums(subject, layout)]
        moved = leave_one_out(subject, sums, units=UNITS_LEFT_OUT, tick=tick("units"))
        share = significance / 2 / len(targets)
        found = [audit_release(target, share * 0.8, tick("noise")) for target in targets]
        records = {
            setting.phase.name: noise_multiplier_upper_bound(
                record_scores(subject, setting, RECORD_RELEASES, tick("records")), share * 0.2
            )
            for setting in settings
        }
    rates, odd_draws = _sampling(whole.draws, significance / 8 / len(plan.phases))
    measured = [
        MeasuredRelease(target, finding, moved.get(target.name), records.get(target.name))
        for target, finding in zip(targets, found, strict=True)
    ]
    noise = {one.name: one.effective_noise for one in measured}
    joint = group_by_step(targets)
    recomposed = composition.epsilon((rates[one.phase.name], one.noise(noise), one.times) for one in joint)
    estimates = epsilons_of(whole.scores, plan.delta or 0.0, significance * 3 / 8)
    claimed = plan_epsilon(plan)
    bounds = {"recomposed steps": recomposed, **estimates}
    return AuditResult(
        method=plan.method,
        unit=plan.unit,
        delta=plan.delta or 0.0,
        claimed_epsilon=claimed,
        lower_bound=max(estimates.values()),
        recomposed=recomposed,
        one_step=one_step(composition, joint, rates, noise),
        estimates=estimates,
        confidence=confidence,
        canaries=whole.scores.count + sum(finding.canaries for finding in found),
        steps=whole.steps,
        planned_steps=plan.total_steps,
        dimension=layout.dimension,
        checks=check_all(measured, list(moved.values()), odd_draws, bounds, claimed),
        attacked=(*(one.words for one in measured), *_not_attacked(plan)),
        accountant=composition.accountant,
        run=run,
    )


def _not_attacked(plan: Plan) -> Iterator[str]:
    """The losses that the plan releases: units are left out of them, and that is all."""
    yield from (
        f"{phase.name}, loss (units left out of its sum; its noise was not attacked)"
        for phase in plan.phases
        if phase.loss_bound
    )


def _sampling(draws: Mapping[str, SamplerTest], significance: float) -> tuple[dict[str, float], list[str]]:
    """Lower limits on the rates, for half the significance, and what is odd about the draws."""
    rates, problems = {}, []
    for name, found in draws.items():
        found.draw_enough(significance / 16)
        rates[name] = found.rate(significance / 2)
        problems += found.problems(significance / 2)
    return rates, problems


@contextmanager
def _bar(shown: bool, subject: AuditTarget, steps: int) -> Iterator[Callable[[str], Tick]]:
    """A progress bar with a line for each part, where there is a terminal."""
    console = Console(stderr=True)
    phases = subject.plan.phases
    totals = {
        "plan": (f"{subject.plan.method}: the plan with canaries", len(subject.some_steps(steps))),
        "units": ("leaving units out", count_pairs(subject, len(phases), UNITS_LEFT_OUT)),
        "noise": ("releases one by one", sum(count_releases(phase.noise_multiplier) for phase in phases)),
        "records": ("records through the engine", len(subject.phases) * RECORD_RELEASES),
    }
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
    unit_ids: Tensor | Sequence[int] | None = None,
    rows_per_unit: int = 1,
    max_physical_batch: int | None = None,
    collate_fn: Callable[[list[Any]], Batch] | None = None,
    engine: str = "bookkeeping",
    confidence: float = 0.95,
    steps: int = STEPS,
    progress: bool = True,
    run: Path | str | None = None,
    **asked: Unpack[PlanArgs],
) -> AuditResult:
    """Attack what `fit` would run, and give an empirical lower bound on epsilon beside the claim.

    >>> result = audit(model, data, nn.CrossEntropyLoss(reduction="none"), epsilon=3)  # doctest: +SKIP

    Args:
        model: as it would be trained; it is not moved, and the checks that `fit` makes first are left out.
        train_dataset: the data that would be protected.
        criterion: as for `fit`.
        plan: the claim, from `build_plan` or of a run; if not given, made of `method` and `asked` as `fit` does.
        method: as for `fit`; not with a plan, which has its own.
        unit_ids: the unit each row belongs to.
        rows_per_unit: rows drawn of a sampled unit.
        max_physical_batch: most rows loaded at once.
        collate_fn: makes a batch of items of the data set.
        engine: "bookkeeping", or "reference".
        confidence: chance that an honest mechanism raises no alarm; 0.95 by default, `1 - 1e-6` for a gate.
        steps: run at most so many steps of the plan with canaries.
        progress: show a progress bar on a terminal.
        run: the folder of a run: its plan is the claim, and a copy of the model with its weights is audited.
        asked: not with a plan: epsilon, delta, epochs, batch_size, max_grad_norm and all else of one, as for `fit`.

    Formal guarantees:
        It looks at private examples without noise: the result is for whoever answers for the guarantee, and not for
        release. Nothing is charged, and no run is touched.

    Raises:
        PrivacyError: the plan claims nothing.
        DataError: there is no run in the folder, or it is damaged.
    """
    require_one_process("an audit")
    if not 0 < confidence < 1:
        raise SparseDPError(f"confidence: got {confidence}, expected a number in (0, 1), such as 0.95")
    if steps < 2:
        raise SparseDPError(f"steps: got {steps}, expected at least 2")
    check_asked(asked, "audit")
    told = {"method": method, **asked}
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
    if plan is None:
        unit_name = "row" if unit_ids is None else "unit"
        chosen = {"method": AUTO_METHOD, **given}
        plan = spec_for(trained, **chosen, units=found, unit_name=unit_name).plan()
    claimed = plan
    claimed.check_calibrated()
    loading = DataConfig(
        unit_ids=unit_ids,
        rows_per_unit=rows_per_unit,
        max_physical_batch=max_physical_batch,
        collate_fn=collate_fn,
    )
    if claimed.preliminary(NORMALISE) is not None and not isinstance(model, Normalised):
        model = trained = Normalised(model, count_channels(train_dataset, collate_fn))
    check_normalisation(claimed, trained)
    subject = AuditTarget(
        model=trained,
        dataset=train_dataset,
        loss=per_sample_loss(criterion),
        plan=claimed,
        loading=loading,
        engine=engine,
    )
    if found != claimed.units:
        raise SparseDPError(f"audit: the data set has {found} units, the plan is for {claimed.units}")
    return attack(subject, confidence=confidence, steps=steps, progress=progress, run=head)


def _of_run(folder: Path, model: nn.Module) -> tuple[Plan, nn.Module, str]:
    """What a run claims, a copy of the model with its weights, and where its ledger ends; nothing is written."""
    there = Run.open(folder)
    trained = copy.deepcopy(model)
    load_weights(folder, trained)
    return there.plan, trained, there.ledger.head
