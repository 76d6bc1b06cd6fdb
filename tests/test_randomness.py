"""Secret, seeded and public random numbers: coins, integers and the exact rounded Gaussian."""

from __future__ import annotations

from fractions import Fraction

import mpmath
import numpy as np
import pytest
import torch
from scipy import stats

from sparsedp import randomness
from sparsedp import rounded_gaussian as sampler
from sparsedp.errors import PrivacyError, SparseDPError
from sparsedp.randomness import (
    PrivateRandomness,
    PublicRandomness,
    SeededRandomness,
    SystemRandomness,
    below,
    coins,
)
from sparsedp.rounded_gaussian import (
    CELL_BITS,
    MOST_BITS,
    PLACE_BITS,
    boundaries,
    cell_ends,
    cell_of,
    keeps,
    rounded_gaussian,
)

ALARM = 1e-9
"""False-alarm rate of one statistical test here; there are fewer than sixty."""

SOURCES = [SystemRandomness(), SeededRandomness(7)]


def test_only_the_system_source_is_publishable():
    assert SystemRandomness().publishable
    assert not SeededRandomness(0).publishable


def test_public_randomness_cannot_stand_in_for_private():
    public = PublicRandomness(0)
    for member in ("bernoulli", "below", "secret"):
        assert hasattr(PrivateRandomness, member)
        assert not hasattr(public, member)
    assert not hasattr(SystemRandomness(), "permutation")


@pytest.mark.parametrize("seed", [-1, 1.5, True, "7"])
@pytest.mark.parametrize("source", [SeededRandomness, PublicRandomness])
def test_a_seed_must_be_a_whole_number(source, seed):
    with pytest.raises(SparseDPError, match="seed"):
        source(seed)


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


def draws_of(source: PrivateRandomness, key: tuple[int, ...]) -> list[object]:
    """One draw of each kind."""
    return [
        source.rounded_gaussian(30, 5, key=key).tolist(),
        source.bernoulli(0.5, 64, key=key).tolist(),
        source.below(np.full(64, 1000), key=key).tolist(),
        source.secret(key).key,
    ]


def test_a_seeded_source_replays_by_key_and_the_system_source_never():
    keys = [(0,), (1,), (0, 1), (1, 0)]
    seeded = [draws_of(SeededRandomness(3), key) for key in keys]
    assert [draws_of(SeededRandomness(3), key) for key in keys] == seeded
    others = [draws_of(source, (0,)) for source in (SeededRandomness(4), *[SystemRandomness()] * 2)]
    for kind in zip(*seeded, *others, strict=True):
        assert len({str(draw) for draw in kind}) == len(kind)


def test_what_different_purposes_draw_is_unrelated():
    source, public = SeededRandomness(3), PublicRandomness(3)
    together = [
        source.rounded_gaussian(30, 1000, key=(0,)).numpy(),
        source.bernoulli(0.5, 1000, key=(0,)),
        source.below(np.full(1000, 2), key=(0,)),
        public.normal(1000, key=(0,)).numpy(),
        public.permutation(1000, key=(0,)).numpy(),
    ]
    related = np.corrcoef(np.array(together, dtype=np.float64))
    assert np.abs(np.triu(related, 1)).max() < 0.2  # 6 standard deviations


def test_public_numbers_replay_by_seed_and_key_and_favour_nothing():
    source = PublicRandomness(5)
    orders = [source.permutation(4, key=(i,)).tolist() for i in range(6000)]
    assert orders[:50] == [PublicRandomness(5).permutation(4, key=(i,)).tolist() for i in range(50)]
    assert all(sorted(order) == [0, 1, 2, 3] for order in orders[:50])
    assert stats.chisquare(np.bincount([order[0] for order in orders], minlength=4)).pvalue > ALARM
    assert stats.kstest(source.normal(100_001, key=(0,)).numpy(), "norm").pvalue > ALARM
    assert PublicRandomness.fresh().seed != PublicRandomness.fresh().seed


