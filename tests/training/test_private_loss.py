"""A training loss that is released: bounded by unit, paid for within its step, the plan's epsilon as it was."""

from __future__ import annotations

import itertools
import json
import logging
import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from runs import FEATURES, ROWS, a_plan, a_trainer, advance, loss_fn, network, rows, weights
from sparsedp.batch import MicroBatch, from_criterion
from sparsedp.clipping import ROUNDING_MARGIN, FlatClip
from sparsedp.errors import PrivacyError, SparseDPError
from sparsedp.federated.server import check_federated
from sparsedp.grad_sample.reference import ExampleLosses
from sparsedp.methods import get_method
from sparsedp.methods.plan_config import PlanConfig
from sparsedp.privacy.charge import Charge, ChargeLog, SplitCharge
from sparsedp.privacy.ledger import Ledger
from sparsedp.privacy.plan import Phase, Plan
from sparsedp.privacy.queries import LossSum
from sparsedp.results import Callback, Result
from sparsedp.runs.verify import verify
from sparsedp.training.planning import spec_for

pytestmark = pytest.mark.usefixtures("checked_once")

BOUND = 2.0
CLAMPED = BOUND / (1 + ROUNDING_MARGIN)
DP_SGD = get_method("dp-sgd")
VALUES = [math.nan, math.inf, -math.inf, 1e30, -1e30, 3.0, BOUND, 1e-300, 0.0, -0.5, 0.7]


