"""A plan is refused where it promises what it does not keep, by `Trainer` as by `fit`."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from runs import ROWS, a_plan, a_trainer
from sparsedp.errors import PrivacyError
from sparsedp.loading import DataConfig
from sparsedp.methods import get_method
from sparsedp.privacy.plan import Plan


def with_noise_times(plan: Plan, factor: float) -> Plan:
    """The plan as an editor would leave it: other noise, the same target."""
    phases = tuple(replace(p, noise_multiplier=factor * p.noise_multiplier) for p in plan.phases)
    return replace(plan, phases=phases)


@pytest.mark.parametrize("factor", [0.99, 0.5])
def test_a_plan_that_costs_more_than_its_target_is_refused(factor: float) -> None:
    plan = with_noise_times(a_plan(get_method("dp-sgd")), factor)
    with pytest.raises(PrivacyError, match="its target is 8"):
        a_trainer("dp-sgd", plan=plan)


def test_a_plan_that_costs_less_than_its_target_is_accepted() -> None:
    plan = with_noise_times(a_plan(get_method("dp-sgd")), 1.5)
    assert a_trainer("dp-sgd", plan=plan).plan == plan


def test_a_plan_for_patients_takes_the_patient_of_every_row() -> None:
    plan = a_plan(get_method("dp-sgd"), unit="patient")
    with pytest.raises(PrivacyError, match="patient of every row"):
        a_trainer("dp-sgd", plan=plan)
    assert a_trainer("dp-sgd", plan=plan, data=DataConfig(unit_ids=torch.arange(ROWS))).plan.unit == "patient"