def test_noise_of_long_vectors_by_threads_and_pieces_misses_no_number(monkeypatch):
    monkeypatch.setattr(randomness, "_MOST_BYTES", 8 * 1000)
    monkeypatch.setattr(randomness, "_PIECE", 2**16)
    size = 3 * 2**16 + 5
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        sums = torch.full((size,), 3, dtype=torch.int64)
        SystemRandomness().add_rounded_gaussian(40, sums, key=())
    finally:
        torch.set_num_threads(before)
    assert sums.unique().numel() > size - 6  # two meet by chance, now and then
    assert stats.kstest((sums - 3).numpy() / 2.0**40, "norm").pvalue > ALARM


# Coins and whole numbers, settled exactly: on crafted words, so that nothing here is left to chance.


LAST = 2**64 - 1


def given(*words: int):
    """These words, in order, and no more."""
    left = list(words)

    def take(count: int) -> np.ndarray:
        taken = [left.pop(0) for _ in range(count)]
        return np.array(taken, dtype=np.uint64)

    return take


@pytest.mark.parametrize(
    "probability", [0.1, 1 / 3, 1024 / 60_000, 2.0**-13 * 1.1, 1e-9, 3e-21, 1e-300, 5e-324, 0.0]
)
def test_a_coin_is_the_comparison_with_the_floats_exact_value(probability):
    """True for every number whose digits come before those of the probability; the next digits settle a tie."""
    exact, words = Fraction(probability), []
    while exact:
        digit, exact = divmod(exact * 2**64, 1)
        words.append(digit)
    assert sum(Fraction(word, 2 ** (64 * (i + 1))) for i, word in enumerate(words)) == Fraction(probability)
    assert not coins(probability, 1, given(*words, 0))[0] if words else not coins(0.0, 1, given(0))[0]
    for place, word in enumerate(words):
        if word:
            assert coins(probability, 1, given(*words[:place], word - 1))[0]
        assert not coins(probability, 1, given(*words[:place], word + 1))[0]


def test_coins_and_bounds_are_kept_apart():
    assert coins(1.0, 2, given(0, LAST)).all()
    probability = 2.0**-60 * 1.3  # only tied coins ask for more
    digit = int(Fraction(probability) * 2**64)
    assert coins(probability, 4, given(digit, 0, digit, LAST, 0, LAST)).tolist() == [True, True, False, False]
    assert below(np.array([3, 5, 1]), given(LAST, 7, 9, 4)).tolist() == [1, 2, 0]
    with pytest.raises(SparseDPError, match="probability"):
        coins(1.5, 1, given(0))
    with pytest.raises(SparseDPError, match="bounds"):
        below(np.array([3, 0]), given(1, 1))


@pytest.mark.parametrize("bound", [1, 2, 3, 7, 2**52, 2**62 + 1, 2**63 - 1])
def test_every_whole_number_has_as_many_words_as_any_other(bound):
    """Full rounds are kept, the words past them drawn again."""
    rounds = 2**64 // bound
    bounds = np.array([bound])
    assert below(bounds, given(rounds * bound - 1)).tolist() == [bound - 1]
    if rounds * bound <= LAST:
        assert below(bounds, given(rounds * bound, LAST, 0)).tolist() == [0]


# The law of the noise: against exact probabilities, against a slow sampler at 300 bits, and against OpenDP's.


mpmath.mp.prec = 300
WIDTH = mpmath.mpf(2) ** -CELL_BITS
HEIGHTS = [mpmath.exp(-((j * WIDTH) ** 2) / 2) for j in range(1400)]
TOTAL = sum(HEIGHTS)


class Fixed:
    """Words from a list, and then random ones."""

    def __init__(self, *words: int) -> None:
        self.left = list(words)
        self.random = np.random.PCG64(1)

    def __call__(self, count: int) -> np.ndarray:
        taken, self.left = self.left[:count], self.left[count:]
        more = [int(word) for word in self.random.random_raw(count - len(taken))]
        return np.array([*taken, *more], dtype=np.uint64)


