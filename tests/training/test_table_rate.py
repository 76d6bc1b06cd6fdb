"""The rate that a table is trained at if none is given: public numbers alone, the formula, and where it is used."""

import math

import pytest

from sparsedp.errors import SparseDPError
from sparsedp.methods import build_plan, get_method
from sparsedp.optimizers.factory import table_rate, typical_length
from sparsedp_experiments.data.tables import adult
from sparsedp_experiments.models.networks import logistic
from sparsedp_experiments.runs.execute import rate_of
from sparsedp_experiments.runs.settings import Settings, recipe_for
from tables_of_people import ADULT_ROW

pytestmark = pytest.mark.usefixtures("checked_once")


def plan_of(units=20_000, batch=512, epochs=10, clip=1.0, epsilon=1.0, method="dp-sgd"):
    return build_plan(
        get_method(method), units=units, batch_size=batch, epochs=epochs, epsilon=epsilon, delta=1e-7,
        max_grad_norm=clip, accountant="rdp",
    )  # fmt: skip


def by_hand(noise, batch, epochs, coordinates, length, clip):
    """The docstring's formula, in other steps: logarithms."""
    s = math.log(noise) + 0.5 * math.log(coordinates * epochs / batch)
    squared = 1 + length * length
    rate = math.exp(math.log(0.0047) + math.log(batch) - s / 2 - 0.375 * math.log(squared))
    return min(rate, 30 / squared) / clip


@pytest.mark.parametrize("method", ["dp-sgd", "tp-coherent"])
@pytest.mark.parametrize(("length", "clip", "coordinates"), [(1.0, 1.0, 112), (4.0, 0.3, 519), (9.0, 2.0, 6)])
def test_the_rate_is_the_formula_of_the_plans_public_numbers(method, length, clip, coordinates):
    plan = plan_of(clip=clip, method=method)
    noise = plan.phases[-1].noise_multiplier
    passes = sum(phase.steps for phase in plan.phases) * 512 / 20_000
    found = table_rate(plan, coordinates, length)
    assert found == pytest.approx(by_hand(noise, 512, passes, coordinates, length, clip), rel=1e-9)


def test_more_noise_more_coordinates_and_longer_records_ask_for_a_smaller_rate():
    usual = table_rate(plan_of(), 200, 1.0)
    assert table_rate(plan_of(epsilon=0.3), 200, 1.0) < usual
    assert table_rate(plan_of(), 2000, 1.0) < usual
    assert table_rate(plan_of(), 200, 5.0) < usual
    assert table_rate(plan_of(batch=2048), 200, 1.0) > usual
    assert table_rate(plan_of(clip=0.5), 200, 1.0) == pytest.approx(2 * usual)


def test_the_rate_stays_where_momentum_does_not_overshoot():
    assert table_rate(plan_of(units=10**6, batch=65_536), 50, 3.0) == pytest.approx(30 / 10)


def test_a_typical_length_lies_between_one_feature_and_all():
    assert typical_length(1) == 1
    assert typical_length(10_000) == 10


def test_encoded_tables_say_whether_their_records_have_length_one(tmp_path):
    (tmp_path / "adult.data").write_text(ADULT_ROW + ", >50K\n")
    (tmp_path / "adult.test").write_text(ADULT_ROW + ", <=50K.\n")
    for unit_norm in (True, False):
        bundle = adult(tmp_path, unit_norm=unit_norm)
        model, features = logistic(bundle.input_shape, 2), bundle.input_shape[0]
        rule = rate_of(Settings(dataset="adult", model="logistic"), bundle, model)
        length = 1.0 if unit_norm else features**0.25
        assert rule(plan_of()) == pytest.approx(table_rate(plan_of(), features + 1, length))
    assert "lr" not in recipe_for("diabetes130", None)


def test_a_rule_is_for_the_default_optimizer_alone():
    from runs import loss_fn, network, rows
    from sparsedp import fit

    with pytest.raises(SparseDPError, match="is for the default optimizer"):
        fit(network(), rows(1), loss_fn, optimizer="adam", lr=lambda plan: 0.1, epsilon=8, delta=1e-3)
