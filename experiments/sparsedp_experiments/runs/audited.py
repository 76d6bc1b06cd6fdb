"""The audit of what settings, or the run they started, would train."""

from __future__ import annotations

from pathlib import Path

from torch import nn

from sparsedp.auditing import AuditResult, Training, audit
from sparsedp.methods.plan_config import PlanSpec
from sparsedp.training.planning import spec_for
from sparsedp_experiments.data.bundle import DataBundle
from sparsedp_experiments.runs.execute import check, load_data, loss_of, optimizer_of, rate_of, suited_to
from sparsedp_experiments.runs.finished_model import model_of
from sparsedp_experiments.runs.settings import Settings


def audit_settings(
    settings: Settings,
    *,
    run: Path | None = None,
    confidence: float = 0.95,
    steps: int = 200,
    records: int = 0,
    trainings: int = 1,
    progress: bool = False,
) -> AuditResult:
    """Attack what `execute` would run with these settings, or the run in a folder that it made with them."""
    found = check(settings)
    bundle = load_data(found)
    units = None if found.unit == "row" else bundle.train.units
    model = model_of(found, bundle.input_shape, len(bundle.classes), bundle.vocabulary).train()
    found = suited_to(model, found, bundle)
    return audit(
        model,
        bundle.train,
        loss_of(model),
        plan=_spec(model, found, bundle).plan() if run is None else None,
        run=run,
        units=units,
        rows_per_unit=found.rows_per_unit,
        max_physical_batch=found.max_physical_batch,
        engine=found.engine,
        confidence=confidence,
        steps=steps,
        training=Training(
            records=records,
            trainings=trainings,
            optimizer=optimizer_of(found),
            lr=rate_of(found, bundle, model),
        )
        if records
        else None,
        progress=progress,
    )


def _spec(model: nn.Module, found: Settings, bundle: DataBundle) -> PlanSpec:
    """What `execute` asks of `fit`, its privacy half."""
    train = bundle.train
    by_row = found.unit == "row" or train.units is None
    return spec_for(
        model,
        found.method,
        found.method_options(),
        units=len(train) if by_row else train.unit_count,
        unit="row" if by_row else bundle.unit,
        **found.asked(),
    )
