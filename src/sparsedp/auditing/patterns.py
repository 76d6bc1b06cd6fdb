"""Patterns in noise: coordinates or steps that repeat, negate or follow one another."""

from __future__ import annotations

from typing import final

import numpy as np
from scipy import stats

from sparsedp.auditing.estimators import Vector

KEPT = 6
"""Releases kept whole, to be compared coordinate by coordinate and step by step."""
DIGITS = 9
"""Decimals, in clip norms, to which two coordinates must agree in every release kept to count as one."""


@final
class NoisePatterns:
    """Collects the noise of several releases of one step, and says what independent normals would not do."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._kept: list[Vector] = []
        self._products = np.zeros(size // 2)
        self._energy = 0.0
        self._releases = 0

    def add(self, noise: Vector) -> None:
        """Take in the noise of one release."""
        if len(self._kept) < KEPT:
            self._kept.append(noise.copy())
        if self._releases < 8 * KEPT and self._size > 1:
            padded = np.fft.rfft(noise, 2 * self._size)
            self._products += np.fft.irfft(np.abs(padded) ** 2, 2 * self._size)[1 : self._size // 2 + 1]
            self._energy += float(noise @ noise)
            self._releases += 1

    def problems(self, risk: float) -> list[str]:
        """What was found, with a chance of `risk` on independent noise."""
        return [*self._equal_coordinates(), *self._equal_steps(risk / 2), *self._echoes(risk / 2)]

    def _equal_coordinates(self) -> list[str]:
        """Two coordinates that agree in all of six releases: by chance less than once in 10^30 pairs."""
        if len(self._kept) < KEPT or self._size < 2:
            return []
        table = np.stack(self._kept, axis=1)
        table = np.round(table * np.where(table[:, :1] < 0, -1.0, 1.0), DIGITS)
        order = np.lexsort(table.T)
        same = (np.diff(table[order], axis=0) == 0).all(axis=1) & (table[order][1:] != 0).any(axis=1)
        if not same.any():
            return []
        first = int(np.flatnonzero(same)[0])
        pair = sorted((int(order[first]), int(order[first + 1])))
        return [
            f"active coordinates {pair[0]} and {pair[1]} get the same noise ({int(same.sum())} such pairs)"
        ]

    def _equal_steps(self, risk: float) -> list[str]:
        """Noise of one release that can be told from that of another."""
        kept = np.stack(self._kept) if self._kept else np.zeros((0, 0))
        norms = np.linalg.norm(kept, axis=1)
        if len(kept) < 2 or self._size < 30 or not norms.all():
            return []
        likeness = (kept @ kept.T) / np.outer(norms, norms)
        pairs = np.triu_indices(len(kept), 1)
        limit = stats.norm.isf(risk / (2 * len(pairs[0]))) / np.sqrt(self._size)
        return (
            ["the noise of two releases is not independent"]
            if np.abs(likeness[pairs]).max() > 1.5 * limit
            else []
        )

    def _echoes(self, risk: float) -> list[str]:
        """Noise that follows that of another coordinate at some distance, over all distances at once."""
        lags = np.arange(1, self._size // 2 + 1)
        if self._releases < 2 or self._size < 100 or self._energy == 0:
            return []
        variance = self._energy / (self._releases * self._size)
        values = self._products / (variance * np.sqrt(self._releases * (self._size - lags)))
        limit = 1.25 * stats.norm.isf(risk / (2 * len(lags)))
        worst = int(np.argmax(np.abs(values)))
        if abs(values[worst]) <= limit:
            return []
        return [f"the noise of coordinates {int(lags[worst])} apart is not independent"]
