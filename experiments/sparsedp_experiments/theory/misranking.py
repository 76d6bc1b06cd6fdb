"""How likely noise is to swap two coordinates in the ranking (TP-TopK, Prop. 5.3 and Remark B.1), and exactly.

The model is the paper's: `g_t = G + noise` with a fixed G and independent noise of standard deviation nu, T steps.
p is the coordinate with more energy, `G_p^2 > G_q^2`; a pair is misranked when q scores higher.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import final

import numpy as np
from scipy import optimize, special, stats

BERNSTEIN_CONSTANT = 3 / 32
"""The constant c of Remark B.1. The normal limit allows no more than 1/8; see `misranking_bernstein`."""

_TAIL = 13.0
_NODES = 12


@final
@dataclass(frozen=True, slots=True)
class Pair:
    """Two coordinates and the warm-up that ranks them."""

    larger: float  # |G_p|, the true mean gradient of the coordinate with more energy
    smaller: float  # |G_q|
    noise_std: float  # nu, the noise on each coordinate of a released mean gradient
    steps: int  # T, the number of warm-up steps

    @property
    def gap(self) -> float:
        """`G_p^2 - G_q^2`."""
        return (self.larger - self.smaller) * (self.larger + self.smaller)

    @property
    def spread(self) -> float:
        """`nu^4 + nu^2 (G_p^2 + G_q^2)`: a quarter of one step's variance of the score difference."""
        v = self.noise_std**2
        return v**2 + v * (self.larger**2 + self.smaller**2)


def misranking_chebyshev(pair: Pair) -> float:
    """The bound of Prop. 5.3, `4 (nu^4 + nu^2 (G_p^2 + G_q^2)) / (T gap^2)`; may exceed 1."""
    return 4 * pair.spread / (pair.steps * pair.gap**2)


def misranking_bernstein(pair: Pair) -> float:
    """The exponential bound of Remark B.1 with its constant: `exp(-c T gap^2 / (nu^4 + nu^2 (G_p^2 + G_q^2)))`.

    With `x = 2 s nu^2`, the Chernoff exponent of one step (see `misranking_chernoff`) is, for x <= 0.4, at most
    `-x gap/(2 nu^2) + (2/3) x^2 spread/nu^4`, since there `1/(1+x) >= 1-x`, `1/(1-x) <= 1 + 5x/3` and
    `-log(1-x^2)/2 <= 0.55 x^2`. It is least at `x = (3/8) nu^2 gap/spread < 3/8`, where it is
    `-(3/32) gap^2/spread`. So c = 3/32, and the second term of the remark's minimum is not needed.
    """
    return math.exp(-BERNSTEIN_CONSTANT * pair.steps * pair.gap**2 / pair.spread)


def misranking_chernoff(pair: Pair) -> float:
    """The best exponential bound: the Chernoff bound of the noncentral chi-squares, minimised numerically."""
    p, q = (pair.larger / pair.noise_std) ** 2, (pair.smaller / pair.noise_std) ** 2

    def exponent(x: float) -> float:
        return -0.5 * math.log1p(-x * x) + 0.5 * x * (q / (1 - x) - p / (1 + x))

    best = optimize.minimize_scalar(
        exponent, bounds=(0.0, 1 - 1e-9), method="bounded", options={"xatol": 1e-10}
    )
    return math.exp(pair.steps * min(0.0, exponent(float(best.x))))


def misranking_energy(pair: Pair) -> float:
    """The exact probability that the energy score swaps the pair.

    `T a/nu^2 + T` is noncentral chi-square with T degrees of freedom and noncentrality `T G^2/nu^2`. Its square root
    has a standard deviation of at most about 1, so Gauss-Legendre panels of length 1 over it give all digits.

    **Edge cases.** Below about 1e-30 it is given as zero.
    """
    scale = pair.steps / pair.noise_std**2
    p, q = scale * pair.larger**2, scale * pair.smaller**2
    middle = math.sqrt(pair.steps + q)
    low, high = max(0.0, middle - _TAIL), middle + _TAIL
    if math.sqrt(pair.steps + p) - _TAIL > high:
        return 0.0
    edges = np.linspace(low, high, math.ceil(high - low) + 1)
    half = (edges[1] - edges[0]) / 2
    nodes, weights = np.polynomial.legendre.leggauss(_NODES)
    y = (edges[:-1, None] + half * (nodes + 1)).ravel()
    density = stats.ncx2.pdf(y**2, pair.steps, q) if q else stats.chi2.pdf(y**2, pair.steps)
    swapped = stats.ncx2.cdf(y**2, pair.steps, p)
    return float(np.sum(np.tile(weights, edges.size - 1) * 2 * y * density * swapped) * half)


def misranking_coherent(pair: Pair) -> float:
    """The exact probability that the coherent score swaps the pair, in closed form.

    The means u, v of T steps are normal and `u^2 < v^2` when `u - v` and `u + v`, which are independent, differ in
    sign.
    """
    scale = math.sqrt(pair.steps / 2) / pair.noise_std
    apart, together = scale * (pair.larger - pair.smaller), scale * (pair.larger + pair.smaller)
    phi = special.ndtr
    return float(phi(-apart) * phi(together) + phi(apart) * phi(-together))
