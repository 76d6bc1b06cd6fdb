"""Planted units and the losses of trained models: honest training hides them, training without noise does not."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

from sparsedp.auditing.canaries import AuditTarget
from sparsedp.batch import per_sample_loss
from sparsedp.errors import SparseDPError
from sparsedp.loading import DataConfig
from sparsedp.methods import build_plan
from sparsedp.privacy import mechanism
from sparsedp.randomness import PublicRandomness
from sparsedp_experiments.attacks.membership import (
    ExcludeUnits,
    MembershipAttackConfig,
    MembershipFinding,
    Mislabelled,
    attack_membership,
)


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

    def silent(self, query, charge, **how):
        self.ledger.charge(charge)
        return sum(query.partial_sums(query.sensitivity)), 1.0

    how = MembershipAttackConfig(records=200, lr=2.0)
    plan = {"batch_size": 200, "epochs": 20, "epsilon": 0.5}
    assert attacked(how, data(200, 4000), **plan).lower_bound <= 0.5
    monkeypatch.setattr(mechanism.GaussianMechanism, "noisy_sum", silent)
    assert attacked(how, data(200, 4000), **plan).lower_bound > 0.5


@pytest.mark.parametrize(
    ("how", "words"),
    [
        (MembershipAttackConfig(records=401), "expected 2 to 400"),
        (MembershipAttackConfig(records=4, trainings=0), "expected at least 1"),
    ],
)
def test_attack_with_impossible_numbers_is_refused(how, words):
    with pytest.raises(SparseDPError, match=words):
        attacked(how, data(400))
