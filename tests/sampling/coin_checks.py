"""Whether coins are independent between all pairs of units and all pairs of steps; the mutants use it too."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

LIMIT = 9.0
"""In standard deviations: a fair coin passes it for one of two million pairs once in 10^12."""


def dependent_coins(draw: Callable[[int], np.ndarray], steps: int = 400) -> list[tuple[int, int]]:
    """Pairs of units whose coins go together (or against each other), of all pairs there are.

    `draw(step)` gives one coin per unit, at a rate of a half.
    """
    coins = np.stack([draw(step) for step in range(steps)]).astype(np.float32) * 2 - 1
    together = coins.T @ coins / np.sqrt(steps)
    return [(int(i), int(j)) for i, j in np.argwhere(np.abs(np.triu(together, 1)) > LIMIT)]
