"""Planted records and the losses of trained models: honest training hides them, training without noise does not."""

from __future__ import annotations

import pytest
import torch
from audited import audited, data, network
from torch import nn
from torch.utils.data import TensorDataset

from sparsedp.auditing import Training
from sparsedp.auditing.canaries import AbsentUnits
from sparsedp.auditing.model import Mislabelled
from sparsedp.errors import SparseDPError
from sparsedp.privacy import mechanism
from sparsedp.randomness import PublicRandomness

pytestmark = pytest.mark.usefixtures("quick")


def test_records_get_another_label_and_the_others_keep_theirs():
    base = data(60)
    changed = Mislabelled.of(base, [3, 7, 59], PublicRandomness(0))
    assert len(changed) == 60
    for row in range(60):
        same = bool(changed[row][1] == base[row][1])
        assert same == (row not in (3, 7, 59))
        assert torch.equal(changed[row][0], base[row][0])


def test_an_absent_unit_is_never_drawn_and_the_others_are_as_before():
    present = torch.rand(4000, generator=torch.Generator().manual_seed(0)).numpy() < 0.5
    drawn = AbsentUnits(present).bernoulli(0.5, 4000, key=())
    assert not drawn[~present].any()
    assert 0.4 < drawn[present].mean() < 0.6


def test_an_honest_model_stays_within_its_claim_and_says_what_was_tried():
    result = audited(steps=4, training=Training(records=100, trainings=2), method="tp-topk", epochs=2)
    assert result.passed
    assert result.estimates["models"] <= result.claimed_epsilon
    assert len(result.model["inside"]) + len(result.model["outside"]) == result.model["canaries"] == 200
    assert any("200 rows with wrong labels" in line for line in result.words())


@pytest.mark.nightly
def test_a_model_trained_without_noise_gives_its_records_away(monkeypatch):
    """A wide model learns noise by heart: 200 guesses show more than the epsilon of a half that is claimed."""

    def silent(self, query, charge, **how):
        self.ledger.charge(charge)
        return sum(query.partial_sums(query.sensitivity)), 1.0

    inputs = torch.randn(200, 4000, generator=torch.Generator().manual_seed(0))
    rows = TensorDataset(inputs, (inputs[:, 0] > 0).long())
    how = {"dataset": rows, "steps": 2, "batch_size": 200, "epochs": 20, "epsilon": 0.5, "confidence": 0.99}
    training = Training(records=200, lr=2.0)
    assert audited(nn.Linear(4000, 2), training=training, **how).model["lower_bound"] <= 0.5
    monkeypatch.setattr(mechanism.GaussianMechanism, "noisy_sum", silent)
    assert audited(nn.Linear(4000, 2), training=training, **how).model["lower_bound"] > 0.5


@pytest.mark.parametrize(
    ("training", "words"),
    [(Training(records=401), "expected 2 to 400"), (Training(records=4, trainings=0), "expected at least 1")],
)
def test_mistakes_are_said(training, words):
    with pytest.raises(SparseDPError, match=words):
        audited(network(), steps=2, training=training)