@pytest.mark.parametrize("source", SOURCES)
@pytest.mark.parametrize("bits", [0, 1, 3, 5, 6, 7, 8])
def test_at_small_scales_the_law_is_that_of_a_rounded_gaussian(bits, source):
    """P(round(2^bits Z) = n) for |n| < edge, and the two tails in one."""
    edge, scale = 3 * 2**bits + 1, mpmath.mpf(2) ** bits
    inner = [mpmath.ncdf((n + 0.5) / scale) - mpmath.ncdf((n - 0.5) / scale) for n in range(1 - edge, edge)]
    expected = np.array([float(p) for p in [*inner, 1 - sum(inner)]]) * 400_000
    draws = source.rounded_gaussian(bits, 400_000, key=(bits,)).numpy()
    counts = np.bincount(np.clip(draws, -edge, edge) + edge, minlength=2 * edge + 1)
    found = np.append(counts[1:-1], counts[0] + counts[-1])
    assert stats.chisquare(found, expected).pvalue > ALARM


def test_the_cells_end_where_mpmath_says():
    so_far = mpmath.mpf(0)
    ends = cell_ends()
    for j, end in enumerate(boundaries(128)):
        so_far += HEIGHTS[j]
        assert abs(so_far / TOTAL * 2**128 - end) <= 1.001
        if j < len(ends) - 1:
            assert int(ends[j]) == int(mpmath.floor(so_far / TOTAL * 2**64))
    assert len(ends) > 500


def slow_sampler(bits: int, words) -> int:
    """The sampler on the same words, one draw, everything by mpmath."""

    def cell_at(number):
        cell, so_far = 0, HEIGHTS[0]
        while so_far <= number * TOTAL:
            cell, so_far = cell + 1, so_far + HEIGHTS[cell + 1]
        return cell, so_far / TOTAL

    word = int(words(1)[0])
    below, head, place, lot = word >> 63, word >> 48 & 2**15 - 1, word >> 8 & 2**40 - 1, word & 255
    place = mpmath.mpf(place ^ (2**40 - 1) if below else place) / 2**40
    cell, end = cell_at(mpmath.mpf(head) / 2**15)
    split = end < mpmath.mpf(head + 1) / 2**15
    if split:
        cell, _ = cell_at(mpmath.mpf(head << 49 | int(words(1)[0]) >> 15) / 2**64)
    size = int(mpmath.floor((cell + place) * WIDTH * 2**bits + mpmath.mpf(1) / 2))
    least = mpmath.exp(((cell * WIDTH) ** 2 - ((cell + 1) * WIDTH) ** 2) / 2)
    if split or lot >= int(mpmath.floor(least * 256)):
        more = int(words(1)[0])
        chance = mpmath.npdf((cell + place + mpmath.mpf(more & 255) / 2**48) * WIDTH)
        if mpmath.mpf(lot << 45 | more >> 19) / 2**53 >= chance / mpmath.npdf(cell * WIDTH):
            return slow_sampler(bits, words)
    return -size if below else size


def one(bits: int, words) -> int:
    return int(rounded_gaussian(bits, 1, words)[0])


@pytest.mark.parametrize("bits", [0, 5, 30, MOST_BITS])
def test_it_is_the_slow_sampler_to_the_last_bit(bits):
    """Enough draws for some to be split, open, or refused and drawn again."""
    fast, slow = np.random.PCG64(bits), np.random.PCG64(bits)
    ours = [one(bits, fast.random_raw) for _ in range(600)]
    assert ours == [slow_sampler(bits, slow.random_raw) for _ in range(600)]
    assert fast.random_raw() == slow.random_raw()
    assert len(set(ours)) > (3 if bits == 0 else 50)


@pytest.mark.parametrize("cell", [0, 1, 100, 400])
@pytest.mark.parametrize("beyond", [-1, 1])
@pytest.mark.parametrize("below", [0, 1])
def test_a_number_that_hits_the_end_of_a_cell_is_settled_by_the_next_words(cell, beyond, below):
    near = boundaries(256)[cell] + beyond * 2**70
    assert near >> 192 == int(cell_ends()[cell])
    first, second = near >> 241, (near >> 192) % 2**49 << 15
    rest = [near >> 128 & 2**64 - 1, near >> 64 & 2**64 - 1, near & 2**64 - 1]
    tail = (2**40 - 1) << 8 if below else 0
    found = one(6, Fixed(below << 63 | first << 48 | tail, second, *rest))
    assert found == (cell + (beyond > 0)) * (1 - 2 * below)


