"""From what a user asks to a plan, the same for every door; and whether a plan is for this data and this run."""

from __future__ import annotations

import json
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Unpack

from torch import nn
from torch.utils.data import Dataset

from sparsedp import distributed
from sparsedp._serialization import sha256
from sparsedp.errors import PrivacyError, PrivacyWarning, SparseDPError
from sparsedp.loading import DataConfig
from sparsedp.methods import Given, Method, PublicScores, get_method
from sparsedp.methods.auto import AUTO_METHOD, choose_method, is_linear
from sparsedp.methods.plan_config import METHOD, PlanArgs, PlanConfig
from sparsedp.privacy.calibration import EqualNoise, RdpFilter
from sparsedp.privacy.plan import Plan
from sparsedp.runs.directory import check_new
from sparsedp.runs.record import RunMetadata
from sparsedp.runs.run import Run, continue_runs, declared_filter
from sparsedp.training.data import count_units


@dataclass(frozen=True, slots=True, kw_only=True)
class RunConfig:
    """What a run is beside its training.

    Attributes:
        total_epsilon: declares, before a first run, that it and all runs that continue it stay within this epsilon at
            `delta`, whatever its results make you do next. `epsilon` is then what the first run alone is calibrated
            to; the result's epsilon is counted as the cap is, by one Renyi order, and is somewhat more.
        continue_from: the folder of such a run, or of all runs under its cap: this run gets what is left of the cap,
            and the earlier ones cannot be resumed any more. Give neither epsilon nor delta, but the same units.
        engine: "bookkeeping", or "reference", which is slow and takes any model.
        metadata: names for the record.
    """

    total_epsilon: float | None = None
    continue_from: Path | str | Sequence[Path | str] = ()
    engine: str = "bookkeeping"
    metadata: RunMetadata = field(default_factory=RunMetadata)


GIVEN = "given"
"""The method that `public_scores` asks for."""


def changed_method(method: str | Method, **settings: Any) -> str | Method:
    """A method with changes that were told one by one, None for none; "auto" with changes is a learned support."""
    given = {name: value for name, value in settings.items() if value is not None}
    if not given:
        return method
    row = get_method(METHOD if method == AUTO_METHOD else method) if isinstance(method, str) else method
    return row.changed(**given)


def plan_for(
    model: nn.Module,
    dataset: Dataset[Any],
    method: str | Method,
    loading: DataConfig,
    run: RunConfig,
    *,
    run_dir: Path | str | None,
    resume: bool,
    public_scores: Mapping[str, Any] | None = None,
    **asked: Unpack[PlanArgs],
) -> Plan:
    """The plan for this model and data: a new one, or the one of the run that goes on; all ranks must ask alike."""
    total, continued = run.total_epsilon, run.continue_from
    earlier = [continued] if isinstance(continued, (str, Path)) else continued
    cap = _cap(earlier, total, run_dir, asked) if earlier or total is not None else None
    if cap is not None:
        asked["epsilon"], asked["delta"] = cap.epsilon, cap.delta
    if public_scores is not None:
        method = GIVEN if method == AUTO_METHOD else method
        row = get_method(method) if isinstance(method, str) else method
        if not isinstance(row.ranking, Given):
            raise SparseDPError(
                f'public_scores: {row.name} does not rank by them; give method="given", or ranking="given"'
            )
        # Named in the ranking, so that the plan says which scores they are.
        method = replace(row, ranking=Given(PublicScores.of(public_scores).checksum))
    protected = distributed.all_or_raise(lambda: count_units(dataset, loading.unit_ids))
    called = _name_of_unit(dataset, loading)
    if loading.sharded:
        protected = sum(distributed.gather(protected))
    spec = spec_for(model, method, units=protected, unit_name=called, **asked)
    distributed.check_same_on_all_ranks(lambda: {"plan": spec.to_json()})

    def planned() -> Plan:
        if run_dir is not None and resume:
            return _saved_plan(spec, run_dir, total, continues=cap is not None)
        if run_dir is not None:
            check_new(run_dir)
        return _new_plan(spec, run_dir, total, earlier, cap)

    return distributed.broadcast_from_main(planned)


