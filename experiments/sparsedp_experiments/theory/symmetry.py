"""How symmetric gradient deviations are, in numbers (RS, App. F has pictures), and what asymmetry does to the bounds.

The functions here are pure. From un-noised gradients, keep results `NonPrivate`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from sparsedp.clipping import FlatClip
from sparsedp.errors import SparseDPError
from sparsedp.randomness import PublicRandomness


def lopsidedness(points: Tensor) -> float:
    """`||mean(x ||x||^2)|| / mean(||x||^3)` of points `[n, axes]` about zero: 0 if symmetric, 1 if all on one ray.

    **Edge cases.** A sample of a symmetric distribution gives a little more than 0; see `lopsidedness_by_chance`.
    """
    lengths = torch.linalg.vector_norm(_matrix(points), dim=1)
    whole = float((lengths**3).mean())
    cubes = points.double() * (lengths**2).unsqueeze(1)
    return float(torch.linalg.vector_norm(cubes.mean(dim=0))) / whole if whole else 0.0


def lopsidedness_by_chance(points: Tensor, public: PublicRandomness, flips: int = 200) -> Tensor:
    """What `lopsidedness` is when the sign of each point is drawn anew, sorted: what a symmetric cloud gives."""
    if flips < 1:
        raise SparseDPError(f"flips: got {flips}, expected at least 1")
    lengths = torch.linalg.vector_norm(_matrix(points), dim=1)
    cubes = points.double() * (lengths**2).unsqueeze(1)
    signs = torch.stack([public.normal(len(points), (3, flip)).sign() for flip in range(flips)])
    whole = float((lengths**3).sum())
    found = torch.linalg.vector_norm(signs @ cubes, dim=1) / whole if whole else torch.zeros(flips)
    return torch.sort(found).values


def symmetry_error(gradient: Tensor, deviations: Tensor, clip: FlatClip) -> float:
    """`b_t` of RS, Theorem 3.3: what asymmetry adds to the progress of a clipped step.

    It is `E<grad, clipped(grad + xi)>` less the same with xi or -xi, each half the time, the symmetric proxy that is
    nearest at hand.

    Args:
        gradient: the mean gradient, a d-vector.
        deviations: one sample's deviation from it per row, `[n, d]`.
        clip: of the step.
    """
    g, xi = gradient.double(), _matrix(deviations)
    if g.shape != xi.shape[1:]:
        raise SparseDPError(f"gradient: got shape {tuple(g.shape)}, expected ({xi.shape[1]},)")
    seen, mirrored = (_progress(g, g + side * xi, clip) for side in (1.0, -1.0))
    return (seen - mirrored) / 2


def _progress(gradient: Tensor, samples: Tensor, clip: FlatClip) -> float:
    factors = clip.factors(torch.linalg.vector_norm(samples, dim=1))
    return float((factors * (samples @ gradient)).mean())


def _matrix(points: Tensor) -> Tensor:
    if points.dim() != 2 or not len(points):
        raise SparseDPError(f"points: got shape {tuple(points.shape)}, expected one row for each sample")
    return points.double()
