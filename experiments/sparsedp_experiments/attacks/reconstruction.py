"""Reconstructing an input from its gradient by least squares: what noise and sparsity do to it (RS, Sec. 5).

The input x solves `K x = g` for a constraint matrix K with one row per gradient coordinate; the attacker sees g plus
noise on the support only.
"""

from __future__ import annotations

import torch
from torch import Tensor

from sparsedp.errors import SparseDPError
from sparsedp.parameters import Support
from sparsedp.randomness import PublicRandomness


def least_squares_attack(constraints: Tensor, gradient: Tensor, support: Support) -> Tensor:
    """The attacker's estimate of x from the observed k values of g (RS, eq. 100)."""
    seen = _rows(constraints, support)
    if gradient.shape != (support.size,):
        raise SparseDPError(f"gradient: got shape {tuple(gradient.shape)}, expected ({support.size},)")
    solution: Tensor = torch.linalg.lstsq(seen, gradient.double().unsqueeze(1)).solution
    return solution.squeeze(1)


def reconstruction_error(constraints: Tensor, support: Support, noise_std: float) -> float:
    """`E||x - x_hat||^2` for one support: `noise^2 tr (K_A' K_A)^-1` (RS, eq. 16 with the mask put in).

    **Edge cases.** Infinite when the observed rows do not determine x.
    """
    values = torch.linalg.svdvals(_rows(constraints, support))
    columns = constraints.shape[1] if constraints.dim() == 2 else 1
    if values.numel() < columns or float(values.min()) <= 1e-12 * max(float(values.max()), 1e-300):
        return float("inf")
    return noise_std**2 * float((values**-2).sum())


def mean_reconstruction_error(
    constraints: Tensor, rate: float, noise_std: float, public: PublicRandomness, masks: int = 200
) -> float:
    """The error averaged over random supports that freeze the share `rate` of coordinates."""
    d = constraints.shape[0]
    kept = _kept(rate, d)
    orders = (public.permutation(d, (mask,)) for mask in range(masks))
    errors = (reconstruction_error(constraints, Support(order[:kept], d), noise_std) for order in orders)
    return sum(errors) / masks


def reconstruction_lower_bound(constraints: Tensor, rate: float, noise_std: float) -> float:
    """`noise^2/((1-r) ||k||^2)` (RS, Theorem 5.1), for a matrix `noise^2 n^2/((1-r) ||K||^2)` with n columns.

    Jensen for the mean over random supports, as the trace of an inverse is convex; for n columns the arithmetic and
    harmonic means of the eigenvalues besides. `1 - r` is the share actually kept.
    """
    columns = constraints.shape[1] if constraints.dim() == 2 else 1
    d = constraints.shape[0]
    return noise_std**2 * columns**2 / (_kept(rate, d) / d * float((constraints.double() ** 2).sum()))


def _rows(constraints: Tensor, support: Support) -> Tensor:
    matrix = constraints.double().reshape(constraints.shape[0], -1)
    if matrix.shape[0] != support.dimension:
        raise SparseDPError(
            f"constraints: got {matrix.shape[0]} rows, expected one for each of d={support.dimension}"
        )
    return matrix[support.indices]


def _kept(rate: float, dimension: int) -> int:
    if not 0 <= rate < 1:
        raise SparseDPError(f"rate: got {rate}, expected the share of frozen coordinates, 0 <= r < 1")
    return max(1, round((1 - rate) * dimension))
