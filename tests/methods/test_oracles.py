"""Every algorithm of the papers against an independent NumPy implementation: same data, batches and noise.

The oracles know one number of the library's, the 1e-3 its clip aims below C; then the paths agree to 1e-9. They know
nothing of the grid that releases are rounded to, so here it is much finer.
"""

import numpy as np
import pytest
from method_tools import NETWORK, PUBLIC, Problem, drive, plan_of

from oracles import papers
from sparsedp.methods.catalog import get_method
from sparsedp.methods.method import Decays
from sparsedp.methods.schedules import EverySteps, PerEpoch, ProgressiveUnfreezing
from sparsedp.methods.support_scheduler import FROZEN_NOISE
from sparsedp.privacy import mechanism

D = NETWORK.dimension
STEPS_PER_EPOCH = 5


@pytest.fixture(autouse=True)
def a_very_fine_grid(monkeypatch):
    monkeypatch.setattr(mechanism, "MARGIN_BITS", 40)


def assert_same_path(ours, oracle, start):
    moved = np.abs(oracle[-1] - start).max()
    assert moved > 0.1, "the comparison would be empty"
    assert np.abs(ours - oracle).max() <= 1e-9


def test_the_oracles_gradient_is_the_derivative_of_its_loss():
    problem = Problem(steps=1)

    def loss(theta, x, label):
        w1, b1, w2, b2 = NETWORK.unpack(theta)
        logits = w2 @ np.tanh(w1 @ x + b1) + b2
        return np.log(np.exp(logits).sum()) - logits[label]

    x, label, eps = problem.inputs[0], problem.labels[0], 1e-6
    numeric = [
        (loss(problem.theta + eps * e, x, label) - loss(problem.theta - eps * e, x, label)) / (2 * eps)
        for e in np.eye(D)
    ]
    np.testing.assert_allclose(NETWORK.gradient(problem.theta, x, label), numeric, atol=1e-8)


def random_score(released, *_):
    """TP-Rand: the place in a random order, first is best."""
    return -np.argsort(PUBLIC.permutation(D, (0, 0)).numpy())


TWO_PHASE = {"tp-topk": papers.energy_score, "tp-coherent": papers.coherent_score, "tp-rand": random_score}


@pytest.mark.parametrize("name", TWO_PHASE)
@pytest.mark.parametrize("seed", range(3))
def test_tp_topk_is_algorithm_1_in_both_phases_and_its_kin_differ_in_the_score_alone(name, seed):
    method = get_method(name, active_ratio=0.29)
    problem = Problem(steps=20, seed=seed)
    plan = plan_of(method, epochs=4, max_grad_norm=(0.8, 0.5)).with_noise({"warm-up": 1.1, "main": 0.7})
    run = drive(plan, problem, lr=0.5)
    oracle = papers.train_tp_topk(
        *problem.given,
        T1=6, B=8, C1=0.8, C2=0.5, sigma1=1.1, sigma2=0.7, lr=0.5, k=8,
        score=TWO_PHASE[name],
    )  # fmt: skip
    assert plan.first_step("main") == 6
    if name != "tp-rand":
        np.testing.assert_allclose(run.controller.scores(), oracle["scores"], atol=1e-9)
    assert run.settings[5].support.is_full
    assert run.settings[6].support.indices.tolist() == oracle["support"]
    assert_same_path(run.weights, oracle["history"], problem.theta)


def test_dp_sgd_is_the_first_phase_for_good():
    method, problem = get_method("dp-sgd"), Problem(steps=10)
    run = drive(plan_of(method, epochs=2, noise=1.1), problem, lr=0.5)
    oracle = papers.train_tp_topk(
        *problem.given,
        T1=10, B=8, C1=1.0, C2=1.0, sigma1=1.1, sigma2=1.1, lr=0.5, k=D,
    )  # fmt: skip
    assert_same_path(run.weights, oracle["history"], problem.theta)


