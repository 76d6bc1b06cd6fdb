"""The audit of what settings, or the run they started, would train."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import numpy as np
from torch import nn

from sparsedp.auditing import AuditResult, audit
from sparsedp.datasets.bundle import DataBundle
from sparsedp.experiments.datasets import load_data
from sparsedp.experiments.execute import check
from sparsedp.experiments.settings import Settings
from sparsedp.experiments.specimen import model_of
from sparsedp.methods import MethodOptions, get_method
from sparsedp.privacy import EqualNoise, NominalSplit
from sparsedp.privacy.normalisation import PrivateNormalisation
from sparsedp.training.request import Request


def audit_settings(
    settings: Settings, *, run: Path | None = None, confidence: float, steps: int, progress: bool
) -> AuditResult:
    """Attack what `execute` would run with these settings, or the run in a folder that it made with them."""
    found = check(settings)
    bundle = load_data(found)
    units = None if found.unit == "row" else bundle.train.units
    request = _request(found, bundle)
    return audit(
        model_of(found, bundle.input_shape, len(bundle.classes)).train(),
        bundle.train,
        nn.CrossEntropyLoss(reduction="none"),
        plan=request.new_plan() if run is None else None,
        run=run,
        method=request.method,
        options=request.options,
        units=units,
        rows_per_unit=found.rows_per_unit,
        max_physical_batch=found.max_physical_batch,
        engine=found.engine,
        confidence=confidence,
        steps=steps,
        progress=progress,
    )


def _request(found: Settings, bundle: DataBundle) -> Request:
    """What `execute` asks of `fit`, its privacy half."""
    by_row = found.unit == "row" or bundle.train.units is None
    options = MethodOptions.from_json(found.options) if found.options else None
    if found.active_ratio is not None:
        options = replace(options or MethodOptions(), active_ratio=found.active_ratio)
    units = bundle.train.units
    return Request(
        method=get_method(found.method),
        options=options,
        units=len(bundle.train) if by_row or units is None else len(np.unique(units.numpy())),
        unit="row" if by_row else bundle.unit,
        epsilon=None if found.epsilon == math.inf else found.epsilon,
        delta=found.delta,
        epochs=found.epochs,
        batch_size=found.batch_size,
        clip_norm=found.clip_norm,
        warmup_fraction=found.warmup_fraction,
        split=EqualNoise() if found.phase1_budget is None else NominalSplit(found.phase1_budget),
        noise_std=found.noise_std,
        accountant=found.accountant,
        normalise=PrivateNormalisation.from_json(found.normalise) if found.normalise else None,
    )