def spec_for(
    model: nn.Module, method: str | Method, *, units: int, unit_name: str, **asked: Unpack[PlanArgs]
) -> PlanConfig:
    """What is asked of a plan for this model; "auto" goes by public numbers, and is sparse for two clip norms."""
    if method == AUTO_METHOD and isinstance(asked.get("max_grad_norm"), tuple):
        method = METHOD
    elif method == AUTO_METHOD:
        trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
        linear = is_linear(model)
        method, _ = choose_method(trained, linear=linear, units=units, unit_name=unit_name, **asked)
    return PlanConfig.asked(method, units=units, unit_name=unit_name, **asked)


def _new_plan(
    spec: PlanConfig,
    out: Path | str | None,
    total: float | None,
    earlier: Sequence[Path | str],
    cap: RdpFilter | None,
) -> Plan:
    """The plan within what is left of the cap of earlier runs; or of a first run, with the cap that it declares.

    Formal guarantees: Cap and order are in the first run's plan, so they are settled before its first release. A plan
    that continues is for the folder `out` alone: asked for once more with another, it counts beside the first.
    """
    if cap is not None and out is not None:
        draft = spec.draft()
        split = spec.split if len(draft.training) > 1 else EqualNoise()
        return continue_runs(cap, draft, earlier, split, sha256(str(Path(out).resolve())))
    found = spec.plan()
    if total is None:
        return found
    assert found.delta is not None
    return RdpFilter.for_first_plan(found, total, found.delta).declared(found)


def _cap(
    earlier: Sequence[Path | str], total: float | None, run_dir: Path | str | None, asked: PlanArgs
) -> RdpFilter | None:
    """The cap of the runs that are continued; None for a first run, which declares one."""
    if run_dir is None:
        raise PrivacyError("total_epsilon and continue_from are for runs with a ledger; give run_dir")
    if not earlier:
        return None
    told = [
        name for name in ("epsilon", "noise_multiplier", "delta", "accountant") if asked.get(name) is not None
    ]
    told += [] if total is None else ["total_epsilon"]
    if told:
        raise PrivacyError(
            f"continue_from: got {', '.join(told)} as well, expected none: the run gets what is left of the cap that "
            "the first one declared"
        )
    return distributed.broadcast_from_main(lambda: declared_filter(earlier))


def _name_of_unit(dataset: Dataset[Any], loading: DataConfig) -> str:
    unit = loading.unit_name
    if loading.unit_ids is not None:
        return "unit" if unit is None else unit
    if unit not in (None, "row"):
        raise PrivacyError(
            f"unit_name={unit!r} promises to protect each {unit}, which takes the {unit} of every row: give unit_ids="
        )
    if getattr(dataset, "units", None) is not None:
        warnings.warn(
            "the data set knows which unit (person) each row belongs to, but rows are protected; "
            "give unit_ids=dataset.units to protect people",
            PrivacyWarning,
            stacklevel=4,
        )
    return "row"


def _saved_plan(asked: PlanConfig, out: Path | str, total: float | None, *, continues: bool) -> Plan:
    """The plan of the run at `out`, if that is what is asked for; its noise is kept as it was calibrated."""
    saved = Run.open(out).plan
    planned = PlanConfig.of(saved)
    if planned != asked:
        details = "; ".join(_differences(planned.to_json(), asked.to_json()))
        raise PrivacyError(f"the run was planned otherwise: {details}. A plan is never changed on the way")
    declared = None if saved.continuation is None or saved.continuation.ledgers else saved.target_epsilon
    if not continues and total != declared:
        raise PrivacyError(
            f"total_epsilon: the run was planned with {declared}, got {total}; it is never changed"
        )
    return saved


def _differences(one: Mapping[str, Any], other: Mapping[str, Any]) -> Iterator[str]:
    for name, value in one.items():
        if name == "method" and value["name"] == other[name]["name"]:
            yield from _differences(value, other[name])
        elif value != other[name]:
            was, now = (found["name"] if name == "method" else found for found in (value, other[name]))
            yield f"{name} was {json.dumps(was)[:60]} and is {json.dumps(now)[:60]}"
