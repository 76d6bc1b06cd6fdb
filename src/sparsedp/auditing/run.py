"""`audit`: attack a plan, a model and a data set, and put what was achieved beside what is claimed."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Unpack

from torch import Tensor, nn
from torch.utils.data import Dataset

from sparsedp.auditing.attack import STEPS, attack
from sparsedp.auditing.model import Training
from sparsedp.auditing.result import AuditResult
from sparsedp.auditing.subject import Subject
from sparsedp.batch import PerExampleLoss, Rows, per_sample_loss
from sparsedp.errors import PrivacyError, SparseDPError
from sparsedp.methods import Method, MethodOptions, build_plan
from sparsedp.methods.spec import METHOD, Asked, check_asked
from sparsedp.privacy.normalisation import NORMALISE
from sparsedp.privacy.plan import Plan
from sparsedp.ranks.here import refuse_ranks
from sparsedp.runs.reader import Run, load_weights
from sparsedp.sampling.loading import Loading
from sparsedp.training.batches import count_channels
from sparsedp.training.normalised import Normalised, check_normalisation
from sparsedp.training.planning import count_units


def audit(
    model: nn.Module,
    train_dataset: Dataset[Any],
    loss_fn: Callable[[Any, Tensor], Tensor] | PerExampleLoss,
    plan: Plan | None = None,
    *,
    method: str | Method | None = None,
    options: MethodOptions | None = None,
    units: Tensor | Sequence[int] | None = None,
    rows_per_unit: int = 1,
    max_physical_batch: int | None = None,
    collate: Callable[[list[Any]], Rows] | None = None,
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
        loss_fn: as for `fit`.
        plan: the claim, from `build_plan` or of a run; if not given, made of `method`, `options` and
            `asked` as `fit` does.
        method: as for `fit`; not with a plan, which has its own.
        options: changes to the method; not with a plan.
        units: the unit each row belongs to.
        rows_per_unit: rows drawn of a sampled unit.
        max_physical_batch: most rows loaded at once.
        collate: makes a batch of items of the data set.
        engine: "bookkeeping", or "reference".
        confidence: chance that an honest mechanism raises no alarm; 0.95 by default, `1 - 1e-6` for a gate.
        steps: run at most so many steps of the plan with canaries.
        training: also train models with planted records, and tell those from the models' losses alone: minutes.
        progress: show a progress bar on a terminal.
        run: the folder of a run: its plan is the claim, and a copy of the model with its weights is audited. Give the
            method's options as `fit` got them.
        asked: epsilon, delta, epochs, batch_size, clip_norm and all else of a plan, as for `fit`; not with a plan.

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
    found = count_units(train_dataset, units)
    claimed = plan or build_plan(**{"method": METHOD, **given}, units=found)
    if not claimed.is_private or claimed.delta is None:
        raise PrivacyError(
            f"audit: {claimed.method} claims no privacy, so there is nothing to audit; give a private method"
        )
    loading = Loading(
        units=units, rows_per_unit=rows_per_unit, max_physical_batch=max_physical_batch, collate=collate
    )
    if claimed.preliminary(NORMALISE) is not None and not isinstance(model, Normalised):
        model = trained = Normalised(model, count_channels(train_dataset, collate))
    check_normalisation(claimed, trained)
    subject = Subject(
        model=trained,
        dataset=train_dataset,
        loss=per_sample_loss(loss_fn),
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
