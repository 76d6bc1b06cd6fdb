"""From what a user asks to a plan, the same for every door; and whether a plan is for this data and this run."""

from __future__ import annotations

import json
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple, Unpack

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
    chosen = _cap(earlier, total, run_dir, asked) if earlier or total is not None else None
    if chosen is not None:
        asked["epsilon"], asked["delta"] = chosen.epsilon, chosen.delta
    if public_scores is not None and method == AUTO_METHOD:
        method = GIVEN
    if public_scores is not None:
        method = _with_scores(method, public_scores)
    protected = distributed.all_or_raise(lambda: count_units(dataset, loading.unit_ids))
    called = _name_of_unit(dataset, loading)
    if loading.sharded:
        protected = sum(distributed.gather(protected))
    spec = spec_for(model, method, units=protected, unit_name=called, **asked)
    distributed.check_same_on_all_ranks(lambda: {"plan": spec.to_json()})
    capped = _Capped(total, earlier, chosen)
    return distributed.broadcast_from_main(lambda: _planned(spec, run_dir, resume, capped))


def spec_for(
    model: nn.Module,
    method: str | Method,
    *,
    units: int,
    unit_name: str,
    **asked: Unpack[PlanArgs],
) -> PlanConfig:
    """What is asked of a plan for this model; "auto" goes by public numbers, and is sparse for two clip norms."""
    if method == AUTO_METHOD:
        trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
        told = isinstance(
            asked.get("max_grad_norm"), tuple
        )  # one of them is for the main stage of a sparse method
        method = (
            METHOD
            if told
            else choose_method(trained, linear=is_linear(model), units=units, unit_name=unit_name, **asked)
        )
    return PlanConfig.asked(method, units=units, unit_name=unit_name, **asked)


class _Capped(NamedTuple):
    """The cap that a first run declares, or the runs that another continues and their cap."""

    total: float | None = None
    earlier: Sequence[Path | str] = ()
    chosen: RdpFilter | None = None

    def plan(self, spec: PlanConfig, out: Path | str | None) -> Plan:
        """The plan under the cap, if there is one.

        Formal guarantees: Cap and order are in the first run's plan, so they are settled before its first release. A
        plan that continues is for the folder `out` alone: asked for once more with another, it counts beside the
        first.
        """
        if self.chosen is not None and out is not None:
            draft = spec.draft()
            split = spec.split if len(draft.training) > 1 else EqualNoise()
            return continue_runs(self.chosen, draft, self.earlier, split, sha256(str(Path(out).resolve())))
        found = spec.plan()
        if self.total is None:
            return found
        if found.delta is None:
            raise PrivacyError(
                f"total_epsilon: {found.method} protects nobody, so no cap holds; leave it out"
            )
        return RdpFilter.for_first_plan(found, self.total, found.delta).declared(found)


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


def _planned(spec: PlanConfig, out: Path | str | None, resume: bool, capped: _Capped) -> Plan:
    if out is not None and not resume:
        check_new(out)
    if not resume or out is None:
        return capped.plan(spec, out)
    saved = saved_plan(spec, out)
    declared = None if saved.continuation is None or saved.continuation.ledgers else saved.target_epsilon
    if capped.chosen is None and capped.total != declared:
        raise PrivacyError(
            f"total_epsilon: the run was planned with {declared}, got {capped.total}; it is never changed"
        )
    return saved


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


def _with_scores(method: str | Method, scores: Mapping[str, Any]) -> Method:
    """The method with the scores named in its ranking, so that the plan says which they are."""
    row = get_method(method) if isinstance(method, str) else method
    if not isinstance(row.ranking, Given):
        raise SparseDPError(
            f'public_scores: {row.name} does not rank by them; give method="given", or ranking="given"'
        )
    return replace(row, ranking=Given(PublicScores.of(scores).checksum))


def saved_plan(asked: PlanConfig, out: Path | str) -> Plan:
    """The plan of the run at `out`, if that is what is asked for; its noise is kept as it was calibrated.

    Raises:
        PrivacyError: it is another plan, and in what it differs.
    """
    saved = Run.open(out).plan
    planned = PlanConfig.of(saved)
    if planned != asked:
        details = "; ".join(
            f"{name} was {_short(one)} and is {_short(other)}"
            for name, one, other in _differences(planned.to_json(), asked.to_json())
        )
        raise PrivacyError(f"the run was planned otherwise: {details}. A plan is never changed on the way")
    return saved


def _differences(one: Mapping[str, Any], other: Mapping[str, Any]) -> Iterator[tuple[str, Any, Any]]:
    for name, value in one.items():
        if name == "method":
            same = value["name"] == other[name]["name"]
            yield from (
                _differences(value, other[name]) if same else [(name, value["name"], other[name]["name"])]
            )
        elif value != other[name]:
            yield name, value, other[name]


def _short(value: Any) -> str:
    """A value in words, a long one cut."""
    if isinstance(value, Mapping):
        return ", ".join(f"{name} {_short(part)}" for name, part in value.items()) or "nothing"
    text = json.dumps(value)
    return text if len(text) <= 60 else text[:57] + "..."
