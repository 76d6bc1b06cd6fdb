"""test_method"""

from __future__ import annotations

import json

import pytest
from method_tools import plan_of, run
from torch import nn

from sparsedp.cli.plan import count_active
from sparsedp.errors import SparseDPError
from sparsedp.methods import PlanConfig
from sparsedp.methods.catalog import get_method, list_methods, register_method
from sparsedp.methods.method import Decays, GeometryRule, Method, MethodOptions, OffSupport, configure
from sparsedp.methods.ranking import Granularity
from sparsedp.methods.schedules import (
    Constant,
    EverySteps,
    GradualCooling,
    PerEpoch,
    PiecewiseConstant,
    ProgressiveUnfreezing,
    Refresh,
)
from sparsedp.methods.scores import Coherent, Energy, RandomOrder
from sparsedp.parameters import ParameterLayout

FULL = MethodOptions(
    active_ratio=0.25,
    ranking="coherent",
    warm_up=True,
    refresh=Refresh.EVERY_PERIOD,
    clock=EverySteps(20),
    schedule=PiecewiseConstant((1.0, 0.5)),
    geometry=GeometryRule.STANDARDIZED,
    off_support=OffSupport.DROPPED,
    granularity=Granularity.ROWS,
    prune=True,
    per_sample_top=0.5,
    centre_decay=0.8,
    variance_decay=0.99,
    stabilizer=1e-4,
)


def test_the_table_has_the_papers_methods_and_ours():
    names = {method.name for method in list_methods()}
    assert names >= {
        "dp-sgd", "tp-topk", "tp-coherent", "tp-rand", "on-rand", "on-topk", "ranked",
        "adadpigu",
    }  # fmt: skip


def test_only_the_methods_of_the_random_sparsification_paper_coast():
    coasting = {m.name for m in list_methods() if m.off_support is OffSupport.COASTS}
    assert coasting >= {"on-rand", "on-topk", "ranked"}
    assert not coasting & {"dp-sgd", "tp-topk", "tp-coherent", "tp-rand", "adadpigu"}


def test_an_unknown_method_is_answered_with_the_known_ones():
    with pytest.raises(SparseDPError, match=r"got 'tp-topkk', expected one of .*'tp-topk'"):
        get_method("tp-topkk")


def test_a_name_is_registered_once():
    row = get_method("dp-sgd")
    assert register_method(row) is row
    with pytest.raises(SparseDPError, match="taken"):
        register_method(Method(name="dp-sgd", ranking=RandomOrder()))


@pytest.mark.parametrize(
    "options",
    [
        MethodOptions(),
        FULL,
        MethodOptions(active_ratio=0.3, clock=PerEpoch(3), schedule=ProgressiveUnfreezing((0.5,))),
    ]
    + [
        MethodOptions(schedule=schedule)
        for schedule in (Constant(), GradualCooling(), ProgressiveUnfreezing())
    ],
)
def test_options_survive_json(options):
    assert MethodOptions.from_json(json.loads(json.dumps(options.to_json()))) == options


def test_json_holds_only_what_was_chosen():
    assert MethodOptions(active_ratio=0.2, schedule=GradualCooling()).to_json() == {
        "active_ratio": 0.2,
        "schedule": {"name": "cooling"},
    }
    assert MethodOptions.from_json({"schedule": "cooling"}).schedule == GradualCooling()


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"ratio": 0.2}, r"got \['ratio'\], expected some of \['active_ratio'"),
        ({"refresh": "often"}, "got 'often', expected one of"),
        ({"granularity": "layers"}, "granularity: got 'layers'"),
        ({"clock": "daily"}, "clock: got 'daily', expected"),
        ({"clock": {"per_epoch": 0}}, "whole number >= 1"),
        ({"schedule": {"name": "warming"}}, "schedule: got"),
        ({"schedule": {"name": "release", "ratios": [2]}}, "release: got 2"),
    ],
)
def test_json_with_a_mistake_says_what_was_expected(values, message):
    with pytest.raises(SparseDPError, match=message):
        MethodOptions.from_json(values)


def test_every_option_reaches_the_row():
    row = configure(get_method("on-rand"), FULL)
    assert row.ranking == Coherent()
    assert row.decays == Decays(0.8, 0.99, 1e-4)
    for name in ("active_ratio", "warm_up", "refresh", "clock", "schedule", "geometry", "off_support", "granularity",
                 "prune", "per_sample_top"):  # fmt: skip
        assert getattr(row, name) == getattr(FULL, name)
    assert row.name == "on-rand"


