"""Private and public randomness. Each statistical test is run once, with the false-alarm rate it states."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from scipy import stats

from sparsedp import randomness
from sparsedp.errors import SparseDPError
from sparsedp.randomness import PrivateRandomness, PublicRandomness, SeededRandomness, SystemRandomness

ALARM = 1e-9
"""False-alarm rate of one statistical test here; there are fewer than twenty."""

SOURCES = [SystemRandomness(), SeededRandomness(7)]


def test_public_normal_numbers_are_standard_normal():
    draws = PublicRandomness(7).normal(100_001, key=(0,))
    assert draws.dtype == torch.float64
    assert draws.shape == (100_001,)
    assert stats.kstest(draws.numpy(), "norm").pvalue > ALARM
    assert stats.kstest((1.1 * draws).numpy(), "norm").pvalue < ALARM


def test_draws_longer_than_one_request_of_bytes_are_fresh_throughout(monkeypatch):
    monkeypatch.setattr(randomness, "_MOST_BYTES", 8 * 100)
    draws = SystemRandomness().rounded_gaussian(40, 2001, key=(0,))
    assert len(set(draws.tolist())) == 2001
    assert stats.kstest(draws.numpy() / 2**40, "norm").pvalue > ALARM


@pytest.mark.parametrize("size", [0, 1, 2, 3])
@pytest.mark.parametrize("source", SOURCES)
def test_any_number_of_draws_can_be_asked_for(source, size):
    assert source.rounded_gaussian(30, size, key=(0,)).shape == (size,)
    assert source.below(np.full(size, 3), key=(0,)).shape == (size,)
    assert source.bernoulli(0.5, size, key=(0,)).shape == (size,)


@pytest.mark.parametrize("probability", [0.001, 0.3, 0.9])
@pytest.mark.parametrize("source", SOURCES)
def test_coins_have_exactly_the_rate(source, probability):
    coins = source.bernoulli(probability, 200_000, key=(0,))
    assert stats.binomtest(int(coins.sum()), 200_000, probability).pvalue > ALARM


@pytest.mark.parametrize("source", SOURCES)
def test_certain_and_impossible_coins(source):
    assert source.bernoulli(1.0, 1000, key=(0,)).all()
    assert not source.bernoulli(0.0, 1000, key=(0,)).any()


@pytest.mark.parametrize("source", SOURCES)
def test_integers_are_uniform_below_their_bound(source):
    draws = source.below(np.full(70_000, 7), key=(0,))
    assert stats.chisquare(np.bincount(draws, minlength=7)).pvalue > ALARM
    mixed = np.array([1, 2, 5] * 1000)
    assert (source.below(mixed, key=(0,)) < mixed).all()
    assert (source.below(mixed, key=(0,)) >= 0).all()


def test_the_system_source_never_repeats_whatever_the_key():
    source = SystemRandomness()
    first, second = (source.rounded_gaussian(30, 4, key=(1,)) for _ in range(2))
    assert not torch.equal(first, second)
    assert not np.array_equal(source.bernoulli(0.5, 64, key=(1,)), source.bernoulli(0.5, 64, key=(1,)))


def test_a_seeded_source_replays_by_key():
    first, again = SeededRandomness(3), SeededRandomness(3)
    first.rounded_gaussian(30, 5, key=(0,))  # what was drawn before does not matter
    assert torch.equal(first.rounded_gaussian(30, 5, key=(2,)), again.rounded_gaussian(30, 5, key=(2,)))
    assert np.array_equal(first.bernoulli(0.5, 64, key=(2,)), again.bernoulli(0.5, 64, key=(2,)))
    bounds = np.full(64, 1000)
    assert np.array_equal(first.below(bounds, key=(2,)), again.below(bounds, key=(2,)))


def test_a_seeded_source_differs_between_keys_seeds_and_purposes():
    source = SeededRandomness(3)
    draws = [source.rounded_gaussian(30, 5, key=key) for key in [(0,), (1,), (0, 1), (1, 0)]]
    draws += [SeededRandomness(4).rounded_gaussian(30, 5, key=(0,))]
    draws += [(PublicRandomness(3).normal(5, key=(0,)) * 2**30).round()]
    assert len({tuple(draw.tolist()) for draw in draws}) == len(draws)
    uniforms = source.below(np.full(1000, 2), key=(0,))
    coins = source.bernoulli(0.5, 1000, key=(0,))
    assert abs(np.corrcoef(uniforms, coins)[0, 1]) < 0.2  # 6 standard deviations


def test_only_the_system_source_is_publishable():
    assert SystemRandomness().publishable
    assert not SeededRandomness(0).publishable


def test_public_randomness_cannot_stand_in_for_private():
    public = PublicRandomness(0)
    for member in ("bernoulli", "below", "publishable"):
        assert hasattr(PrivateRandomness, member)
        assert not hasattr(public, member)
    assert not hasattr(SystemRandomness(), "permutation")


def test_public_randomness_replays_by_seed_and_key():
    assert torch.equal(
        PublicRandomness(5).permutation(50, key=(1,)), PublicRandomness(5).permutation(50, key=(1,))
    )
    assert not torch.equal(
        PublicRandomness(5).permutation(50, key=(1,)), PublicRandomness(5).permutation(50, key=(2,))
    )
    assert PublicRandomness(5).torch_seed(key=(1,)) == PublicRandomness(5).torch_seed(key=(1,))
    assert PublicRandomness.fresh().seed != PublicRandomness.fresh().seed


def test_a_permutation_holds_every_index_once_and_favours_none():
    source = PublicRandomness(5)
    draws = [source.permutation(4, key=(i,)) for i in range(6000)]
    assert all(sorted(draw.tolist()) == [0, 1, 2, 3] for draw in draws[:50])
    first = np.bincount([int(draw[0]) for draw in draws], minlength=4)
    assert stats.chisquare(first).pvalue > ALARM


@pytest.mark.parametrize("seed", [-1, 1.5, True, "7"])
@pytest.mark.parametrize("source", [SeededRandomness, PublicRandomness])
def test_a_seed_must_be_a_whole_number(source, seed):
    with pytest.raises(SparseDPError, match="seed"):
        source(seed)


def test_noise_of_long_vectors_is_drawn_by_several_threads_and_misses_no_number():
    size = 3 * 2**20 + 5
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        sums = torch.full((size,), 3, dtype=torch.int64)
        SystemRandomness().add_rounded_gaussian(40, sums, key=())
    finally:
        torch.set_num_threads(before)
    noise = (sums - 3).double() / 2.0**40
    assert sums.unique().numel() > size - 50  # one or two meet by chance
    for part in noise.split(2**20):
        assert abs(float(part.square().mean()) - 1) < 6 * (2 / part.numel()) ** 0.5


def test_an_error_while_noise_is_drawn_is_not_swallowed(monkeypatch):
    def fails(bits, sums, words):
        if len(sums) < 2**20:
            raise RuntimeError("the last stretch has no noise")

    monkeypatch.setattr(randomness, "add_rounded_gaussian", fails)
    with pytest.raises(RuntimeError, match="has no noise"):
        SystemRandomness().add_rounded_gaussian(40, torch.zeros(2**20 + 7, dtype=torch.int64), key=())


def test_system_secrets_are_fresh_and_never_shown():
    one, other = (SystemRandomness().secret((0,)) for _ in range(2))
    assert one.key != other.key
    assert one.key.hex() not in repr(one)
    assert str(one.key) not in repr(one)
    seeds = {one.seed(), one.seed(0), one.seed(1), one.model_seed(None), one.model_seed(0), other.seed(0)}
    assert len(seeds) == 6
