"""A precision attack in the manner of Mironov (2012): which sums can a release come from at all?

Float noise reaches few of the numbers around a sum, and other ones around another sum. The attack inverts Box-Muller
for two coordinates that share their uniforms, tries the uniforms next to the solution, and asks whether any of them
gives the release to the last bit.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from scipy import stats
from torch import Tensor

from sparsedp.privacy.ledger import Charge, ChargeLog
from sparsedp.privacy.mechanism import GaussianMechanism, Grid
from sparsedp.randomness import SystemRandomness

PAIRS, TRIALS, STD, SHIFT = 16, 100, 1.0, 1e-3
AROUND = 6
"""Multiples of 2^-53 tried on each side of a solution."""

Attack = Callable[[np.ndarray, np.ndarray, np.ndarray], bool | None]


def box_muller(first: np.ndarray, second: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The noise of earlier versions, from two uniform multiples of 2^-53."""
    radius = torch.from_numpy(-first).log1p().mul(-2.0).sqrt()
    angle = torch.from_numpy(second) * (2.0 * np.pi)
    return (radius * angle.cos()).numpy(), (radius * angle.sin()).numpy()


def old_release(total: np.ndarray) -> np.ndarray:
    words = np.random.default_rng().integers(0, 2**53, len(total))
    half = len(total) // 2
    noise = np.concatenate(box_muller(words[:half] * 2.0**-53, words[half:] * 2.0**-53))
    return total + STD * noise


@dataclass
class _Given:
    total: np.ndarray
    sensitivity: float = 1.0

    @property
    def size(self) -> int:
        return len(self.total)

    def partial_sums(self, bound: float) -> Iterator[Tensor]:
        yield torch.tensor(self.total)


def new_release(total: np.ndarray) -> np.ndarray:
    charge = Charge("train", 0, 1.0, STD)
    noisy, _ = GaussianMechanism(ChargeLog(), SystemRandomness()).noisy_sum(_Given(total), charge)
    return noisy.numpy()


def pairs_reached(released: np.ndarray, total: np.ndarray) -> int:
    """In how many pairs of coordinates Box-Muller noise leads from the sum to the release."""
    half = len(total) // 2
    x, y = ((released - total) / STD).reshape(2, half)
    first = np.rint(-np.expm1(-(x * x + y * y) / 2) * 2.0**53)
    second = np.rint(np.arctan2(y, x) / (2 * np.pi) % 1.0 * 2.0**53)
    reached = np.zeros(half, dtype=bool)
    for i, j in itertools.product(range(-AROUND, AROUND + 1), repeat=2):
        uniform = [np.clip(u, 0, 2.0**53 - 1) * 2.0**-53 for u in (first + i, second + j)]
        again = total + STD * np.concatenate(box_muller(*uniform))
        reached |= (again == released).reshape(2, half).all(axis=0)
    return int(reached.sum())


def by_uniforms(released: np.ndarray, here: np.ndarray, there: np.ndarray) -> bool | None:
    """Whether it came from `there`: the sum that reaches more pairs."""
    counts = pairs_reached(released, here), pairs_reached(released, there)
    return None if counts[0] == counts[1] else counts[1] > counts[0]


def by_the_grid(released: np.ndarray, here: np.ndarray, there: np.ndarray) -> bool | None:
    """What one would try now: is the release a whole number of steps from one sum, and not from the other?"""
    step = Grid.for_mechanism(1.0, STD, len(here)).step
    whole = [np.all((released - np.rint(total / step) * step) % step == 0) for total in (here, there)]
    return None if whole[0] == whole[1] else bool(whole[1])


def right_guesses(release: Callable[[np.ndarray], np.ndarray], attack: Attack) -> int:
    """Of TRIALS; a coin decides where the attack has nothing to say."""
    rng, right = np.random.default_rng(), 0
    for _ in range(TRIALS):
        here = rng.standard_normal(2 * PAIRS)
        there = here + SHIFT
        truth = bool(rng.integers(2))
        guess = attack(release(there if truth else here), here, there)
        right += (bool(rng.integers(2)) if guess is None else guess) == truth
    return right


def test_float_noise_tells_a_thousandth_of_its_size_from_nothing():
    assert right_guesses(old_release, by_uniforms) == TRIALS


@pytest.mark.parametrize("attack", [by_uniforms, by_the_grid])
def test_noise_on_the_grid_tells_nothing(attack):
    """The true advantage is 0.2 %; a false alarm comes once in a million."""
    assert stats.binomtest(right_guesses(new_release, attack), TRIALS).pvalue > 1e-6


def test_every_release_can_come_from_either_sum():
    rng = np.random.default_rng()
    here = rng.standard_normal(2 * PAIRS)
    for total in (here, here + SHIFT):
        assert by_the_grid(new_release(total), here, here + SHIFT) is None


def test_float_noise_has_releases_that_only_one_sum_can_give():
    here = np.random.default_rng().standard_normal(2 * PAIRS)
    released = old_release(here)
    assert pairs_reached(released, here) == PAIRS
    assert pairs_reached(released, here + SHIFT) < PAIRS