def test_a_word_past_every_end_of_64_digits_is_settled_too():
    assert cell_of(2**64 - 1, Fixed(0)) > 580
    assert cell_of(2**64 - 1, Fixed(2**64 - 1, 0)) > cell_of(2**64 - 1, Fixed(2**64 - 1 - 2**20))
    (farthest,) = rounded_gaussian(40, 1, Fixed(2**63 - 256, 2**64 - 1, 0, 0))
    assert 8 < farthest / 2**40 < 14


@pytest.mark.parametrize("cell", [0, 3, 300, 5000])
@pytest.mark.parametrize("distance", [-90, -60])
def test_a_lot_near_the_chance_to_be_kept_is_settled_by_further_digits(cell, distance):
    place = 0b1011 << (PLACE_BITS - 4)
    f = mpmath.mpf(place) / 2**PLACE_BITS
    chance = mpmath.npdf((cell + f) * WIDTH) / mpmath.npdf(cell * WIDTH)
    for sign in (-1, 1):
        lot = int(mpmath.floor((chance + sign * mpmath.mpf(2) ** distance) * 2**245))
        known, further = lot >> 192, [lot >> 128 & 2**64 - 1, lot >> 64 & 2**64 - 1, lot & 2**64 - 1]
        words = Fixed(*(word for pair in zip([0, 0, 0], further, strict=True) for word in pair))
        assert keeps(cell, (place, PLACE_BITS), (known, 53), words) is (sign < 0)


def test_the_quick_polynomial_is_within_a_tenth_of_the_doubt():
    x = np.random.default_rng(0).uniform(0, 0.25, 500)
    errors = [
        abs(float(mpmath.exp(-mpmath.mpf(v)) - mpmath.mpf(p)))
        for v, p in zip(x, sampler._exp_of_minus(x), strict=True)
    ]
    assert max(errors) < sampler.DOUBT / 10


@pytest.mark.parametrize("source", SOURCES)
def test_no_two_of_many_draws_share_anything(source):
    """Neighbours, halves, blocks: where a vectorised sampler could repeat itself."""
    count, bits = 2**18 + 1, MOST_BITS
    draws = source.rounded_gaussian(bits, count, key=(2,)).numpy()
    assert len(np.unique(draws)) >= count - 6  # of 2^45 numbers, a pair now and then
    z = draws / 2**bits
    for lag in (1, 2, sampler.AT_ONCE, 100_000, count // 2):
        for transform in (lambda v: v, np.abs):
            pairs = transform(z[:-lag]), transform(z[lag:])
            assert stats.pearsonr(*pairs).pvalue > ALARM
    low = draws & 1023
    assert stats.chisquare(np.bincount(low, minlength=1024)).pvalue > ALARM


@pytest.mark.parametrize("bits", [-1, MOST_BITS + 1])
def test_scales_it_has_no_digits_for_are_refused(bits):
    with pytest.raises(PrivacyError, match="expected 2"):
        rounded_gaussian(bits, 1, Fixed())


def test_it_draws_as_opendp_does_where_the_laws_meet():
    """At a scale of 2^12 a rounded and a discrete Gaussian differ by less than 2^-24 in any event."""
    opendp = pytest.importorskip("opendp.prelude")
    opendp.enable_features("contrib")
    space = opendp.vector_domain(opendp.atom_domain(T=int)), opendp.l2_distance(T=float)
    theirs = np.array(opendp.m.make_gaussian(*space, 4096.0)([0] * 30_000))
    ours = SystemRandomness().rounded_gaussian(12, 100_000, key=()).numpy()
    assert stats.ks_2samp(ours, theirs).pvalue > ALARM
    assert stats.ks_2samp(1.1 * ours, theirs).pvalue < ALARM
