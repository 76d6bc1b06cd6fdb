"""From what a user asks to a plan: the same for every door."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Unpack, cast

import numpy as np
from torch import Tensor, nn
from torch.utils.data import Dataset

from sparsedp.core.errors import DataError, PrivacyError, PrivacyWarning, SparseDPError
from sparsedp.methods import AUTO, Given, Method, MethodOptions, PublicScores, configure, get_method
from sparsedp.methods.choice import AUTO_METHOD, choose_method
from sparsedp.methods.method import ActiveRatio
from sparsedp.methods.spec import METHOD, Asked, PlanSpec
from sparsedp.privacy.plan import Plan
from sparsedp.ranks.one import ONE_RANK, Ranks
from sparsedp.runs.folder import check_new
from sparsedp.training.plan_checks import saved_plan

GIVEN = "given"
"""The method that `public_scores` asks for."""

Units = Tensor | Sequence[int] | None


def plan_for(
    model: nn.Module,
    dataset: Dataset[Any],
    *,
    method: str | Method,
    options: MethodOptions | None,
    active_ratio: ActiveRatio | None,
    public_scores: Mapping[str, Any] | None = None,
    units: Units,
    unit: str | None,
    out: Path | str | None,
    resume: bool,
    ranks: Ranks = ONE_RANK,
    sharded: bool = False,
    **asked: Unpack[Asked],
) -> Plan:
    """The plan for this model and data: a new one, or the one of the run that goes on; all ranks must ask alike."""
    if public_scores is not None and method == AUTO_METHOD:
        method = GIVEN
    changes = _with_scores(_with_ratio(options, active_ratio), method, public_scores)
    protected, called = count_units(dataset, units), _name_of_unit(unit, dataset, units)
    if sharded:
        protected = sum(ranks.gather(protected))
    if method == AUTO_METHOD:
        trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
        # What is said of a support asks for one.
        told = changes is not None or isinstance(asked.get("clip_norm"), tuple)
        method = METHOD if told else choose_method(trained, units=protected, unit=called, **asked)
    spec = PlanSpec.asked(method, changes, units=protected, unit=called, **asked)
    ranks.alike(lambda: {"plan": spec.to_json()})
    return ranks.from_leader(lambda: _planned(spec, out, resume))


def _planned(spec: PlanSpec, out: Path | str | None, resume: bool) -> Plan:
    if out is not None and not resume:
        check_new(out)
    return saved_plan(spec, out) if resume and out is not None else spec.plan()


def count_units(dataset: Dataset[Any], units: Units) -> int:
    """How many units a data set has: rows, or the different ids among `units`.

    Raises:
        DataError: there are no rows, or not one id for each.
    """
    rows = len(cast("Any", dataset))
    if rows == 0:
        raise DataError("train_dataset is empty; give at least one row")
    if units is None:
        return rows
    if len(units) != rows:
        raise DataError(f"units: got {len(units)} ids for {rows} rows, expected one for each")
    return len(np.unique(np.asarray(units)))


def _name_of_unit(unit: str | None, dataset: Dataset[Any], units: Units) -> str:
    if units is not None:
        return "unit" if unit is None else unit
    if unit not in (None, "row"):
        raise PrivacyError(
            f"unit={unit!r} promises to protect each {unit}, which takes the {unit} of every row: give units="
        )
    if getattr(dataset, "units", None) is not None:
        warnings.warn(
            "the data set knows which unit (person) each row belongs to, but rows are protected; "
            "give units=dataset.units to protect people",
            PrivacyWarning,
            stacklevel=4,
        )
    return "row"


def _with_ratio(options: MethodOptions | None, active_ratio: ActiveRatio | None) -> MethodOptions | None:
    if active_ratio is None:
        return options
    if isinstance(active_ratio, str) and active_ratio != AUTO:
        raise SparseDPError(f"active_ratio: got {active_ratio!r}, expected a number in (0, 1] or {AUTO!r}")
    return replace(options or MethodOptions(), active_ratio=active_ratio)


def _with_scores(
    options: MethodOptions | None, method: str | Method, scores: Mapping[str, Any] | None
) -> MethodOptions | None:
    """The options with the scores named in the ranking, so that the plan says which they are."""
    if scores is None:
        return options
    row = get_method(method) if isinstance(method, str) else method
    if not isinstance(configure(row, options).ranking, Given):
        raise SparseDPError(
            f'public_scores: {row.name} does not rank by them; give method="given", or ranking="given"'
        )
    return replace(options or MethodOptions(), ranking=Given(PublicScores.of(scores).checksum))
