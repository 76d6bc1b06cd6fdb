"""Private normalisation in a run: charged like every step, released once, carried by the model."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import Dataset, TensorDataset

from flat_settings import placed
from runs import CLASSES, FEATURES, ROWS, a_plan, loss_fn, network, rows, sgd, weights
from sparsedp import Normalised, PrivateNormalisation, fit, load_weights
from sparsedp.errors import ModelError, PrivacyError
from sparsedp.methods import build_plan, get_method
from sparsedp.privacy import mechanism
from sparsedp.privacy.ledger import Ledger
from sparsedp.privacy.mechanism import Grid
from sparsedp.privacy.plan import Phase
from sparsedp.randomness import SeededRandomness
from sparsedp.results import Result
from sparsedp.runs.checkpoint import read_checkpoint
from sparsedp.runs.verify import verify
from sparsedp.training.trainer import Trainer

pytestmark = pytest.mark.usefixtures("checked_once")

ASKED = PrivateNormalisation(noise_multiplier=3.0, clip_norm=2.0)


def train(out: Path | None = None, *, dataset: Dataset[Any] | None = None, **more: Any) -> Result:
    """A whole run of 17 releases: two, then 15 steps."""
    settings = {
        "method": "tp-topk", "epsilon": 8.0, "delta": 1e-3, "epochs": 5, "batch_size": 20,
        "optimizer": sgd, "accountant": "rdp", "normalise": ASKED, "seed": 0,
    }  # fmt: skip
    return fit(network(), dataset or rows(1), loss_fn, run_dir=out, **placed({**settings, **more}))


def noise_of(seed: int, step: int, size: int) -> Tensor:
    """In standard deviations."""
    bits = Grid.for_mechanism(ASKED.clip_norm, ASKED.noise_multiplier, size).noise_bits
    return SeededRandomness(seed).rounded_gaussian(bits, size, key=(step,)).double() / 2**bits


def by_hand(x: np.ndarray, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Both releases of rows of numbers in NumPy, with the noise of a seed; rows that are not finite left out."""
    std, bound = ASKED.noise_multiplier * ASKED.clip_norm / len(x), ASKED.clip_norm / 1.001
    finite, released = x[np.isfinite(x).all(axis=1)], []
    for step in range(2):
        vectors = finite if step == 0 else np.abs(finite - released[0])
        lengths = np.linalg.norm(vectors, axis=1, keepdims=True)
        noise = noise_of(seed, step, x.shape[1]).numpy()
        released.append((vectors * np.minimum(1, bound / lengths)).sum(axis=0) / len(x) + std * noise)
    return released[0], np.maximum(released[1], std)


def test_the_constants_are_the_noisy_clipped_means_and_spreads():
    model = train().model
    centre, scale = by_hand(rows(1).tensors[0].double().numpy())
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


def test_a_channel_without_spread_is_scaled_by_the_noise_at_most():
    inputs = torch.cat([torch.zeros(ROWS, FEATURES - 1), torch.ones(ROWS, 1)], dim=1)
    model = train(dataset=TensorDataset(inputs, rows(1).tensors[1])).model
    noise = ASKED.noise_multiplier * ASKED.clip_norm / ROWS
    assert bool((model.scale >= noise * (1 - 1e-6)).all())


def test_pictures_are_normalised_by_channel():
    pictures = rows(1).tensors[0].reshape(ROWS, FEATURES, 1, 1).expand(-1, -1, 2, 3).contiguous()
    net = nn.Sequential(nn.Conv2d(FEATURES, CLASSES, (2, 3)), nn.Flatten())
    result = fit(
        net, TensorDataset(pictures, rows(1).tensors[1]), loss_fn, method="dp-sgd", epsilon=8, delta=1e-3,
        epochs=1, batch_size=20, accountant="rdp", normalise=ASKED, seed=0,
    )  # fmt: skip
    centre, scale = by_hand(rows(1).tensors[0].double().numpy())
    np.testing.assert_allclose(result.model.centre.numpy(), centre, rtol=1e-5)
    np.testing.assert_allclose(result.model.scale.numpy(), scale, rtol=1e-5)


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