def summed(batches: list[MicroBatch], losses=lambda batch: batch.rows) -> float:
    return float(sum(LossSum(losses, batches, FlatClip(BOUND)).partial_sums(BOUND)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("value", VALUES)
def test_a_unit_moves_the_summed_loss_by_at_most_its_bound(value: float, dtype: torch.dtype) -> None:
    """Alone, beside others as odd, and as one or all of several examples of a unit."""
    odd = torch.tensor(value, dtype=dtype)
    for others in ([], VALUES, [0.1, 0.2]):
        rest = torch.tensor(others, dtype=dtype)
        without = summed([MicroBatch(rest)])
        assert 0 <= without <= BOUND * len(others)
        assert 0 <= summed([MicroBatch(torch.cat([rest, odd[None]]))]) - without <= BOUND
        units, last = torch.arange(len(others)), torch.full((3,), len(others))
        for own in ([value] * 3, [0.3, value, 0.4]):
            batch = MicroBatch(torch.cat([rest, torch.tensor(own, dtype=dtype)]), torch.cat([units, last]))
            assert 0 <= summed([batch]) - without <= BOUND
    assert summed([]) == 0


def test_a_diverged_model_shows_the_bound_and_a_unit_the_mean_of_its_examples() -> None:
    assert summed([MicroBatch(torch.tensor([math.nan, math.inf]))]) == 2 * CLAMPED
    batch = MicroBatch(torch.tensor([0.5, 1.5, 9.0]), torch.tensor([0, 0, 1]))
    assert summed([batch, MicroBatch(torch.tensor([0.25]))]) == 1.0 + CLAMPED + 0.25


@pytest.mark.parametrize("value", [math.nan, math.inf, 1e30])
def test_an_example_that_is_not_finite_moves_nothing_but_its_own_loss(value: float) -> None:
    x, y = rows(1, 40).tensors
    losses = ExampleLosses(network(), from_criterion(loss_fn))
    before = losses(MicroBatch((x, y)))
    x = x.clone()
    x[7] = value
    after = losses(MicroBatch((x, y)))
    others = torch.arange(40) != 7
    assert torch.equal(after[others], before[others])


class Branching(nn.Module):
    """Reads a value: PyTorch cannot vectorise it."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(FEATURES, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x if float(x.sum()) > 0 else -x)


@pytest.mark.parametrize("make", [network, Branching])
def test_losses_are_those_of_every_example_alone(make) -> None:
    """More examples than are computed at once."""
    model, (x, y) = make(), rows(1).tensors
    found = ExampleLosses(model, from_criterion(loss_fn))(MicroBatch((x, y), seed=bytes(32)))
    plain = torch.cat([loss_fn(model(x[i : i + 1]), y[i : i + 1]) for i in range(ROWS)])
    torch.testing.assert_close(found, plain.detach())
    assert not found.requires_grad


def test_losses_draw_from_the_secret_alone_and_move_no_generator() -> None:
    model, (x, y) = network(dropout=0.5), rows(1).tensors
    losses, state = ExampleLosses(model, from_criterion(loss_fn)), torch.get_rng_state()
    one, again, other = (losses(MicroBatch((x, y), seed=bytes([n] * 32))) for n in (1, 1, 2))
    assert torch.equal(one, again)
    assert not torch.equal(one, other)
    assert torch.equal(torch.get_rng_state(), state)


class Noises(Callback):
    """The standard deviation of every step's noise on its mean."""

    def __init__(self) -> None:
        self.seen: list[float] = []

    def on_step(self, report) -> None:
        self.seen.append(float(report.released.noise_scale[0]))


def test_released_loss_is_the_mean_with_noise_of_the_stated_size() -> None:
    """Weights that stay: 400 epochs are 400 releases of the same mean over fresh batches."""
    plan, noises, network_ = a_plan(DP_SGD, epochs=400, private_loss=BOUND), Noises(), network()
    rest = {"optimizer": lambda p: torch.optim.SGD(p, lr=0.0), "callbacks": [noises], "evaluate": None}
    history = advance(a_trainer("dp-sgd", plan=plan, model=network_, seed=5, **rest)).finish().history
    (phase,), size = plan.phases, plan.expected_batch_size(plan.phases[0])
    x, y = rows(1).tensors
    losses = loss_fn(network_(x), y).detach().clamp(0, CLAMPED).double().numpy()
    found = np.array([one.training_loss for one in history])
    (noise,) = {one.training_loss_noise for one in history}
    assert noise == pytest.approx(5 * phase.noise_multiplier * BOUND / size)
    rate = phase.sampling_rate
    variance = noise**2 + rate * (1 - rate) * float((losses**2).sum()) / size**2
    assert abs(found.mean() - losses.mean()) < 5 * math.sqrt(variance / len(found))
    assert abs(found.var(ddof=1) / variance - 1) < 5 * math.sqrt(2 / len(found))
    whole = phase.noise_multiplier * phase.clip_norm / size
    assert noises.seen[2::3] == pytest.approx([whole / math.sqrt(0.96)] * 400)
    assert noises.seen[0::3] + noises.seen[1::3] == pytest.approx([whole] * 800)


@pytest.mark.parametrize("method", ["dp-sgd", "tp-topk", "fest"])
def test_a_plan_with_a_loss_costs_what_it_costs_without(method: str) -> None:
    plain, asked = a_plan(get_method(method)), a_plan(get_method(method), private_loss=BOUND)
    assert asked.events() == plain.events()
    assert asked.target_epsilon == plain.target_epsilon
    assert asked.fingerprint != plain.fingerprint
    assert "loss" not in plain.to_json()
    assert PlanConfig.of(asked).private_loss == BOUND
    assert Plan.from_json(asked.to_json()) == asked
    steps = [step for step in range(asked.total_steps) if asked.releases_loss(step)]
    assert steps == [end - 1 for end in asked.epoch_ends()]
    assert not any(map(plain.releases_loss, range(plain.total_steps)))


def test_a_run_with_a_loss_pays_what_one_without_pays_and_is_verified(tmp_path) -> None:
    results: dict[str, Result] = {}
    seen: dict[str, list[Any]] = {}
    for name, asked in (("plain", {}), ("loss", {"private_loss": BOUND})):
        events = seen[name] = []
        trainer = a_trainer(
            "dp-sgd", plan=a_plan(DP_SGD, **asked), out=tmp_path / name, callbacks=[events.append]
        )
        results[name] = advance(trainer).finish()
    plain, loss = results["plain"], results["loss"]
    ledgers = [Ledger.read(tmp_path / name / "ledger.jsonl") for name in results]
    assert ledgers[0].sealed == ledgers[1].sealed
    assert ledgers[0].events() == ledgers[1].events()
    assert [one.epsilon for one in plain.history] == [one.epsilon for one in loss.history]
    assert plain.epsilon == loss.epsilon
    assert verify(tmp_path / "loss").passed
    for step in (0, 1):  # before the first loss no bit differs, and in the third step the noise does
        assert torch.equal(seen["plain"][step].released.mean, seen["loss"][step].released.mean)
    assert not torch.equal(seen["plain"][2].released.mean, seen["loss"][2].released.mean)
    assert not torch.equal(weights(plain.model), weights(loss.model))
    assert len({one.training_loss for one in loss.history}) == len(loss.history) == 5
    lines = [json.loads(line) for line in (tmp_path / "loss" / "metrics.jsonl").read_text().splitlines()]
    assert [line["training_loss"] for line in lines] == [one.training_loss for one in loss.history]
    assert all(one.training_loss is None for one in plain.history)
    assert "training_loss" not in (tmp_path / "plain" / "metrics.jsonl").read_text()


def test_loss_and_gradient_leave_no_third_release() -> None:
    phase = Phase("train", 3, 0.1, 1.0, 0.8, loss_bound=BOUND)
    whole = Charge("train", 2, 0.1, phase.noise_multiplier)
    of_loss, of_gradient = phase.loss_noises
    assert of_loss**-2 + of_gradient**-2 == pytest.approx(phase.noise_multiplier**-2, rel=1e-14)
    for order in itertools.permutations([(of_loss, 2), (of_gradient, 0)]):
        ledger = ChargeLog()
        paid = SplitCharge(ledger, whole)
        for noise, release in order:
            paid.charge(replace(whole, noise_multiplier=noise, release=release))
        with pytest.raises(PrivacyError, match="cost more"):
            paid.charge(replace(whole, noise_multiplier=1e4, release=3))
        assert ledger.charges == [whole]


def test_a_loss_is_refused_where_nothing_can_pay_for_it() -> None:
    with pytest.raises(PrivacyError, match="private_loss"):
        a_plan(get_method("adafest"), private_loss=BOUND)
    with pytest.raises(PrivacyError, match="private_loss"):
        Phase("look", 1, 1.0, 1.0, trains=False, loss_bound=BOUND)
    with pytest.raises(PrivacyError, match="private_loss"):
        check_federated(a_plan(DP_SGD, private_loss=BOUND))
    for wrong in (0.0, -1.0, math.inf, math.nan):
        with pytest.raises(SparseDPError, match="private_loss"):
            a_plan(DP_SGD, private_loss=wrong)


def test_what_a_loss_costs_is_said_before_training(caplog) -> None:
    with caplog.at_level(logging.INFO, "sparsedp"):
        a_plan(DP_SGD)
        assert "private_loss" not in caplog.text
        spec_for(network(), "auto", units=ROWS, unit_name="row", private_loss=BOUND)
    assert caplog.text.count("private_loss") == 1
    assert "private_loss: the last step of an epoch gives 4 % of its precision" in caplog.text
    assert "2.1 % larger, epsilon the same" in caplog.text
