"""The audit of what settings, or the run they started, would train."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torch import nn

from sparsedp.auditing import AuditResult, audit
from sparsedp.auditing.canaries import AuditTarget
from sparsedp.batch import per_sample_loss
from sparsedp.loading import DataConfig
from sparsedp.methods.plan_config import PlanSpec
from sparsedp.training.planning import spec_for
from sparsedp_experiments.attacks.membership import (
    MembershipAttackConfig,
    MembershipFinding,
    attack_membership,
)
from sparsedp_experiments.data.bundle import DataBundle
from sparsedp_experiments.runs.datasets import load_data
from sparsedp_experiments.runs.execute import check, loss_of, optimizer_of, rate_of, suited_to
from sparsedp_experiments.runs.finished_model import model_of
from sparsedp_experiments.runs.settings import Settings


def audit_settings(
    settings: Settings,
    *,
    run: Path | None = None,
    confidence: float = 0.95,
    steps: int = 200,
    progress: bool = False,
) -> AuditResult:
    """Attack what `execute` would run with these settings, or the run in a folder that it made with them."""
    found, model, bundle, units = _parts(settings)
    return audit(
        model,
        bundle.train,
        loss_of(model),
        plan=_spec(model, found, bundle).plan() if run is None else None,
        run=run,
        unit_ids=units,
        rows_per_unit=found.rows_per_unit,
        max_physical_batch=found.max_physical_batch,
        engine=found.engine,
        confidence=confidence,
        steps=steps,
        progress=progress,
    )


def attack_settings(
    settings: Settings, *, records: int, trainings: int = 1, confidence: float = 0.95
) -> MembershipFinding:
    """Train what `execute` would with planted records, and tell those by the losses of the models alone: minutes."""
    found, model, bundle, units = _parts(settings)
    subject = AuditTarget(
        model=model,
        dataset=bundle.train,
        loss=per_sample_loss(loss_of(model)),
        plan=_spec(model, found, bundle).plan(),
        loading=DataConfig(
            unit_ids=units, rows_per_unit=found.rows_per_unit, max_physical_batch=found.max_physical_batch
        ),
        engine=found.engine,
    )
    how = MembershipAttackConfig(
        records=records,
        trainings=trainings,
        optimizer=optimizer_of(found),
        lr=rate_of(found, bundle, model),
    )
    return attack_membership(subject, model, how, 1 - confidence)


def _parts(settings: Settings) -> tuple[Settings, nn.Module, DataBundle, Any]:
    """Settings as they are meant, and the model, data and units that they name."""
    found = check(settings)
    bundle = load_data(found)
    units = None if found.unit == "row" else bundle.train.units
    model = model_of(found, bundle.input_shape, len(bundle.classes), bundle.vocabulary).train()
    return suited_to(model, found, bundle), model, bundle, units


def _spec(model: nn.Module, found: Settings, bundle: DataBundle) -> PlanSpec:
    """What `execute` asks of `fit`, its privacy half."""
    train = bundle.train
    by_row = found.unit == "row" or train.units is None
    return spec_for(
        model,
        found.method,
        found.method_options(),
        units=len(train) if by_row else train.unit_count,
        unit_name="row" if by_row else bundle.unit,
        **found.asked(),
    )
