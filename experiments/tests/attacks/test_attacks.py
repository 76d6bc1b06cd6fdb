"""Attacks: who was in the data, and what the inputs looked like."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

from sparsedp.auditing.canaries import AuditTarget
from sparsedp.batch import from_criterion, per_sample_loss
from sparsedp.clipping import FlatClip
from sparsedp.loading import DataConfig
from sparsedp.methods import build_plan
from sparsedp.parameters import Support
from sparsedp.randomness import PublicRandomness, SystemRandomness
from sparsedp_experiments.attacks.audits import attack_settings
from sparsedp_experiments.attacks.membership import (
    ExcludeUnits,
    MembershipAttackConfig,
    MembershipFinding,
    Mislabelled,
    attack_membership,
)
from sparsedp_experiments.attacks.reconstruction import (
    Effort,
    invert,
    least_squares_attack,
    mean_reconstruction_error,
    mean_squared_error,
    observe,
    reconstruction_error,
    reconstruction_lower_bound,
)
from sparsedp_experiments.runs.settings import Settings

# Planted units and the losses of trained models: honest training hides them, training without noise does not.


def data(rows: int, width: int = 24) -> TensorDataset:
    inputs = torch.randn(rows, width, generator=torch.Generator().manual_seed(0))
    return TensorDataset(inputs, (inputs[:, 0] > 0).long())


def attacked(
    how: MembershipAttackConfig, rows: TensorDataset, significance: float = 0.01, **plan
) -> MembershipFinding:
    width = rows.tensors[0].shape[1]
    asked = {
        "method": "dp-sgd",
        "epsilon": 8.0,
        "delta": 1e-5,
        "epochs": 2,
        "batch_size": 40,
        "max_grad_norm": 0.5,
    }
    torch.manual_seed(0)
    subject = AuditTarget(
        model=nn.Linear(width, 2),
        dataset=rows,
        loss=per_sample_loss(nn.CrossEntropyLoss(reduction="none")),
        plan=build_plan(**{**asked, **plan}, units=len(rows)),
        loading=DataConfig(),
        engine="bookkeeping",
    )
    return attack_membership(subject, subject.model, how, significance)


def test_mislabelled_rows_get_another_label_and_the_others_keep_theirs():
    base = data(60)
    changed = Mislabelled.of(base, [3, 7, 59], PublicRandomness(0))
    assert len(changed) == 60
    for row in range(60):
        same = bool(changed[row][1] == base[row][1])
        assert same == (row not in (3, 7, 59))
        assert torch.equal(changed[row][0], base[row][0])


def test_excluded_unit_is_never_drawn_and_the_others_are_as_before():
    present = torch.rand(4000, generator=torch.Generator().manual_seed(0)).numpy() < 0.5
    drawn = ExcludeUnits(present).bernoulli(0.5, 4000, key=())
    assert not drawn[~present].any()
    assert 0.4 < drawn[present].mean() < 0.6


def test_attack_on_an_honest_model_stays_within_its_claim():
    found = attacked(MembershipAttackConfig(records=100, trainings=2), data(400), 1e-7, method="tp-topk")
    assert found.lower_bound <= 8.0
    assert found.scores.count == 200


@pytest.mark.nightly
def test_attack_on_a_model_trained_without_noise_finds_its_records(monkeypatch):
    """A wide model learns noise by heart: 200 guesses show more than the epsilon of a half that is claimed."""

    def silent(self, bits, sums, key):
        """Draws zeros."""

    how = MembershipAttackConfig(records=200, lr=2.0)
    plan = {"batch_size": 200, "epochs": 20, "epsilon": 0.5}
    assert attacked(how, data(200, 4000), **plan).lower_bound <= 0.5
    monkeypatch.setattr(SystemRandomness, "add_rounded_gaussian", silent)
    assert attacked(how, data(200, 4000), **plan).lower_bound > 0.5


@pytest.mark.nightly
def test_attack_settings_tells_no_more_of_a_private_run_than_it_claims():
    asked = {"dataset": "digits", "model": "logistic", "method": "dp-sgd", "epsilon": 1.0, "delta": 1e-5}
    small = Settings.from_json({**asked, "epochs": 2, "subset": 200})
    found = attack_settings(small, records=20, trainings=2, confidence=0.9999999)
    assert found.trainings == 2
    assert found.lower_bound <= 1.0


PUBLIC = PublicRandomness(0)


@pytest.mark.parametrize("columns", [1, 3])
def test_the_closed_form_error_agrees_with_simulated_attacks(columns):
    """z-test over 4,000 attacks; false-alarm rate below 1e-6."""
    rng, d, noise = np.random.default_rng(0), 20, 0.3
    constraints = torch.from_numpy(rng.standard_normal((d, columns)))
    truth = torch.from_numpy(rng.standard_normal(columns))
    support = Support(rng.permutation(d)[:9], d)
    errors = []
    for _ in range(4000):
        seen = (constraints @ truth)[support.indices] + noise * torch.from_numpy(rng.standard_normal(9))
        errors.append(float(((least_squares_attack(constraints, seen, support) - truth) ** 2).sum()))
    expected = reconstruction_error(constraints, support, noise)
    assert abs(np.mean(errors) - expected) < 5 * np.std(errors) / math.sqrt(4000)


def test_without_noise_the_input_comes_back():
    constraints = torch.tensor([[1.0], [2.0], [-1.0]])
    found = least_squares_attack(constraints, torch.tensor([8.0, -4.0]), Support([1, 2], 3))
    assert found.tolist() == pytest.approx([4.0])


@pytest.mark.parametrize("columns", [1, 2])
@pytest.mark.parametrize("rate", [0.0, 0.3, 0.6, 0.8])
def test_theorem_5_1_is_a_lower_bound_of_the_mean_error(columns, rate):
    constraints = torch.from_numpy(np.random.default_rng(1).standard_normal((30, columns)))
    bound = reconstruction_lower_bound(constraints, rate, 0.5)
    assert mean_reconstruction_error(constraints, rate, 0.5, PUBLIC) >= bound * (1 - 1e-12)


def test_theorem_5_1_is_an_equality_for_equal_constraints_and_by_hand():
    constraints = torch.full((10,), 2.0)
    assert reconstruction_lower_bound(constraints, 0.5, 0.3) == pytest.approx(0.09 / (0.5 * 40))
    assert mean_reconstruction_error(constraints, 0.5, 0.3, PUBLIC, masks=5) == pytest.approx(0.09 / 20)


LOSS = from_criterion(nn.CrossEntropyLoss(reduction="none"))

TARGET = torch.tensor(1)


def victim():
    """A network with smooth layers and an 8 x 8 picture of a bright cross."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        layers = [nn.Conv2d(1, 6, 3, padding=1), nn.Sigmoid(), nn.Flatten(), nn.Linear(384, 3)]
        model = nn.Sequential(*layers)
    image = torch.zeros(1, 8, 8)
    image[0, 3:5, :] = image[0, :, 3:5] = 1.0
    return model, image


