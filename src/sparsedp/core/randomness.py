"""Where random numbers come from: the operating system, or a seed for experiments; public ones are a type apart.

Noise and sampling that protect people take `PrivateRandomness`. Random supports need no secrecy and take
`PublicRandomness`. Neither can stand in for the other.
"""

from __future__ import annotations

import math
import secrets
import ssl
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from sparsedp.core.errors import SparseDPError

_TWO_53 = float(2**53)
_MOST_BYTES = 2**30


def _random_bytes(count: int) -> bytes:
    """Bytes from OpenSSL, which takes at most 2^31 - 1 at a time."""
    return b"".join(ssl.RAND_bytes(min(_MOST_BYTES, count - done)) for done in range(0, count, _MOST_BYTES))


class PrivateRandomness(Protocol):
    """Randomness that must be unpredictable: noise and sampling.

    `key` names the draw (for example the step). A seeded source gives the same numbers for the same key, so a
    resumed run replays; the system source ignores it.
    """

    @property
    def for_release(self) -> bool:
        """Whether what it touches may be released with its guarantee."""
        ...

    def normal(self, size: int, key: Sequence[int]) -> Tensor:
        """`size` independent standard normal numbers, float64, on the CPU."""
        ...

    def bernoulli(self, probability: float, size: int, key: Sequence[int]) -> npt.NDArray[np.bool_]:
        """`size` independent coins, each true with exactly `probability` (to 2^-53)."""
        ...

    def below(self, bounds: npt.NDArray[np.int64], key: Sequence[int]) -> npt.NDArray[np.int64]:
        """One uniform integer in 0..bound-1 for each bound."""
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

    def _uniform(self, size: int) -> Tensor:
        """Multiples of 2^-53 in [0, 1)."""
        if size == 0:
            return torch.empty(0, dtype=torch.float64)
        words = torch.frombuffer(bytearray(_random_bytes(8 * size)), dtype=torch.int64)
        return ((words >> 11) & (2**53 - 1)).to(torch.float64).mul_(1 / _TWO_53)

    def normal(self, size: int, key: Sequence[int]) -> Tensor:
        """Box-Muller on 53-bit uniform numbers; `key` is ignored."""
        half = (size + 1) // 2
        uniform = self._uniform(2 * half)
        radius = uniform[:half].neg_().log1p_().mul_(-2.0).sqrt_()
        angle = uniform[half:].mul_(2.0 * math.pi)
        normal = torch.empty(2 * half, dtype=torch.float64)
        torch.mul(radius, angle.cos(), out=normal[:half])
        torch.mul(radius, angle.sin_(), out=normal[half:])
        return normal[:size]

    def bernoulli(self, probability: float, size: int, key: Sequence[int]) -> npt.NDArray[np.bool_]:
        """Independent coins; `key` is ignored."""
        return (self._uniform(size) < probability).numpy()

    def below(self, bounds: npt.NDArray[np.int64], key: Sequence[int]) -> npt.NDArray[np.int64]:
        """Uniform integers; the bias of scaling 53 bits is below bound * 2^-53; `key` is ignored."""
        scaled = self._uniform(len(bounds)).numpy() * bounds
        return np.minimum(scaled.astype(np.int64), bounds - 1)


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

    def _stream(self, purpose: int, key: Sequence[int]) -> np.random.Generator:
        return np.random.Generator(
            np.random.PCG64(np.random.SeedSequence(self.seed, spawn_key=(purpose, *key)))
        )

    def normal(self, size: int, key: Sequence[int]) -> Tensor:
        """Standard normal numbers determined by seed and key."""
        return torch.from_numpy(self._stream(0, key).standard_normal(size))

    def bernoulli(self, probability: float, size: int, key: Sequence[int]) -> npt.NDArray[np.bool_]:
        """Coins determined by seed and key."""
        return self._stream(1, key).random(size) < probability

    def below(self, bounds: npt.NDArray[np.int64], key: Sequence[int]) -> npt.NDArray[np.int64]:
        """Integers determined by seed and key."""
        return self._stream(2, key).integers(0, bounds, dtype=np.int64)


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
        """A seed for PyTorch's own generator (dropout, initialisation)."""
        return int(self._stream(2, key).integers(0, 2**63 - 1))


def _check_seed(seed: int) -> None:
    if isinstance(seed, bool) or not isinstance(seed, int) or seed < 0:
        raise SparseDPError(f"seed: got {seed!r}, expected a whole number >= 0")
