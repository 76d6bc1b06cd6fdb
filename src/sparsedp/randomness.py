"""Where random numbers come from: the operating system, or a seed for experiments; public ones are a type apart."""

from __future__ import annotations

import random
import secrets
import ssl
import threading
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from fractions import Fraction
from hashlib import blake2b
from typing import ClassVar, final

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from sparsedp.errors import SparseDPError
from sparsedp.rounded_gaussian import Words, add_rounded_gaussian

_ALL = 2**64


def coins(probability: float, size: int, words: Words) -> npt.NDArray[np.bool_]:
    """`size` coins, each true with probability exactly the rational number that the float `probability` is.

    A coin is a comparison of a uniform number in [0, 1) with it, 64 binary digits after 64 until they differ.
    """
    if not 0 <= probability <= 1:
        raise SparseDPError(f"probability: got {probability}, expected a number in [0, 1]")
    drawn = words(size)
    if probability == 1:
        return np.ones(size, dtype=np.bool_)
    digits, rest = divmod(Fraction(probability) * _ALL, 1)
    result: npt.NDArray[np.bool_] = drawn < np.uint64(digits)
    if rest:
        tied = np.flatnonzero(drawn == np.uint64(digits))
        result[tied] = coins(float(rest), len(tied), words)
    return result


def below(bounds: npt.NDArray[np.int64], words: Words) -> npt.NDArray[np.int64]:
    """One whole number for each bound, exactly uniform in 0..bound-1; words past the last full round are redrawn."""
    if len(bounds) and int(bounds.min()) < 1:
        raise SparseDPError(f"bounds: got {int(bounds.min())}, expected whole numbers >= 1")
    wide = bounds.astype(np.uint64)
    too_high = (np.uint64(_ALL - 1) - wide + np.uint64(1)) % wide  # 2^64 mod bound
    drawn = words(len(bounds)).copy()
    while len(again := np.flatnonzero(drawn > np.uint64(_ALL - 1) - too_high)):
        drawn[again] = words(len(again))
    return (drawn % wide).astype(np.int64)


SEED_BYTES = 32
_ONE_THREAD = threading.RLock()


@final
class GeneratorMonitor:
    """Remembers how the global generators stand; a few microseconds, as every micro-batch is watched."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._before = self._states()

    def moved(self) -> str | None:
        """Whose generator has been drawn from since, or None; torch's is named only if no other was."""
        pairs = zip(self._before.items(), self._states().values(), strict=True)
        return next((whose for (whose, before), now in pairs if before != now), None)

    def _states(self) -> dict[str, object]:
        on_device = [torch.cuda.get_rng_state(self._device)] if self._device.type == "cuda" else []
        name, words, *rest = np.random.get_state()  # noqa: NPY002
        return {
            "NumPy's": (name, np.asarray(words).tobytes(), *rest),
            "Python's": random.getstate(),
            "torch's": [state.numpy().tobytes() for state in (torch.get_rng_state(), *on_device)],
        }


def seed_generators(seed: bytes, device: torch.device) -> None:
    """Seed them all from 32 bytes."""
    if len(seed) != SEED_BYTES:
        raise ValueError(f"got a seed of {len(seed)} bytes, expected {SEED_BYTES}")
    number = int.from_bytes(seed[:8], "little") >> 1
    torch.default_generator.manual_seed(number)
    if device.type == "cuda":
        torch.cuda.manual_seed(number)
    np.random.seed(np.frombuffer(seed[8:24], dtype=np.uint32))  # noqa: NPY002
    random.seed(seed)


@contextmanager
def fork_generators(seed: bytes, device: torch.device) -> Iterator[None]:
    """Seed the global generators inside, and put the caller's state back after.

    Edge cases: They belong to the whole process: threads take turns.
    """
    with _ONE_THREAD, torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        pythons, numpys = random.getstate(), np.random.get_state()  # noqa: NPY002
        try:
            seed_generators(seed, device)
            yield
        finally:
            random.setstate(pythons)
            np.random.set_state(numpys)  # noqa: NPY002


@final
@dataclass(frozen=True, slots=True, eq=False)
class StepKey:
    """What all random numbers inside one step's model and data set are computed from.

    Formal guarantees: Drawn from the run's private randomness, never stored or shown, nor computed from anything that
    is. Given it, a row's numbers are fixed, whoever else is in the batch; without it, they are independent.
    """

    key: bytes = field(repr=False)

    def seed(self, row: int | None = None) -> bytes:
        """For the global generators while the data set makes this row; without a row, for what all rows share."""
        return self._derived(b"shared" if row is None else b"row", row)

    def model_seed(self, first_row: int | None) -> bytes:
        """For the global generators while the model computes a micro-batch, named by its first row."""
        return self._derived(b"model", first_row)

    def _derived(self, name: bytes, row: int | None) -> bytes:
        name += b"" if row is None else row.to_bytes(8, "little")
        return blake2b(name, key=self.key, digest_size=SEED_BYTES).digest()


