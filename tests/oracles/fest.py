"""DP-FEST in NumPy, from the paper (Ghazi et al. 2023, Sec. 3.1): which rows are kept, told again from the top."""

from __future__ import annotations

import numpy as np


def histogram(samples: list[list[int]], units: list[int], rows: int, padding: int | None) -> np.ndarray:
    """The sum over units of their 0/1 vectors of rows touched, each divided by its norm."""
    total = np.zeros(rows)
    for unit in sorted(set(units)):
        touched = np.zeros(rows)
        for sample, owner in zip(samples, units, strict=True):
            if owner == unit:
                touched[[token for token in sample if token != padding]] = 1
        norm = np.linalg.norm(touched)
        total += touched / norm if norm else touched
    return total


def best_rows(noisy: np.ndarray, count: int) -> list[int]:
    """The rows with the largest noisy counts, ties to the lower one."""
    return sorted(sorted(range(len(noisy)), key=lambda row: (-noisy[row], row))[:count])
