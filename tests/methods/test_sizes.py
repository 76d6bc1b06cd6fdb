"""How many coordinates a method trains: as many as it has in the end, and no number where the sizes do not tell."""

from __future__ import annotations

import pytest
from method_tools import plan_of, run
from torch import nn

from sparsedp.errors import SparseDPError
from sparsedp.methods import MethodOptions, PlanSpec, all_methods, get_method
from sparsedp.methods.plan_summary import ActiveCount, ModelSize, count_active, quote
from sparsedp.methods.ranking import find, size_of
from sparsedp.parameters import Layout

MODEL = nn.Sequential(nn.EmbeddingBag(30, 4), nn.Linear(4, 6), nn.LayerNorm(6), nn.Linear(6, 3))
LAYOUT = Layout.of(MODEL)
BEFORE_TRAINING = [method for method in all_methods() if method.name != "adafest"]
RANKED = [method for method in BEFORE_TRAINING if method.ranking is not None]
NUMBERS = {"all": 1_000_000, "head": 12_810, "bias": 9_000}


def counted(method, options=None, *, layout=LAYOUT):
    plan = plan_of(method, options)
    return count_active(PlanSpec.of(plan).method, ModelSize.of(layout))


@pytest.mark.parametrize("method", BEFORE_TRAINING, ids=lambda method: method.name)
def test_a_models_count_is_that_of_the_last_step(method):
    assert counted(method) == ActiveCount(run(method, layout=LAYOUT).settings[-1].support.size)


@pytest.mark.parametrize("method", RANKED, ids=lambda method: method.name)
def test_so_is_that_of_another_ratio(method):
    options = MethodOptions(active_ratio=0.13)
    steps = run(method, options, layout=LAYOUT).settings
    assert counted(method, options) == ActiveCount(steps[-1].support.size)


def told(method, parts):
    return count_active(get_method(method), ModelSize(parts))


@pytest.mark.parametrize(
    ("method", "missing"),
    [
        ("tp-topk", ("all",)),
        ("head", ("all", "head")),
        ("bias", ("bias", "head")),
        ("norms", ("norms", "head")),
        ("fest", ("dense",)),
    ],
)
def test_without_the_size_of_what_it_trains_there_is_no_count(method, missing):
    known = {name: count for name, count in NUMBERS.items() if name not in missing}
    found = told(method, known)
    assert found.count is None
    assert set(found.missing) <= set(missing)
    assert found.missing


def test_numbers_tell_what_a_layout_tells():
    names = ("head", "bias", "norms", "dense")
    parts = {"all": LAYOUT.dimension} | {name: size_of(find(LAYOUT, (name,), "part")) for name in names}
    for method in BEFORE_TRAINING:
        exact, found = counted(method), told(method.name, parts)
        assert found.at_most == (len(method.scope) > 1)
        assert found.count == exact.count if not found.at_most else found.count >= exact.count


def test_parts_that_may_overlap_give_a_bound_and_never_more_than_all():
    assert told("bias", NUMBERS) == ActiveCount(12_810 + 9_000, at_most=True)
    assert told("bias", {"all": 100, "head": 90, "bias": 20}) == ActiveCount(100, at_most=True)


def test_a_support_chosen_in_every_step_has_no_count_before():
    assert counted(get_method("adafest")) == ActiveCount()


def test_a_part_is_not_larger_than_the_model():
    with pytest.raises(SparseDPError, match="head: got 12,810 parameters of a model that has 100"):
        ModelSize({"all": 100, "head": 12_810})


def test_the_chosen_support_has_its_r_and_only_where_it_is_known():
    def rows(method, parts, **options):
        spec = PlanSpec.asked(
            method, MethodOptions(**options), units=1000, epsilon=1.0, delta=1e-5, epochs=5, batch_size=100,
            accountant="rdp",
        )  # fmt: skip
        return quote(spec, ModelSize(parts), ())["noise_ratios"]

    assert [(row["which"], row["coordinates"], row["at_most"]) for row in rows("bias", NUMBERS)][-2:] == [
        ("bias", 9_000, False),
        ("bias, which is bias and head", 21_810, True),
    ]
    assert rows("tp-topk", NUMBERS, active_ratio=0.2)[-1]["which"] == "tp-topk, ratio 0.2"
    assert [row["which"] for row in rows("fest", {"all": 1_000_000})] == ["all"]
