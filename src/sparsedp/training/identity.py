"""What a checkpoint belongs to, and why another one is refused."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from sparsedp.core.errors import DataError, PrivacyError, SparseDPError
from sparsedp.core.files import Json
from sparsedp.core.layout import Layout
from sparsedp.methods.describe import describe
from sparsedp.methods.method import Method
from sparsedp.privacy.accountants import plan_epsilon
from sparsedp.privacy.plan import Plan
from sparsedp.privacy.summary import exceeds_target
from sparsedp.runs.checkpoint import describe_layout


def identity_of(
    plan: Plan,
    method: Method,
    layout: Layout,
    *,
    seed: int | None,
    public_seed: int,
    setup: Mapping[str, Json],
) -> dict[str, Json]:
    """Everything that must stay the same for a run to go on; `setup` are the trainer's own choices."""
    return {
        "plan": plan.fingerprint,
        "method": describe(method),
        "layout": describe_layout(layout),
        "seed": seed,
        "public_seed": public_seed,
        **setup,
    }


def check_identity(saved: Mapping[str, Json], now: Mapping[str, Json]) -> None:
    """Refuse a checkpoint of another run, naming what differs.

    Raises:
        SparseDPError: the two are not the same run. Another model is left to the loading of its weights.
    """
    same = json.loads(json.dumps(dict(now)))
    differing = [name for name in same if name != "layout" and saved.get(name) != same[name]]
    if not differing:
        return
    if differing == ["method"]:
        old, new = saved["method"], same["method"]
        differing = [f"method.{name}" for name in new if old.get(name) != new[name]]
    details = "; ".join(f"{name} was {_short(saved, name)} and is {_short(same, name)}" for name in differing)
    raise SparseDPError(
        f"this is not the run that was saved: {details}. Resume with what it was started with"
    )


def check_plan(plan: Plan, units: int, *, rows_are_units: bool) -> None:
    """Refuse a plan that is not for this data, or promises more than it keeps.

    Raises:
        DataError: the plan counts other units.
        PrivacyError: it costs more than its target, or protects units that nothing names.
    """
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


def same_request(saved: Plan, asked: Plan) -> None:
    """Refuse to resume a run whose plan is not the one asked for; calibrated noise is taken from the saved one.

    Raises:
        PrivacyError: they differ, and in what.
    """
    noise = {phase.name: 0.0 for phase in saved.training}
    one, other = (json.loads(plan.to_json()) for plan in (saved.with_noise(noise), asked))
    ignored = {"target_epsilon", "accountant"}
    differing = [name for name in one if name not in ignored and one[name] != other[name]]
    if differing:
        details = "; ".join(f"{name} was {one[name]} and is {other[name]}" for name in differing)
        raise PrivacyError(f"the run was planned otherwise: {details}. A plan is never changed on the way")


def _short(values: Mapping[str, Any], name: str) -> str:
    value: Any = values
    for part in name.split("."):
        value = value.get(part) if isinstance(value, Mapping) else None
    text = json.dumps(value)
    return text if len(text) <= 60 else text[:57] + "..."
