"""Plans that are not for this data, promise too much, or are not the one a run was planned with."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from sparsedp.core.errors import DataError, PrivacyError
from sparsedp.methods.spec import PlanSpec
from sparsedp.privacy.accountants import plan_epsilon
from sparsedp.privacy.plan import Plan
from sparsedp.privacy.summary import exceeds_target
from sparsedp.runs.reader import Run


def check_plan(plan: Plan, units: int, *, rows_are_units: bool) -> None:
    """Refuse a plan that is not for this data, or promises more than it keeps.

    Raises:
        DataError: the plan counts other units.
        PrivacyError: it is not what it was made from, costs more than its target, or protects units that nothing
            names.
    """
    PlanSpec.of(plan).check(plan)
    if plan.units != units:
        raise DataError(
            f"the plan is for {plan.units} units ({plan.unit}) and the data set has {units}; the sampling rate would "
            "not be the planned one. Make a plan for this data, or give the units it counts"
        )
    if rows_are_units and plan.unit != "row":
        raise PrivacyError(
            f"the plan promises to protect each {plan.unit}, which takes the {plan.unit} of every row: give "
            "Loading(units=...), or make a plan for rows"
        )
    if plan.target_epsilon is not None and exceeds_target(plan, cost := plan_epsilon(plan)):
        raise PrivacyError(
            f"the plan costs epsilon {cost:.6g} by {plan.accountant} and its target is {plan.target_epsilon:g}: it "
            "was changed after it was calibrated. Calibrate it again"
        )


def saved_plan(asked: PlanSpec, out: Path | str) -> Plan:
    """The plan of the run at `out`, if that is what is asked for; its noise is kept as it was calibrated.

    Raises:
        PrivacyError: it is another plan, and in what it differs.
    """
    saved = Run.open(out).plan
    planned = PlanSpec.of(saved)
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
