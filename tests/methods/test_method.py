"""Rows of the methods table: settings, JSON, how many coordinates they will train; and what "auto" takes of them."""

from __future__ import annotations

import json

import pytest
import torch
from method_tools import plan_of, run
from torch import nn
from torch.utils.data import TensorDataset

import sparsedp
from sparsedp.cli.plan import count_active
from sparsedp.errors import SparseDPError
from sparsedp.methods import PlanConfig, build_plan
from sparsedp.methods.auto import MIN_NOISE_RATIO, choose_method, is_linear, noise_ratio
from sparsedp.methods.catalog import get_method, list_methods, register_method
from sparsedp.methods.method import HEAD, MAIN, SELECT, WARM_UP, Decays, GeometryRule, Method, OffSupport
from sparsedp.methods.ranking import Granularity
from sparsedp.methods.schedules import EverySteps, ProgressiveUnfreezing, Refresh
from sparsedp.methods.scores import Coherent, Contributions, register_ranking
from sparsedp.parameters import ParameterLayout

CHANGED = {
    "active_ratio": 0.25,
    "refresh": Refresh.EVERY_PERIOD,
    "clock": EverySteps(20),
    "schedule": ProgressiveUnfreezing((0.5, 1.0)),
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
    "schedule": {"name": "release", "ratios": [0.5, 1.0]},
    "geometry": "standardized",
    "off_support": "dropped",
    "granularity": "rows",
    "decays": {"centre": 0.8, "variance": 0.99, "stabilizer": 1e-4},
}


def test_a_name_is_registered_once_and_an_unknown_one_is_answered_with_the_known():
    row = get_method("dp-sgd")
    assert register_method(row) is row
    for register, other in (
        (register_method, Method(name="dp-sgd", scope=("head",))),
        (register_ranking, Contributions(0.5)),
    ):
        with pytest.raises(SparseDPError, match="taken"):
            register(other)
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
    assert row.changed(active_ratio=None, ranking=None, warm_up=None) == row


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("tp-topk", {"ratio": 0.2}, r"got \['ratio'\], expected some of .*'active_ratio'"),
        ("tp-topk", {"refresh": "often"}, "got 'often', expected one of"),
        ("tp-topk", {"clock": "daily"}, "clock: got 'daily', expected"),
        ("tp-topk", {"clock": {"per_epoch": 0}}, "whole number >= 1"),
        ("tp-topk", {"decays": {"center": 0.5}}, "decays: got"),
        ("tp-topk", {"ranking": "luck"}, "ranking: got 'luck'"),
        ("adafest", {"ranking": {"name": "contributions", "tau": 2}}, r"unknown fields \['tau'\]"),
        ("adafest", {"ranking": {"name": "contributions", "share": 1.0}}, r"in \(0, 1\)"),
        ("dp-sgd", {"active_ratio": 0.5}, "trains every coordinate"),
        ("dp-sgd", {"refresh": "every period"}, "would do nothing"),
        ("tp-topk", {"active_ratio": "auto"}, "active_ratio: got 'auto'"),
        ("tp-topk", {"per_sample_top": 1.5}, "per_sample_top: got 1.5"),
        ("on-rand", {"prune": True}, "coasting would move them again"),
        ("tp-topk", {"stages": (WARM_UP, HEAD, MAIN)}, "at most one of WARM_UP and HEAD"),
        ("tp-topk", {"stages": (SELECT, WARM_UP, MAIN)}, "come together"),
        ("fest", {"stages": (MAIN,)}, "come together"),
        ("fest", {"granularity": "coordinates"}, r"give granularity=Granularity\.ROWS"),
        ("adafest", {"clock": {"per_epoch": 1}}, r"clock=EverySteps\(1\)"),
    ],
)
def test_get_method_change_without_meaning_raises(name, changes, message):
    with pytest.raises(SparseDPError, match=message):
        get_method(name, **changes)


MODEL = nn.Sequential(nn.EmbeddingBag(30, 4), nn.Linear(4, 6), nn.LayerNorm(6), nn.Linear(6, 3))
LAYOUT = ParameterLayout.of(MODEL)
BEFORE_TRAINING = [method for method in list_methods() if method.name != "adafest"]


@pytest.mark.parametrize("method", BEFORE_TRAINING, ids=lambda method: method.name)
def test_count_active_is_that_of_the_last_step(method):
    planned = PlanConfig.of(plan_of(method)).method
    known = count_active(planned, LAYOUT.dimension)
    assert known in (None, run(method, layout=LAYOUT).settings[-1].support.size)
    assert (known is None) == bool(planned.scope or planned.always)


CIFAR = {
    "units": 50_000,
    "batch_size": 2048,
    "epochs": 10,
    "delta": 1e-5,
    "accountant": "rdp",
    "max_grad_norm": 0.1,
}


SHORT = {**CIFAR, "units": 2000, "batch_size": 2000, "epochs": 9}
SMALL = {**SHORT, "units": 1400, "batch_size": 128, "epochs": 10, "epsilon": 8.0}


@pytest.mark.parametrize(
    ("linear", "ratio", "dimension", "plan", "expected"),
    [
        (True, None, 5_000, CIFAR, "tp-adaptive"),
        (True, None, 5_000, {**CIFAR, "units": 10_000}, "tp-adaptive"),
        (True, None, 5_000, {**CIFAR, "units": 9_999}, "dp-sgd"),
        (True, None, 400, CIFAR, "dp-sgd"),
        (True, None, 5_000, {**CIFAR, "epsilon": 50.0}, "dp-sgd"),
        (True, None, 2_000_000, CIFAR, "dp-sgd"),
        (False, None, 5_000, CIFAR, "dp-sgd"),
        (False, MIN_NOISE_RATIO + 1e-3, None, CIFAR, "tp-topk"),
        (False, MIN_NOISE_RATIO - 1e-3, None, CIFAR, "dp-sgd"),
        (False, 1.001, None, CIFAR, "dp-sgd"),
        (False, 0.7, None, SHORT, "dp-sgd"),
        (False, 0.7, None, {**SHORT, "epochs": 10}, "tp-topk"),
        (False, None, 4_810, SMALL, "dp-sgd"),
    ],
)
def test_auto_learns_a_support_where_noise_is_audible_and_leaves_some_signal(
    linear, ratio, dimension, plan, expected
):
    plan = {"epsilon": 1.0, **plan}
    if ratio is not None:  # that of a model of so many coordinates
        dimension = round((ratio / noise_ratio(build_plan("dp-sgd", **plan), 1)) ** 2)
    method, reason = choose_method(dimension, linear=linear, **plan)
    assert method.name == expected
    assert not method.denoise
    assert f"{dimension:,} coordinates" in reason
    build_plan(method, **plan)


def test_linear_is_what_trains_one_linear_layer_and_nothing_else():
    body = nn.Sequential(nn.Conv2d(1, 2, 3), nn.Flatten()).requires_grad_(False)
    assert is_linear(nn.Sequential(body, nn.Linear(4, 2)))
    for other in (nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 2)), nn.Embedding(9, 2), nn.Tanh()):
        assert not is_linear(other)


def test_fit_chooses_by_itself_and_says_once_which_delta_it_took(caplog):
    data = TensorDataset(torch.rand(200, 6), torch.arange(200) % 3)
    loss = nn.CrossEntropyLoss(reduction="none")
    with caplog.at_level("INFO", logger="sparsedp"):
        found = sparsedp.fit(nn.Linear(6, 3), data, loss, epsilon=8.0, epochs=2, accountant="rdp", seed=1)
    assert found.method == "dp-sgd"
    assert sum("delta was not given" in line for line in caplog.messages) == 1