_MOST_BYTES = 2**30
_PIECE = 1 << 20
"""Noise of long vectors is drawn in pieces of this length, by several threads."""


def _random_bytes(count: int) -> bytes:
    """Bytes from OpenSSL, which takes at most 2^31 - 1 at a time."""
    return b"".join(ssl.RAND_bytes(min(_MOST_BYTES, count - done)) for done in range(0, count, _MOST_BYTES))


class PrivateRandomness(ABC):
    """Randomness that must be unpredictable: noise and sampling.

    `key` names the draw (for example the step). A seeded source gives the same numbers for the same key, so a
    resumed run replays; the system source ignores it.
    """

    __slots__ = ()

    publishable: ClassVar[bool]
    """Whether what it touches may be released with its guarantee."""

    @abstractmethod
    def _words(self, purpose: int, key: Sequence[int]) -> Words:
        """Random words for a purpose and a key."""

    def rounded_gaussian(self, bits: int, size: int, key: Sequence[int]) -> Tensor:
        """`size` independent int64 numbers, each an ideal Gaussian one of standard deviation 2^bits, rounded."""
        noise = torch.zeros(size, dtype=torch.int64)
        self.add_rounded_gaussian(bits, noise, key)
        return noise

    def add_rounded_gaussian(self, bits: int, sums: Tensor, key: Sequence[int]) -> None:
        """Add such a number to each of an int64 vector, in place: no second vector of that length exists."""
        in_place = sums.device.type == "cpu" and sums.is_contiguous()
        noise = sums.detach() if in_place else torch.zeros(sums.shape, dtype=torch.int64)
        add_rounded_gaussian(bits, noise.numpy(), self._words(0, key))
        if not in_place:
            sums += noise.to(sums.device)

    def bernoulli(self, probability: float, size: int, key: Sequence[int]) -> npt.NDArray[np.bool_]:
        """`size` independent coins, each true with exactly `probability`, the rational number that the float is."""
        return coins(probability, size, self._words(1, key))

    def below(self, bounds: npt.NDArray[np.int64], key: Sequence[int]) -> npt.NDArray[np.int64]:
        """One exactly uniform integer in 0..bound-1 for each bound."""
        return below(bounds, self._words(2, key))

    def secret(self, key: Sequence[int]) -> StepKey:
        """What the random numbers inside a step's model and data set are computed from."""
        return StepKey(self._words(3, key)(SEED_BYTES // 8).astype("<u8").tobytes())


@dataclass(frozen=True, slots=True)
class SystemRandomness(PrivateRandomness):
    """A cryptographic generator keyed and re-keyed from the operating system's entropy: nothing to seed or replay.

    The bits are OpenSSL's (an AES-256 counter generator, safe across threads and forks), as the kernel's own device
    takes twenty times as long for a large model's noise.
    """

    publishable: ClassVar[bool] = True

    def _words(self, purpose: int, key: Sequence[int]) -> Words:
        return lambda count: np.frombuffer(_random_bytes(8 * count), dtype=np.uint64)

    def add_rounded_gaussian(self, bits: int, sums: Tensor, key: Sequence[int]) -> None:
        """Fresh noise; long vectors are drawn by as many threads as PyTorch has."""
        draw = PrivateRandomness.add_rounded_gaussian
        if sums.numel() <= _PIECE:
            draw(self, bits, sums, key)
            return
        with ThreadPoolExecutor(torch.get_num_threads()) as pool:
            for done in [pool.submit(draw, self, bits, part, key) for part in torch.split(sums, _PIECE)]:
                done.result()


@dataclass(frozen=True, slots=True)
class SeededRandomness(PrivateRandomness):
    """Reproducible randomness for experiments. Whoever knows the seed can subtract the noise: not for release."""

    seed: int

    def __post_init__(self) -> None:
        _check_seed(self.seed)

    publishable: ClassVar[bool] = False

    def _words(self, purpose: int, key: Sequence[int]) -> Words:
        generator = np.random.PCG64(np.random.SeedSequence(self.seed, spawn_key=(purpose, *key)))
        return lambda count: np.asarray(generator.random_raw(count), dtype=np.uint64)


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
        return np.random.default_rng(np.random.SeedSequence(self.seed, spawn_key=(100 + purpose, *key)))

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