def test_no_options_leave_the_row_as_it_is():
    for method in list_methods():
        assert configure(method, MethodOptions()) == method
        assert configure(method, None) is method


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("dp-sgd", MethodOptions(active_ratio=0.5), "trains every coordinate"),
        ("dp-sgd", MethodOptions(refresh=Refresh.ONCE), "would do nothing"),
        ("tp-topk", MethodOptions(active_ratio=0.0), "active_ratio: got 0.0"),
        ("tp-topk", MethodOptions(active_ratio="auto"), "active_ratio: got 'auto'"),
        ("tp-topk", MethodOptions(per_sample_top=1.5), "per_sample_top: got 1.5"),
        ("tp-topk", MethodOptions(centre_decay=0.5), "belong to the standardized geometry"),
        ("tp-topk", MethodOptions(ranking="luck"), "ranking: got 'luck'"),
        ("adadpigu", MethodOptions(schedule=ProgressiveUnfreezing((0.5,))), "below active_ratio=0.6"),
        ("on-rand", MethodOptions(prune=True), "coasting would move them again"),
    ],
)
def test_combinations_without_meaning_are_refused(name, options, message):
    with pytest.raises(SparseDPError, match=message):
        configure(get_method(name), options)


WITHOUT_MEANING = {
    "decays without a standardized geometry": ("on-rand", MethodOptions(variance_decay=0.5)),
    "pruning what coasts": ("on-topk", MethodOptions(prune=True)),
    "sparsity options for `dp-sgd`": ("dp-sgd", MethodOptions(schedule=PiecewiseConstant((0.5,)))),
}  # fmt: skip


@pytest.mark.parametrize("what", WITHOUT_MEANING)
def test_combination_without_meaning_is_refused(what):
    name, options = WITHOUT_MEANING[what]
    with pytest.raises(SparseDPError):
        configure(get_method(name), options)


def test_a_dense_method_given_a_ranking_becomes_a_sparse_one():
    row = configure(get_method("dp-sgd"), MethodOptions(ranking="random", active_ratio=0.5))
    assert row.ranking == RandomOrder()


def test_the_two_phase_rows_differ_only_in_their_ranking():
    rankings = {"tp-topk": Energy(), "tp-coherent": Coherent(), "tp-rand": RandomOrder()}
    for name, ranking in rankings.items():
        row, topk = get_method(name), get_method("tp-topk")
        assert row.ranking == ranking
        assert (row.schedule, row.active_ratio, row.refresh, row.off_support) == (
            topk.schedule, topk.active_ratio, topk.refresh, topk.off_support,
        )  # fmt: skip


def test_names_in_place_of_choices_are_read_as_in_a_settings_file():
    written = MethodOptions(scope="head", always=["bias"], granularity="rows", refresh="once")
    row = configure(get_method("tp-topk"), written)
    assert (row.scope, row.always) == (("head",), ("bias",))
    assert row.granularity is Granularity.ROWS
    assert row.refresh is Refresh.ONCE
    assert configure(get_method("tp-topk"), MethodOptions.from_json(written.to_json())) == row
    with pytest.raises(SparseDPError, match="granularity: got 'columns', expected one of"):
        configure(get_method("tp-topk"), MethodOptions(granularity="columns"))


MODEL = nn.Sequential(nn.EmbeddingBag(30, 4), nn.Linear(4, 6), nn.LayerNorm(6), nn.Linear(6, 3))
LAYOUT = ParameterLayout.of(MODEL)
BEFORE_TRAINING = [method for method in list_methods() if method.name != "adafest"]
RANKED = [method for method in BEFORE_TRAINING if method.ranking is not None]


def counted(method, options=None, *, layout=LAYOUT):
    plan = plan_of(method, options)
    return count_active(PlanConfig.of(plan).method, layout)


@pytest.mark.parametrize("method", BEFORE_TRAINING, ids=lambda method: method.name)
def test_a_models_count_is_that_of_the_last_step(method):
    assert counted(method) == run(method, layout=LAYOUT).settings[-1].support.size


@pytest.mark.parametrize("method", RANKED, ids=lambda method: method.name)
def test_so_is_that_of_another_ratio(method):
    options = MethodOptions(active_ratio=0.13)
    steps = run(method, options, layout=LAYOUT).settings
    assert counted(method, options) == steps[-1].support.size


def test_number_of_parameters_alone_tells_the_count_of_methods_that_name_no_part():
    assert count_active(get_method("tp-topk", active_ratio=0.2), 1000) == 200
    assert count_active(get_method("dp-sgd"), 1000) == 1000
    assert [count_active(get_method(name), 1000) for name in ("head", "bias", "norms", "fest")] == [None] * 4


def test_a_support_chosen_in_every_step_has_no_count_before():
    assert counted(get_method("adafest")) is None