def attack(ratio=1.0, noise_std=0.0, steps=200):
    model, image = victim()
    d = sum(p.numel() for p in model.parameters())
    support = Support(PUBLIC.permutation(d, (9,))[: int(ratio * d)], d)
    seen = observe(
        model, LOSS, image, TARGET, support, clip=FlatClip(1.0), noise_std=noise_std, public=PUBLIC
    )
    found = invert(model, LOSS, seen, (1, 8, 8), PUBLIC, Effort(steps=steps))
    return found, image


def test_the_attack_makes_progress_on_a_bare_gradient():
    found, image = attack()
    start = mean_squared_error(torch.full_like(image, 0.5), image)
    assert found.objective[-1] < 0.2 * found.objective[0]
    assert mean_squared_error(found.image, image) < 0.2 * start
    assert 0 <= float(found.image.min()) <= float(found.image.max()) <= 1


@pytest.mark.nightly
def test_noise_and_sparsity_spoil_the_reconstruction():
    clean, image = attack()
    noisy, _ = attack(noise_std=0.2)
    sparse, _ = attack(ratio=0.05, noise_std=0.02)
    dense, _ = attack(noise_std=0.02)
    errors = [mean_squared_error(found.image, image) for found in (clean, noisy, sparse, dense)]
    assert errors[1] > 5 * errors[0]
    assert errors[2] > errors[3]


def test_what_the_attacker_sees_is_clipped_and_noised_on_the_support():
    model, image = victim()
    d = sum(p.numel() for p in model.parameters())
    support = Support(range(0, d, 2), d)
    common = {"clip": FlatClip(0.1), "public": PUBLIC}
    seen = observe(model, LOSS, image, TARGET, support, noise_std=0.0, **common).values
    noisy = observe(model, LOSS, image, TARGET, support, noise_std=0.5, **common).values
    assert float(seen.norm()) == pytest.approx(0.1 / 1.001, rel=1e-4)
    assert seen.shape == (support.size,)
    assert 0.4 < float((noisy - seen).std()) < 0.6
