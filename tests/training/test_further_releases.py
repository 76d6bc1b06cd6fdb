"""Releases beside the gradient: private normalisation, and a training loss within the charge of its step."""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import Dataset, TensorDataset

from runs import (
    CLASSES,
    FEATURES,
    ROWS,
    a_plan,
    a_trainer,
    advance,
    loss_fn,
    network,
    noise_of,
    placed,
    rows,
    sgd,
    weights,
)
from sparsedp import Normalised, PrivateNormalisation, fit
from sparsedp.batch import MicroBatch, from_criterion
from sparsedp.clipping import ROUNDING_MARGIN, FlatClip
from sparsedp.errors import ModelError, PrivacyError, SparseDPError
from sparsedp.federated.server import check_federated
from sparsedp.grad_sample.reference import ExampleLosses
from sparsedp.methods import get_method
from sparsedp.methods.plan_config import PlanConfig
from sparsedp.privacy import mechanism
from sparsedp.privacy.charge import Charge, ChargeLog, SplitCharge
from sparsedp.privacy.ledger import Ledger
from sparsedp.privacy.plan import Phase, Plan
from sparsedp.privacy.queries import LossSum
from sparsedp.results import Callback, Result
from sparsedp.runs.checkpoint import read_checkpoint
from sparsedp.runs.verify import verify

pytestmark = pytest.mark.usefixtures("checked_once")

ASKED = PrivateNormalisation(noise_multiplier=3.0, clip_norm=2.0)


def train(out: Path | None = None, *, dataset: Dataset[Any] | None = None, **more: Any) -> Result:
    """A whole run of 17 releases: two, then 15 steps."""
    settings = {
        "method": "tp-topk", "epsilon": 8.0, "delta": 1e-3, "epochs": 5, "batch_size": 20,
        "optimizer": sgd, "accountant": "rdp", "normalise": ASKED, "seed": 0,
    }  # fmt: skip
    model = more.pop("model", None) or network()
    return fit(model, dataset or rows(1), loss_fn, run_dir=out, **placed({**settings, **more}))


