"""The global generators of torch, NumPy and Python: seeded, watched, and kept out of the caller's way."""

from __future__ import annotations

import ctypes
import random
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import final

import numpy as np
import torch

SEED_BYTES = 32
_MERSENNE_BYTES = 624 * 4 + 4
"""NumPy's own state: 624 words and a position."""
_ONE_THREAD = threading.RLock()


@final
class GeneratorWatch:
    """Remembers how the global generators stand; a few microseconds, as every micro-batch is watched."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._before = self._states()

    def moved(self) -> str | None:
        """Whose generator has been drawn from since, or None."""
        mine, numpys, pythons = self._states()
        before = self._before
        if not all(map(torch.equal, mine, before[0])):
            return "torch's"
        if numpys != before[1]:
            return "NumPy's"
        return None if pythons == before[2] else "Python's"

    def _states(self) -> tuple[list[torch.Tensor], object, object]:
        on_device = [torch.cuda.get_rng_state(self._device)] if self._device.type == "cuda" else []
        return [torch.get_rng_state(), *on_device], _numpy_state(), random.getstate()


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
def own_generators(seed: bytes, device: torch.device) -> Iterator[None]:
    """Seed the global generators inside, and put the caller's state back after.

    **Edge cases.** They belong to the whole process: threads take turns.
    """
    with _ONE_THREAD, torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        pythons, numpys = random.getstate(), np.random.get_state()  # noqa: NPY002
        try:
            seed_generators(seed, device)
            yield
        finally:
            random.setstate(pythons)
            np.random.set_state(numpys)  # noqa: NPY002


def _numpy_state() -> object:
    """NumPy's state as bytes: its own way to tell it takes fifty times as long."""
    generator = np.random.mtrand._rand._bit_generator
    if type(generator) is np.random.MT19937:
        return ctypes.string_at(generator.ctypes.state_address, _MERSENNE_BYTES)
    return repr(generator.state)