def test_a_saved_model_stands_alone(tmp_path):
    result = train(tmp_path / "run")
    loaded = Normalised(network(seed=5), FEATURES)
    load_weights(tmp_path / "run", loaded)
    inputs = rows(3).tensors[0]
    assert torch.equal(loaded.eval()(inputs), result.model(inputs))
    with pytest.raises(ModelError, match="another model"):
        load_weights(tmp_path / "run", network())


def test_patients_are_clipped_as_a_whole_and_counted_once():
    """Forty rows of one patient far out, twenty patients with one row: N is 21, and the crowd counts once."""
    inputs = torch.cat([torch.full((40, FEATURES), 50.0), torch.zeros(20, FEATURES)])
    owner = [0] * 40 + list(range(1, 21))
    model = train(
        dataset=TensorDataset(inputs, rows(1).tensors[1]), unit_ids=owner, unit_name="patient", rows_per_unit=40,
        batch_size=7,
    ).model  # fmt: skip
    noise = ASKED.noise_multiplier * ASKED.clip_norm * noise_of(0, 0, FEATURES)
    total = 21 * model.centre.double() - noise
    assert float(total.norm()) == pytest.approx(ASKED.clip_norm / 1.001, rel=1e-4)


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


def test_the_schedule_spans_the_training_steps_alone():
    seen: list[int] = []

    def scheduler(optimizer, steps):
        seen.append(steps)
        return torch.optim.lr_scheduler.ConstantLR(optimizer)

    train(lr_scheduler=scheduler)
    assert seen == [15]


def plan_with(*phases: Phase) -> Any:
    plan = a_plan(get_method("dp-sgd"))
    return replace(plan, phases=(*phases, *plan.phases), target_epsilon=None, accountant=None)


@pytest.mark.parametrize(
    ("phase", "named"),
    [
        (replace(ASKED.phase(), name="medians"), "medians"),
        (replace(ASKED.phase(), steps=3), "comes first and has one or 2 releases"),
    ],
)
def test_other_phases_that_do_not_train_are_refused(phase, named):
    with pytest.raises(PrivacyError, match=named):
        Trainer(
            Normalised(network(), FEATURES), rows(1), loss_fn, plan=plan_with(phase), optimizer=sgd,
        )  # fmt: skip


def test_without_a_centre_one_release_scales_the_chosen_columns_around_zero(tmp_path):
    asked = PrivateNormalisation(noise_multiplier=3.0, clip_norm=2.0, centre=False, columns=(2, 0))
    assert asked == PrivateNormalisation.from_json(json.loads(json.dumps(asked.to_json())))
    result = train(tmp_path / "run", normalise=asked)
    x = np.abs(rows(1).tensors[0].double().numpy()[:, [0, 2]])
    lengths = np.linalg.norm(x, axis=1, keepdims=True)
    std = 3.0 * 2.0 / len(x)
    mean = (x * np.minimum(1, 2.0 / 1.001 / lengths)).sum(axis=0) / len(x) + std * noise_of(0, 0, 2).numpy()
    expected = np.ones(FEATURES)
    expected[[0, 2]] = np.maximum(mean, std)
    np.testing.assert_allclose(result.model.scale.numpy(), expected, rtol=1e-5)
    assert not result.model.centre.any()
    ledger = Ledger.read(tmp_path / "run/ledger.jsonl")
    assert ledger.charged == 16
    assert [block.phase for block in ledger.blocks[:2]] == ["normalise", "warm-up"]
    assert verify(tmp_path / "run").passed


def test_a_model_without_a_place_for_the_constants_is_refused():
    plan = build_plan(
        get_method("dp-sgd"), units=ROWS, batch_size=20, epochs=1, epsilon=8, delta=1e-3, max_grad_norm=1.0,
        accountant="rdp", normalise=ASKED,
    )  # fmt: skip
    with pytest.raises(ModelError, match="Normalised\\(model, channels\\)"):
        Trainer(network(), rows(1), loss_fn, plan=plan, optimizer=sgd)
