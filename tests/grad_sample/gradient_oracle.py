"""Per-sample gradients by a plain loop of `backward`, the clipped sum in NumPy: no code shared with the engines."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

Loss = Callable[[Any, Any], Tensor]


def plain_loop(model: nn.Module, loss: Loss, rows: Sequence[Tensor]) -> np.ndarray:
    """The [n, d] matrix of per-sample gradients of the trainable parameters."""
    trainable = [p for p in model.parameters() if p.requires_grad]
    gradients = []
    for i in range(len(rows[0])):
        for p in trainable:
            p.grad = None
        loss(model, tuple(part[i : i + 1] for part in rows)).sum().backward()
        parts = [torch.zeros_like(p) if p.grad is None else p.grad.to_dense() for p in trainable]
        gradients.append(np.concatenate([part.double().numpy().ravel() for part in parts]))
    for p in trainable:
        p.grad = None
    return np.stack(gradients)


def unit_means(gradients: np.ndarray, units: Sequence[int]) -> np.ndarray:
    """The mean gradient of every unit."""
    return np.stack([gradients[np.equal(units, u)].mean(axis=0) for u in range(max(units) + 1)])


def measured(
    gradients: np.ndarray,
    indices: np.ndarray,
    centre: np.ndarray | float = 0.0,
    scale: np.ndarray | float = 1.0,
    keep: int | None = None,
) -> np.ndarray:
    """Restricted to the support, standardized, and only the `keep` largest magnitudes of each row."""
    z = (gradients[:, indices] - centre) / scale
    if keep is not None and keep < z.shape[1]:
        for row in z:
            order = sorted(range(len(row)), key=lambda j: (-abs(row[j]), j))
            row[order[keep:]] = 0.0
    return z


def clipped_sum(z: np.ndarray, clip_norm: float | None) -> np.ndarray:
    """The sum of the rows, each scaled down to `clip_norm` less the documented margin of 1e-3."""
    total = np.zeros(z.shape[1])
    for row in z:
        norm = np.sqrt((row**2).sum())
        if np.isfinite(norm):
            total += row if clip_norm is None else row * min(1.0, clip_norm / 1.001 / max(norm, 1e-300))
    return total


def median_norm(z: np.ndarray) -> float:
    """A clip norm that clips about half of the rows; 1 where there is nothing to clip."""
    norm = float(np.median(np.sqrt((z**2).sum(axis=1)))) if z.size else 0.0
    return norm if norm > 0 else 1.0
