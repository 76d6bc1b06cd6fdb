"""Where random numbers come from: the operating system, or a seed for experiments; public ones are a type apart.

Noise and sampling that protect people take `PrivateRandomness`. Random supports need no secrecy and take
`PublicRandomness`. Neither can stand in for the other.
"""

from __future__ import annotations

import secrets
import ssl
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from sparsedp.core import uniform
from sparsedp.core.chance import StepSecret
from sparsedp.core.errors import SparseDPError
from sparsedp.core.generators import SEED_BYTES
from sparsedp.core.rounded_gaussian import AT_ONCE, add_rounded_gaussian
from sparsedp.core.uniform import Words

_MOST_BYTES = 2**30
_LOT = 1 << 20
"""Draws of noise before those that were refused are drawn again. A seeded source keeps the order of words it had."""


def _random_bytes(count: int) -> bytes:
    """Bytes from OpenSSL, which takes at most 2^31 - 1 at a time."""
    return b"".join(ssl.RAND_bytes(min(_MOST_BYTES, count - done)) for done in range(0, count, _MOST_BYTES))


def _system_words(count: int) -> npt.NDArray[np.uint64]:
    return np.frombuffer(_random_bytes(8 * count), dtype=np.uint64)


def _add(bits: int, sums: Tensor, words: Words, lot: int, *, thrifty: bool) -> None:
    if sums.device.type == "cpu" and sums.is_contiguous():
        add_rounded_gaussian(bits, sums.detach().numpy(), words, lot, thrifty=thrifty)
    else:
        noise = torch.zeros(sums.shape, dtype=torch.int64)
        add_rounded_gaussian(bits, noise.numpy(), words, lot, thrifty=thrifty)
        sums += noise.to(sums.device)


def _added_to_zeros(source: PrivateRandomness, bits: int, size: int, key: Sequence[int]) -> Tensor:
    noise = torch.zeros(size, dtype=torch.int64)
    source.add_rounded_gaussian(bits, noise, key)
    return noise


class PrivateRandomness(Protocol):
    """Randomness that must be unpredictable: noise and sampling.

    `key` names the draw (for example the step). A seeded source gives the same numbers for the same key, so a
    resumed run replays; the system source ignores it.
    """

    @property
    def for_release(self) -> bool:
        """Whether what it touches may be released with its guarantee."""
        ...

    def rounded_gaussian(self, bits: int, size: int, key: Sequence[int]) -> Tensor:
        """`size` independent int64 numbers, each an ideal Gaussian one of standard deviation 2^bits, rounded."""
        ...

    def add_rounded_gaussian(self, bits: int, sums: Tensor, key: Sequence[int]) -> None:
        """Add such a number to each of an int64 vector, in place: no second vector of that length exists."""
        ...

    def bernoulli(self, probability: float, size: int, key: Sequence[int]) -> npt.NDArray[np.bool_]:
        """`size` independent coins, each true with exactly `probability`, the rational number that the float is."""
        ...

    def below(self, bounds: npt.NDArray[np.int64], key: Sequence[int]) -> npt.NDArray[np.int64]:
        """One exactly uniform integer in 0..bound-1 for each bound."""
        ...

    def secret(self, key: Sequence[int]) -> StepSecret:
        """What the random numbers inside a step's model and data set are computed from."""
        ...


@dataclass(frozen=True, slots=True)
class SystemRandomness:
    """A cryptographic generator keyed and re-keyed from the operating system's entropy: nothing to seed or replay.

    The bits are OpenSSL's (an AES-256 counter generator, safe across threads and forks), as the kernel's own device
    takes twenty times as long for a large model's noise.
    """

    @property
    def for_release(self) -> bool:
        """Yes."""
        return True

    def rounded_gaussian(self, bits: int, size: int, key: Sequence[int]) -> Tensor:
        """Fresh noise; `key` is ignored."""
        return _added_to_zeros(self, bits, size, key)

    def add_rounded_gaussian(self, bits: int, sums: Tensor, key: Sequence[int]) -> None:
        """Fresh noise; `key` is ignored. Long vectors are shared out among as many threads as PyTorch has."""

        def fill(stretch: Tensor) -> None:
            _add(bits, stretch, _system_words, lot=_LOT, thrifty=True)

        if sums.numel() <= _LOT:
            fill(sums)
            return
        with ThreadPoolExecutor(torch.get_num_threads()) as pool:
            for done in [pool.submit(fill, stretch) for stretch in torch.split(sums, _LOT)]:
                done.result()

    def bernoulli(self, probability: float, size: int, key: Sequence[int]) -> npt.NDArray[np.bool_]:
        """Independent coins; `key` is ignored."""
        return uniform.coins(probability, size, _system_words)

    def below(self, bounds: npt.NDArray[np.int64], key: Sequence[int]) -> npt.NDArray[np.int64]:
        """Uniform integers; `key` is ignored."""
        return uniform.below(bounds, _system_words)

    def secret(self, key: Sequence[int]) -> StepSecret:
        """Fresh entropy, every time; `key` is ignored."""
        return StepSecret(_random_bytes(SEED_BYTES))


