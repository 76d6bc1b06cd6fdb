"""Releases that are no gradients: counts and statistics of the inputs are attacked as steps are."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from audited import audited, data, problems
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from sparsedp import PrivateNormalisation
from sparsedp.errors import PrivacyError
from sparsedp.grad_sample.selection import EmbeddingRowCounter
from sparsedp.methods import build_plan
from sparsedp.privacy import mechanism
from sparsedp.privacy.plan import Phase
from sparsedp.privacy.queries import LossSum, RowCountSum

pytestmark = pytest.mark.usefixtures("quickest")

WORDS = 24
MOVED = "times the stated sensitivity"


class Bag(nn.Module):
    """The mean of some words' vectors."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.head = nn.Embedding(WORDS, 4), nn.Linear(4, 2)

    def forward(self, words: Tensor) -> Tensor:
        return self.head(self.words(words).mean(1))


def texts() -> TensorDataset:
    words = torch.randint(0, WORDS, (100, 5), generator=torch.Generator().manual_seed(0))
    return TensorDataset(words, (words[:, 0] > 12).long())


def attacked(method: str, **changes: object):
    """By the name of a method, or `normalise` for one that only normalises its inputs."""
    how = {"epochs": 1, "batch_size": 50, "steps": 2, **changes}
    if method == "normalise":
        return audited(nn.Linear(24, 2), data(100), normalise=PrivateNormalisation(), **how)
    return audited(Bag(), texts(), method=method, **how)


RELEASES = {
    "fest": ["select"],
    "adafest": ["train, count"],
    "normalise": ["normalise, means", "normalise, spreads"],
}


@pytest.mark.parametrize("method", RELEASES)
def test_an_honest_release_passes_and_is_named_in_the_result(method):
    result = attacked(method)
    assert result.passed, problems(result)
    tried, said = [check.name for check in result.checks], " ".join(result.summary())
    for name in [*RELEASES[method], "train"]:
        assert any(what.startswith(f"{name}: all ") for what in tried)
        assert any(words.startswith(f"{name} (") and "48 times" in words for words in result.attacked)
        assert f"{name} (" in said
    assert result.steps == result.planned_steps
    assert result.to_json()["attacked"] == list(result.attacked)


@pytest.mark.parametrize("method", RELEASES)
def test_a_release_without_noise_is_found_and_named(method, monkeypatch):
    """As a reviewer did it: the gradients keep their noise, all else has none."""
    honest = mechanism.GaussianMechanism.release

    class Silent:
        publishable = True

        def add_rounded_gaussian(self, bits, sums, key):
            pass

    def leaky(self, query, charge, **how):
        gradient = charge.phase == "train" and charge.release == 0
        noise = self.randomness if gradient else Silent()
        return honest(replace(self, randomness=noise), query, charge, **how)

    monkeypatch.setattr(mechanism.GaussianMechanism, "release", leaky)
    result = attacked(method)
    assert not result.passed
    assert result.recomposed == math.inf
    for name in RELEASES[method]:
        assert f"{name}: all" in problems(result)
    assert "train: all" not in problems(result)


def test_a_unit_that_moves_a_count_too_far_is_found(monkeypatch):
    honest = RowCountSum.partial_sums
    monkeypatch.setattr(
        RowCountSum, "partial_sums", lambda self, bound: (1.5 * part for part in honest(self, bound))
    )
    for method in ("fest", "adafest"):
        assert f"the sum of phase {RELEASES[method][0]} by 1.499 {MOVED}" in problems(attacked(method))


def test_a_released_loss_is_audited_by_leaving_units_out(monkeypatch):
    """Of a network with dropout, and units of several rows; a loss beyond its bound is found and named."""
    model, ids = nn.Sequential(nn.Linear(24, 2), nn.Dropout(0.3)), [row // 4 for row in range(100)]
    how = {"private_loss": 0.5, "epochs": 1, "steps": 2}
    result = audited(model, data(100), unit_ids=ids, batch_size=12, **how)
    assert result.passed, problems(result)
    assert "train, loss (units left out of its sum; its noise was not attacked)" in result.attacked
    honest = LossSum.partial_sums
    monkeypatch.setattr(
        LossSum, "partial_sums", lambda self, bound: (1.5 * part for part in honest(self, bound))
    )
    found = problems(audited(model, data(100), batch_size=50, **how))
    assert f"the sum of phase train, loss by 1.499 {MOVED}" in found


def test_a_count_of_records_where_units_are_promised_is_found(monkeypatch):
    how = {"method": "fest", "unit_ids": [row // 4 for row in range(100)], "batch_size": 12}
    result = attacked(**how)
    assert result.passed, problems(result)
    monkeypatch.setattr(
        EmbeddingRowCounter, "__call__", lambda self, batch: self.pairs(batch.rows, batch.seed)
    )
    assert MOVED in problems(attacked(**how))


def test_a_release_that_nobody_knows_how_to_attack_is_refused_by_name():
    plan = build_plan("dp-sgd", units=100, batch_size=50, epochs=1, epsilon=8.0)
    longer = replace(
        plan.with_noise({}), phases=(Phase("look", 1, 1.0, 1.0, 4.0, trains=False), *plan.phases)
    )
    with pytest.raises(PrivacyError, match="look"):
        audited(nn.Linear(24, 2), data(100), plan=longer)
