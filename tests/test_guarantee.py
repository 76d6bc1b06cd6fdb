"""The guarantee in words."""

from __future__ import annotations

import math
import re
from dataclasses import replace

import pytest

from sparsedp.guarantee import describe, describe_run, posterior
from sparsedp.methods import build_plan, get_method
from sparsedp.privacy import plan_epsilon
from sparsedp.privacy.plan import Plan


def a_plan(unit: str = "row", method: str = "tp-topk", epsilon: float | None = 3.0) -> Plan:
    return build_plan(
        get_method(method),
        units=500,
        batch_size=50,
        epochs=4,
        epsilon=epsilon,
        delta=None if epsilon is None else 1e-4,
        max_grad_norm=1.0,
        unit_name=unit,
        accountant="rdp",
    )


def test_promises_name_the_unit_the_relation_and_the_odds():
    found = describe(a_plan(), evaluated=True)
    said = " ".join(found.promises)
    assert found.warning is None
    assert f"{math.exp(3.0):.3g}" in said
    assert "one row added or removed" in said
    assert "The unit is a row, not a person or patient" in said
    patients = " ".join(describe(a_plan("patient"), evaluated=False).promises)
    assert "one patient with all its rows: 500" in patients
    assert "not a person" not in patients


@pytest.mark.parametrize(
    ("record", "seeded"),
    [
        (None, True),
        ({"seed": 0, "publishable": False}, True),
        ({"seed": None, "publishable": False}, True),
        ({"seed": 0, "publishable": True}, True),
        ({"seed": None, "publishable": True}, False),
    ],
)
def test_a_run_counts_as_seeded_unless_its_record_denies_it_twice(record, seeded):
    assert (describe_run(a_plan(), None, record).warning is not None) == seeded


def test_promised_odds_of_a_plan_with_less_noise_than_it_was_calibrated_to_are_those_it_has():
    plan = a_plan()
    louder = replace(
        plan, phases=tuple(replace(p, noise_multiplier=p.noise_multiplier / 2) for p in plan.phases)
    )
    shown = re.search(r"= ([\d.e+]+) times", describe(louder).promises[0])
    odds = math.exp(plan_epsilon(louder))
    assert shown is not None
    assert odds <= float(shown[1]) < 1.01 * odds


def test_limitations_name_seeds_early_stops_and_exact_held_out_numbers():
    plain = describe(a_plan(), evaluated=False)
    seeded = describe(a_plan(), seeded=True, complete=False, evaluated=True)
    assert seeded.warning is not None
    assert "not for release" in seeded.warning
    assert seeded.not_guaranteed[0] == seeded.warning
    extra = [limit for limit in seeded.limitations if limit not in plain.limitations]
    assert len(extra) == 2
    assert any("stopped before" in limit for limit in extra)
    assert any("Held-out" in limit for limit in extra)
    assert any("Tuning" in limit for limit in plain.limitations)


@pytest.mark.parametrize("epsilon", [0.1, 1.0, 20.0, 1e4])
@pytest.mark.parametrize("chance", [0.001, 0.5, 0.9])
def test_posterior_keeps_the_odds_ratio_within_epsilon_and_contains_the_prior(chance, epsilon):
    low, high = posterior(chance, epsilon)
    assert 0 <= low < chance < high <= 1
    if epsilon < 15:
        assert math.log(high / (1 - high) * (1 - chance) / chance) == pytest.approx(epsilon)
        assert math.log(low / (1 - low) * (1 - chance) / chance) == pytest.approx(-epsilon)