@dataclass(frozen=True, slots=True)
class SeededRandomness:
    """Reproducible randomness for experiments. Whoever knows the seed can subtract the noise: not for release."""

    seed: int

    def __post_init__(self) -> None:
        _check_seed(self.seed)

    @property
    def for_release(self) -> bool:
        """No."""
        return False

    def _stream(self, purpose: int, key: Sequence[int]) -> Words:
        generator = np.random.PCG64(np.random.SeedSequence(self.seed, spawn_key=(purpose, *key)))

        def words(count: int) -> npt.NDArray[np.uint64]:
            return np.asarray(generator.random_raw(count), dtype=np.uint64)

        return words

    def rounded_gaussian(self, bits: int, size: int, key: Sequence[int]) -> Tensor:
        """Noise determined by seed and key."""
        return _added_to_zeros(self, bits, size, key)

    def add_rounded_gaussian(self, bits: int, sums: Tensor, key: Sequence[int]) -> None:
        """Noise determined by seed and key."""
        _add(bits, sums, self._stream(0, key), lot=AT_ONCE, thrifty=False)

    def bernoulli(self, probability: float, size: int, key: Sequence[int]) -> npt.NDArray[np.bool_]:
        """Coins determined by seed and key."""
        return uniform.coins(probability, size, self._stream(1, key))

    def below(self, bounds: npt.NDArray[np.int64], key: Sequence[int]) -> npt.NDArray[np.int64]:
        """Integers determined by seed and key."""
        return uniform.below(bounds, self._stream(2, key))

    def secret(self, key: Sequence[int]) -> StepSecret:
        """A secret determined by seed and key."""
        return StepSecret(self._stream(3, key)(SEED_BYTES // 8).astype("<u8").tobytes())


@dataclass(frozen=True, slots=True)
class PublicRandomness:
    """Randomness that protects nobody: random supports, tie-breaking, fresh noise on frozen coordinates.

    Its seed is drawn from the operating system unless given, and is recorded with the run.
    """

    seed: int

    def __post_init__(self) -> None:
        _check_seed(self.seed)

    @classmethod
    def fresh(cls) -> PublicRandomness:
        """A new public seed."""
        return cls(secrets.randbits(63))

    def _stream(self, purpose: int, key: Sequence[int]) -> np.random.Generator:
        return np.random.Generator(
            np.random.PCG64(np.random.SeedSequence(self.seed, spawn_key=(100 + purpose, *key)))
        )

    def permutation(self, size: int, key: Sequence[int]) -> Tensor:
        """A uniformly random order of 0..size-1."""
        return torch.from_numpy(self._stream(0, key).permutation(size))

    def normal(self, size: int, key: Sequence[int]) -> Tensor:
        """Standard normal numbers that hide nothing."""
        return torch.from_numpy(self._stream(1, key).standard_normal(size))

    def torch_seed(self, key: Sequence[int]) -> int:
        """A seed for PyTorch's own generator, where that protects nobody (initial weights)."""
        return int(self._stream(2, key).integers(0, 2**63 - 1))

    def generator_seed(self, key: Sequence[int]) -> bytes:
        """A seed for all global generators, where private rows are nowhere near (evaluation)."""
        return self._stream(3, key).bytes(SEED_BYTES)


def _check_seed(seed: int) -> None:
    if isinstance(seed, bool) or not isinstance(seed, int) or seed < 0:
        raise SparseDPError(f"seed: got {seed!r}, expected a whole number >= 0")