@pytest.mark.parametrize(("refresh", "epochs", "active_ratio"), [(1, 4, 0.1), (5, 5, 0.2)])
@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_on_rand_is_algorithm_1_of_random_sparsification(refresh, epochs, active_ratio, momentum):
    method = get_method("on-rand", active_ratio=active_ratio, clock=PerEpoch(refresh))
    problem = Problem(steps=epochs * STEPS_PER_EPOCH, seed=1)
    plan = plan_of(method, epochs=epochs).with_noise({"train": 0.9})
    run = drive(plan, problem, lr=0.3, momentum=momentum)
    orders = [PUBLIC.permutation(D, (0, n)).tolist() for n in range(refresh * epochs)]
    oracle = papers.train_random(
        *problem.given, orders,
        E=epochs, final_rate=1 - active_ratio, B=8, lr=0.3, momentum=momentum, clip=1.0, sigma=0.9,
        refresh=refresh,
    )  # fmt: skip
    np.testing.assert_array_equal(run.masks, oracle["masks"])
    assert_same_path(run.weights, oracle["history"], problem.theta)


@pytest.mark.parametrize(("name", "energy"), [("ranked", False), ("on-topk", True)])
@pytest.mark.parametrize("seed", range(2))
def test_ranked_is_algorithm_4_and_on_topk_the_same_with_the_energy_score(name, energy, seed):
    method = get_method(name, active_ratio=0.1)
    problem = Problem(steps=20, seed=seed)
    plan = plan_of(method, epochs=4, max_grad_norm=0.8).with_noise({"train": 0.5})
    run = drive(plan, problem, lr=0.3, momentum=0.9)
    fresh = [PUBLIC.normal(D, (FROZEN_NOISE, step)).numpy() for step in range(20)]
    oracle = papers.train_ranked(
        *problem.given, fresh,
        E=4, final_rate=0.9, B=8, C=0.8, sigma=0.5, lr=0.3, momentum=0.9, energy=energy,
    )  # fmt: skip
    np.testing.assert_array_equal(run.masks, oracle["masks"])
    came_back = (np.diff(run.masks, axis=0) > 0).any()
    assert came_back, "no frozen coordinate returned, so the fresh noise was not tested"
    assert_same_path(run.weights, oracle["history"], problem.theta)


ADADPIGU_CASES = {
    "alone": ({}, {}),
    "top-r": ({"per_sample_top": 0.4}, {"per_sample_top": 0.4}),
    "unfreezing": (
        {"schedule": ProgressiveUnfreezing((0.5, 0.8))},
        {"counts": [9] * 5 + [15] * 5 + [24] * 4},
    ),
    "unfreezing each step": (
        {"schedule": ProgressiveUnfreezing((0.4, 0.5, 0.6, 0.9)), "clock": EverySteps(1)},
        {"counts": [9, 12, 15, 18] + [27] * 10},
    ),
    "everything": (
        {"schedule": ProgressiveUnfreezing((0.5, 0.8)), "per_sample_top": 0.6, "prune": True},
        {"counts": [9] * 5 + [15] * 5 + [24] * 4, "per_sample_top": 0.6, "prune": True},
    ),
    "pruned": ({"prune": True}, {"prune": True}),
}


@pytest.mark.parametrize("case", ADADPIGU_CASES)
def test_adadpigu_is_algorithms_1_and_2(case):
    ours, theirs = ADADPIGU_CASES[case]
    method = get_method("adadpigu", active_ratio=0.3, decays=Decays(0.8, 0.6, 1e-3), **ours)
    problem = Problem(steps=20, seed=4)
    plan = plan_of(method, epochs=4).with_noise({"warm-up": 0.9, "main": 0.6})
    run = drive(plan, problem, lr=0.4)
    oracle = papers.train_adadpigu(
        *problem.given,
        T_pre=6, B=8, C=1.0, sigma_pre=0.9, sigma=0.6, lr=0.4, gamma1=0.8, gamma2=0.6, mu=1e-3,
        **{"counts": [9] * 14, **theirs},
    )  # fmt: skip
    np.testing.assert_allclose(run.controller.scores(), oracle["scores"], atol=1e-9)
    np.testing.assert_array_equal(run.masks[6:], oracle["masks"])
    assert_same_path(run.weights, oracle["history"], problem.theta)
    state = run.controller.state().tensors
    on = state["support"].numpy()
    np.testing.assert_allclose(state["alpha"], oracle["alpha"][on], atol=1e-9)
    np.testing.assert_allclose(state["beta"], oracle["beta"][on], atol=1e-9)
