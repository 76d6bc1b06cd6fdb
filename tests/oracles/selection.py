"""DP-FEST and DP-AdaFEST in NumPy, from the paper (Ghazi et al. 2023, Sec. 3.1 and Algorithm 1), from the top.

AdaFEST is one step of a bag of words: the mean of a text's word vectors, a linear layer, softmax and cross-entropy;
gradients by hand. What is ours: a sample's gradient is restricted to the chosen rows before it is clipped, and the
threshold is given in standard deviations of the count's noise.
"""

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


def chosen_rows(noisy_counts: np.ndarray, tau: float) -> list[int]:
    """The rows whose noisy contribution count reaches tau."""
    return [row for row, count in enumerate(noisy_counts) if count >= tau]


def gradient(tokens: list[int], label: int, table, weight, bias, padding: int) -> np.ndarray:
    """One text's gradient: of the table, then of the head's weight and bias, flat."""
    mean = np.mean([table[token] for token in tokens], axis=0)
    logits = weight @ mean + bias
    p = np.exp(logits - logits.max())
    p /= p.sum()
    p[label] -= 1.0
    of_table = np.zeros_like(table)
    for token in tokens:
        if token != padding:
            of_table[token] += weight.T @ p / len(tokens)
    return np.concatenate([of_table.ravel(), np.outer(p, mean).ravel(), p])


def step(texts, labels, table, weight, bias, *, kept, padding, clip, noise, expected) -> np.ndarray:
    """The noisy mean gradient; `noise` has one number for each active coordinate, in order; zero elsewhere."""
    mask = np.zeros(table.shape, dtype=bool)
    mask[kept] = True
    active = np.concatenate([mask.ravel(), np.ones(weight.size + bias.size, dtype=bool)])
    total = np.zeros(active.size)
    for tokens, label in zip(texts, labels, strict=True):
        g = gradient(tokens, label, table, weight, bias, padding) * active
        total += g / max(1.0, np.linalg.norm(g) / clip)
    total[active] += noise
    return total / expected
