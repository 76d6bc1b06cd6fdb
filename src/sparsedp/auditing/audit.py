"""`audit`: attack a plan, a model and a data set, and put what was achieved beside what is claimed."""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Unpack

from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from sparsedp.auditing.canaries import AuditTarget
from sparsedp.auditing.estimators import epsilon_clopper_pearson, epsilon_from_gdp, epsilon_one_run
from sparsedp.auditing.mechanism import ReleaseFinding, audit_release
from sparsedp.auditing.one_run import OneRunAudit, recompose, yardstick
from sparsedp.auditing.result import AuditResult
from sparsedp.auditing.sensitivity import SensitivityFinding, leave_one_out, sums_of
from sparsedp.batch import PerExampleLoss, per_sample_loss
from sparsedp.distributed import require_one_process
from sparsedp.errors import SparseDPError
from sparsedp.loading import DataConfig
from sparsedp.methods import Method
from sparsedp.methods.auto import AUTO_METHOD
from sparsedp.methods.plan_config import PlanArgs
from sparsedp.privacy.accounting import plan_epsilon
from sparsedp.privacy.normalization import NORMALISE
from sparsedp.privacy.plan import Plan
from sparsedp.runs.run import Run, load_weights
from sparsedp.runs.verify import Check
from sparsedp.training.data import count_channels, count_units, given_data, loading_of
from sparsedp.training.normalization import Normalised, check_normalisation
from sparsedp.training.planning import RunConfig, plan_for

STEPS = 200
UNITS_LEFT_OUT = 6
"""Random units left out at each batch size, for each sum."""


def audit(
    model: nn.Module,
    train_dataset: Dataset[Any] | DataLoader[Any] | tuple[Any, Any],
    criterion: Callable[[Any, Tensor], Tensor] | PerExampleLoss,
    plan: Plan | None = None,
    *,
    method: str | Method | None = None,
    unit_ids: Tensor | Sequence[int] | None = None,
    data: DataConfig = DataConfig(),  # noqa: B008
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
        train_dataset: the data that would be protected, as for `fit`.
        criterion: as for `fit`.
        plan: the claim, from `build_plan` or of a run; if not given, made of `method` and `asked` as `fit` does.
        method: as for `fit`; not with a plan, which has its own.
        unit_ids: the unit each row belongs to.
        data: how rows are loaded, as for `fit`.
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
    settings: dict[str, Any] = {"method": method, **asked}
    settings = {name: value for name, value in settings.items() if value is not None}
    if sum((run is not None, plan is not None, bool(settings))) > 1:
        raise SparseDPError(
            f"audit: got run={run}, a plan: {plan is not None}, and the settings {sorted(settings)}; a run has its "
            "plan and a plan its settings, so keep one of the three and drop the others"
        )
    given = given_data(train_dataset, "train_dataset")
    loading = loading_of(data, given, unit_ids)
    units, head = count_units(given.dataset, loading.unit_ids), None
    if run is not None:
        opened = Run.open(run)
        plan, head, model = opened.plan, opened.ledger.head, copy.deepcopy(model)
        load_weights(run, model)
    elif plan is None:
        settings = {"method": AUTO_METHOD, "batch_size": given.batch_size, **settings}
        plan = plan_for(
            model, given.dataset, loading=loading, run=RunConfig(), run_dir=None, resume=False, **settings
        )
    plan.check_calibrated()
    if plan.preliminary(NORMALISE) is not None and not isinstance(model, Normalised):
        model = Normalised(model, count_channels(given.dataset, loading.collate_fn))
    check_normalisation(plan, model)
    if units != plan.units:
        raise SparseDPError(f"audit: the data set has {units} units, the plan is for {plan.units}")
    subject = AuditTarget(model, given.dataset, per_sample_loss(criterion), plan, loading, engine)
    return _attack(subject, confidence=confidence, steps=steps, progress=progress, run=head)


def _attack(
    subject: AuditTarget, *, confidence: float, steps: int, progress: bool, run: str | None
) -> AuditResult:
    """Attack the whole plan with canaries, then every release of it alone; leave units of the data out of every sum.

    Of the chance of a false alarm, half goes to single releases; an eighth each to sampling, and to the guesses, the
    thresholds and the shape of the scores of the whole plan.
    """
    significance, plan = 1 - confidence, subject.plan
    layout, delta, claimed = subject.make_engine().layout, plan.delta or 0.0, plan_epsilon(plan)
    whole = OneRunAudit(subject, layout)
    scores, targets = whole.run(steps, progress=progress), whole.targets
    sums = list(sums_of(subject, targets.values()))
    moved = leave_one_out(subject, sums, units=UNITS_LEFT_OUT, progress=progress)
    each = significance / 2 / len(targets)
    found = [audit_release(one, each, moved.get(name), progress=progress) for name, one in targets.items()]
    each = significance / 16 / len(plan.phases)  # half for the rates, half for the coins
    for draws in whole.draws.values():
        draws.draw_enough(each / 8)
    rates = {name: draws.rate(each) for name, draws in whole.draws.items()}
    odd_draws = [problem for draws in whole.draws.values() for problem in draws.problems(each)]
    recomposed, one_step = recompose(plan, found, rates)
    estimates = {
        "gdp": epsilon_from_gdp(scores, delta, significance / 8),
        "threshold": epsilon_clopper_pearson(scores, delta, significance / 8),
        "guesses": epsilon_one_run(scores, delta, significance / 8),
    }
    bounds = {"recomposed steps": recomposed, **estimates}
    how = "units left out of its sum; its noise was not attacked"
    not_attacked = [f"{phase.name}, loss ({how})" for phase in plan.phases if phase.loss_bound]
    return AuditResult(
        method=plan.method,
        unit=plan.unit,
        delta=delta,
        claimed_epsilon=claimed,
        lower_bound=max(estimates.values()),
        recomposed=recomposed,
        one_step=one_step,
        estimates=estimates,
        confidence=confidence,
        canaries=scores.count + sum(finding.canaries for finding in found),
        steps=whole.steps,
        planned_steps=plan.total_steps,
        dimension=layout.dimension,
        checks=tuple(_checks(found, moved.values(), odd_draws, bounds, claimed)),
        attacked=(*(one.words for one in found), *not_attacked),
        accountant=yardstick(plan),
        run=run,
    )


def _checks(
    found: Sequence[ReleaseFinding],
    moved: Collection[SensitivityFinding],
    odd_draws: list[str],
    bounds: Mapping[str, float],
    claimed: float,
) -> Iterator[Check]:
    """Everything that was tried."""
    farthest, problem = max(moved, key=lambda one: one.ratio), None
    if not farthest.within:
        problem = (
            f"{farthest.unit} in a batch of {farthest.batch} moved the sum of phase {farthest.name} by "
            f"{farthest.ratio:.4g} times the stated sensitivity; the model, the loss or the loading lets one unit "
            "change what others add"
        )
    pairs = f"{sum(one.tried for one in moved)} pairs of batches"
    yield Check(f"one unit moves the clipped sum by at most the clip norm ({pairs})", problem)
    odd = "; ".join(odd_draws) or None
    yield Check("every unit is sampled by a coin of its own, at the planned rate", odd)
    for one in found:
        yield from one.checks()
    over = ", ".join(name for name, bound in bounds.items() if bound > claimed)
    yield Check("no lower bound passes the claimed epsilon", f"passed by {over}" if over else None)
