"""Rows of the methods table: their settings, their JSON, and how many coordinates they will train."""

from __future__ import annotations

import json

import pytest
from method_tools import plan_of, run
from torch import nn

from sparsedp.cli.plan import count_active
from sparsedp.errors import SparseDPError
from sparsedp.methods import PlanConfig
from sparsedp.methods.catalog import get_method, list_methods, register_method
from sparsedp.methods.method import WARM_UP, Decays, GeometryRule, Method, OffSupport
from sparsedp.methods.ranking import Granularity
from sparsedp.methods.schedules import EverySteps, PerEpoch, PiecewiseConstant, ProgressiveUnfreezing, Refresh
from sparsedp.methods.scores import Coherent, Energy, RandomOrder
from sparsedp.parameters import ParameterLayout

CHANGED = {
    "active_ratio": 0.25,
    "refresh": Refresh.EVERY_PERIOD,
    "clock": EverySteps(20),
    "schedule": PiecewiseConstant((1.0, 0.5)),
    "geometry": GeometryRule.STANDARDIZED,
    "off_support": OffSupport.DROPPED,
    "granularity": Granularity.ROWS,
    "prune": True,
    "per_sample_top": 0.5,
    "decays": Decays(0.8, 0.99, 1e-4),
}
AS_TYPED = {
    "refresh": "every period",
    "clock": {"every_steps": 20},
    "schedule": {"name": "listed", "ratios": [1.0, 0.5]},
    "geometry": "standardized",
    "off_support": "dropped",
    "granularity": "rows",
    "decays": {"centre": 0.8, "variance": 0.99, "stabilizer": 1e-4},
}


def test_the_two_phase_rows_differ_only_in_their_ranking():
    for name, ranking in {"tp-topk": Energy(), "tp-coherent": Coherent(), "tp-rand": RandomOrder()}.items():
        values, topk = get_method(name).to_json(), get_method("tp-topk").to_json()
        assert get_method(name).ranking == ranking
        assert {**values, "name": "", "ranking": ""} == {**topk, "name": "", "ranking": ""}


def test_a_name_is_registered_once_and_an_unknown_one_is_answered_with_the_known():
    row = get_method("dp-sgd")
    assert register_method(row) is row
    with pytest.raises(SparseDPError, match="taken"):
        register_method(Method(name="dp-sgd", ranking=RandomOrder()))
    with pytest.raises(SparseDPError, match=r"got 'tp-topkk', expected one of .*'tp-topk'"):
        get_method("tp-topkk")


@pytest.mark.parametrize("changes", [CHANGED, {**CHANGED, **AS_TYPED}], ids=["values", "as typed"])
def test_get_method_every_change_reaches_the_row_and_survives_json(changes):
    row = get_method("on-rand", ranking="coherent", warm_up=True, scope="head", always=["bias"], **changes)
    assert row.ranking == Coherent()
    assert row.warm_up
    assert (row.scope, row.always) == (("head",), ("bias",))
    assert {name: getattr(row, name) for name in CHANGED} == CHANGED
    assert Method.from_json(json.loads(json.dumps(row.to_json()))) == row
    assert WARM_UP not in row.changed(warm_up=False).stages


@pytest.mark.parametrize("method", list_methods(), ids=lambda method: method.name)
def test_get_method_none_changes_nothing(method):
    assert method.changed(active_ratio=None, ranking=None, warm_up=None) == method


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("tp-topk", {"ratio": 0.2}, r"got \['ratio'\], expected some of .*'active_ratio'"),
        ("tp-topk", {"refresh": "often"}, "got 'often', expected one of"),
        ("tp-topk", {"granularity": "layers"}, "granularity: got 'layers', expected one of"),
        ("tp-topk", {"clock": "daily"}, "clock: got 'daily', expected"),
        ("tp-topk", {"clock": {"per_epoch": 0}}, "whole number >= 1"),
        ("tp-topk", {"schedule": {"name": "warming"}}, "schedule: got"),
        ("tp-topk", {"schedule": {"name": "release", "ratios": [2]}}, "release: got 2"),
        ("tp-topk", {"decays": {"center": 0.5}}, "decays: got"),
        ("dp-sgd", {"active_ratio": 0.5}, "trains every coordinate"),
        ("dp-sgd", {"refresh": Refresh.ONCE}, "would do nothing"),
        ("dp-sgd", {"schedule": PiecewiseConstant((0.5,))}, "would do nothing"),
        ("tp-topk", {"active_ratio": 0.0}, "active_ratio: got 0.0"),
        ("tp-topk", {"active_ratio": "auto"}, "active_ratio: got 'auto'"),
        ("tp-topk", {"per_sample_top": 1.5}, "per_sample_top: got 1.5"),
        ("on-rand", {"decays": Decays(0.5)}, "belong to the standardized geometry"),
        ("tp-topk", {"ranking": "luck"}, "ranking: got 'luck'"),
        ("adadpigu", {"schedule": ProgressiveUnfreezing((0.5,))}, "below active_ratio=0.6"),
        ("on-rand", {"prune": True}, "coasting would move them again"),
    ],
)
def test_get_method_change_without_meaning_raises(name, changes, message):
    with pytest.raises(SparseDPError, match=message):
        get_method(name, **changes)


def test_a_dense_method_given_a_ranking_becomes_a_sparse_one():
    row = get_method("dp-sgd", ranking="random", active_ratio=0.5, clock=PerEpoch(3))
    assert (row.ranking, row.clock) == (RandomOrder(), PerEpoch(3))


MODEL = nn.Sequential(nn.EmbeddingBag(30, 4), nn.Linear(4, 6), nn.LayerNorm(6), nn.Linear(6, 3))
LAYOUT = ParameterLayout.of(MODEL)
BEFORE_TRAINING = [method for method in list_methods() if method.name != "adafest"]
OTHER_RATIOS = [method.changed(active_ratio=0.13) for method in BEFORE_TRAINING if method.ranking is not None]


@pytest.mark.parametrize(
    "method", [*BEFORE_TRAINING, *OTHER_RATIOS], ids=lambda method: f"{method.name}-{method.active_ratio}"
)
def test_count_active_is_that_of_the_last_step(method):
    planned = PlanConfig.of(plan_of(method)).method
    assert count_active(planned, LAYOUT) == run(method, layout=LAYOUT).settings[-1].support.size


def test_count_active_is_known_from_the_number_of_parameters_where_the_method_names_no_part():
    assert count_active(get_method("tp-topk", active_ratio=0.2), 1000) == 200
    assert count_active(get_method("dp-sgd"), 1000) == 1000
    assert [count_active(get_method(name), 1000) for name in ("head", "bias", "norms", "fest")] == [None] * 4
    assert count_active(get_method("adafest"), LAYOUT) is None  # its support is chosen in every step
