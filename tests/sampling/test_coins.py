"""No two units share a coin, however far apart, in the batches that the sampler draws."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from coin_checks import dependent_coins
from torch.utils.data import TensorDataset

from sparsedp.randomness import SeededRandomness, SystemRandomness
from sparsedp.sampling import PoissonSampler

UNITS, STEPS = 2000, 400


def batches(randomness: object) -> np.ndarray:
    """Who is in each of the sampler's batches."""
    sampler = PoissonSampler(TensorDataset(torch.arange(UNITS)), sampling_rate=0.5, randomness=randomness)
    taken = np.zeros((STEPS, UNITS), dtype=bool)
    for batch in sampler.batches(0, STEPS):
        for micro in batch:
            taken[batch.step, micro.rows[0].numpy()] = True
    return taken


@pytest.mark.parametrize("randomness", [SystemRandomness(), SeededRandomness(3)], ids=["system", "seeded"])
def test_no_two_units_share_a_coin(randomness):
    taken = batches(randomness)
    assert dependent_coins(taken.__getitem__, STEPS) == []


@pytest.mark.parametrize("pair", [(0, 1), (3, 1024 + 3), (17, UNITS - 1)])
@pytest.mark.parametrize("against", [False, True])
def test_two_units_that_share_a_coin_are_found_wherever_they_are(pair, against):
    class Sharing(SeededRandomness):
        def bernoulli(self, probability, size, key):
            coins = super().bernoulli(probability, size, key).copy()
            coins[pair[1]] = coins[pair[0]] ^ against
            return coins

    assert dependent_coins(batches(Sharing(3)).__getitem__, STEPS) == [pair]