def by_hand(x: np.ndarray, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Both releases of rows of numbers in NumPy, with the noise of a seed; rows that are not finite left out."""
    std, bound = ASKED.noise_multiplier * ASKED.clip_norm / len(x), ASKED.clip_norm / 1.001
    finite, released = x[np.isfinite(x).all(axis=1)], []
    for step in range(2):
        vectors = finite if step == 0 else np.abs(finite - released[0])
        lengths = np.linalg.norm(vectors, axis=1, keepdims=True)
        noise = noise_of(seed, (step,), ASKED.clip_norm, ASKED.noise_multiplier, x.shape[1]) / len(x)
        released.append((vectors * np.minimum(1, bound / lengths)).sum(axis=0) / len(x) + noise)
    return released[0], np.maximum(released[1], std)


@pytest.mark.parametrize("pictures", [False, True])
def test_the_constants_are_the_noisy_clipped_means_and_spreads(pictures):
    """Of pictures, by channel."""
    inputs, targets = rows(1).tensors
    centre, scale = by_hand(inputs.double().numpy())
    if pictures:
        inputs = inputs.reshape(ROWS, FEATURES, 1, 1).expand(-1, -1, 2, 3).contiguous()
        net = nn.Sequential(nn.Conv2d(FEATURES, CLASSES, (2, 3)), nn.Flatten())
        model = train(model=net, dataset=TensorDataset(inputs, targets), method="dp-sgd").model
    else:
        model = train().model
    np.testing.assert_allclose(model.centre.numpy(), centre, rtol=1e-5)
    np.testing.assert_allclose(model.scale.numpy(), scale, rtol=1e-5)


def test_the_model_is_given_normalised_inputs_of_any_shape():
    model = Normalised(nn.Flatten(), 2)
    model.centre.copy_(torch.tensor([1.0, -2.0]))
    model.scale.copy_(torch.tensor([2.0, 0.5]))
    maps = torch.tensor([[3.0, 5.0], [-2.0, 0.0]]).reshape(1, 2, 2, 1)
    assert model(maps).tolist() == [[1.0, 2.0, 0.0, 4.0]]
    assert model(torch.tensor([[3.0, -1.0]])).tolist() == [[1.0, 2.0]]
    with pytest.raises(ModelError, match=r"expected .rows, 2, "):
        model(torch.zeros(4, 3))


def test_the_epsilon_of_a_run_has_the_normalisation_in_it_and_every_file_agrees(tmp_path):
    result = train(tmp_path / "run")
    plan = json.loads((tmp_path / "run/plan.json").read_text())
    assert [phase["name"] for phase in plan["phases"]] == ["normalise", "warm-up", "main"]
    ledger = Ledger.read(tmp_path / "run/ledger.jsonl")
    assert ledger.charged == 17
    assert [(block.phase, block.noise_multiplier, block.sampling_rate) for block in ledger.blocks[:2]] == [
        ("normalise", 3.0, 1.0)
    ] * 2
    assert 0.995 * 8 <= result.ledger.epsilon <= 8
    assert [report.step for report in result.history] == [5, 8, 11, 14, 17]
    assert json.loads((tmp_path / "run/record.json").read_text())["batch_size"] == 20
    found = verify(tmp_path / "run")
    assert found.passed, found.checks
    assert result.report().stat().st_size > 10_000


class Killed(BaseException):
    """Stands for a kill: nothing that cleans up catches it."""


@contextmanager
def killed_after_paying(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The process dies after both releases and before they are saved."""

    def die(*_: object) -> None:
        raise Killed

    with monkeypatch.context() as patch:
        patch.setattr(Normalised, "set_constants", die)
        with pytest.raises(Killed):
            yield


@pytest.fixture
def drawn(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The steps the mechanism released, in order."""
    steps: list[int] = []
    real = mechanism.GaussianMechanism.release

    def noted(self: Any, query: Any, charge: Any, **how: Any) -> mechanism.Release:
        steps.append(charge.step)
        return real(self, query, charge, **how)

    monkeypatch.setattr(mechanism.GaussianMechanism, "release", noted)
    return steps


def test_a_seeded_run_killed_between_release_and_save_replays_it_and_is_charged_once(tmp_path, monkeypatch):
    with killed_after_paying(monkeypatch):
        train(tmp_path / "cut")
    assert Ledger.read(tmp_path / "cut/ledger.jsonl").charged == 2
    assert read_checkpoint(tmp_path / "cut/checkpoint.safetensors").step == 0
    result, whole = train(tmp_path / "cut", resume=True), train(tmp_path / "whole")
    assert torch.equal(result.model.scale, whole.model.scale)
    assert torch.equal(weights(result.model), weights(whole.model))
    assert result.ledger.steps == whole.ledger.steps == 17


def test_without_a_seed_a_lost_normalisation_is_not_released_again(tmp_path, monkeypatch, drawn):
    with killed_after_paying(monkeypatch):
        train(tmp_path / "cut", seed=None)
    with pytest.raises(PrivacyError, match="paid for its normalisation"):
        train(tmp_path / "cut", seed=None, resume=True)
    assert drawn == [0, 1]
    assert Ledger.read(tmp_path / "cut/ledger.jsonl").charged == 2


def stop_at(step: int) -> Any:
    def stop(event: Any) -> None:
        if event.step == step:
            raise Killed

    return stop


@pytest.mark.parametrize("seed", [0, None])
def test_a_run_killed_in_its_first_step_goes_on_with_the_constants_it_paid_for(seed, tmp_path, drawn):
    with pytest.raises(Killed):
        train(tmp_path / "cut", seed=seed, callbacks=[stop_at(2)])
    saved = read_checkpoint(tmp_path / "cut/checkpoint.safetensors")
    assert saved.step == 2
    result = train(tmp_path / "cut", seed=seed, resume=True)
    assert torch.equal(result.model.centre, saved.state["model"]["centre"])
    assert torch.equal(result.model.scale, saved.state["model"]["scale"])
    assert [step for step in drawn if step < 2] == [0, 1]
    assert result.ledger.steps == 17
    assert result.ledger.epsilon <= 8
    if seed is not None:
        assert torch.equal(weights(result.model), weights(train().model))


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


def test_losses_are_those_of_every_example_alone() -> None:
    """More examples than are computed at once; what is not finite moves nothing but its own loss."""
    model, (x, y) = network(), rows(1).tensors
    found = ExampleLosses(model, from_criterion(loss_fn))(MicroBatch((x, y), seed=bytes(32)))
    plain = torch.cat([loss_fn(model(x[i : i + 1]), y[i : i + 1]) for i in range(ROWS)])
    torch.testing.assert_close(found, plain.detach())
    assert not found.requires_grad
    for value in (math.nan, math.inf, 1e30):
        odd, others = x.clone(), torch.arange(ROWS) != 7
        odd[7] = value
        after = ExampleLosses(model, from_criterion(loss_fn))(MicroBatch((odd, y), seed=bytes(32)))
        assert torch.equal(after[others], found[others])


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
    assert "training_loss" in (tmp_path / "loss" / "metrics.jsonl").read_text()
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
