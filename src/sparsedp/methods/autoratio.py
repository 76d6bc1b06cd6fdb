"""The automatic ratio: as many coordinates as keep a step's noise below the loudness from which fewer can pay.

r, the norm of the noise on k coordinates over the clip norm, grows with sqrt(k): public numbers, known before
training. An estimate from the warm-up's own energies (TP-TopK's Prop. 5.1) was tried first, and lost points by
keeping next to nothing: gradients of single coordinates hardly stand out from the noise of a warm-up.
"""

from __future__ import annotations

import math

QUIET = 0.4
"""A noise ratio r at which training all there is was as good as any part of it in our tables."""


def quiet_count(noise: float, ranked: int, always: int = 0) -> int:
    """How many of the ranked coordinates may be active beside `always` others so that r stays below `QUIET`.

    Args:
        noise: on each coordinate of a step's mean gradient, over the clip norm.
        ranked: how many there are to choose from.
        always: how many are active in any case.

    **Edge cases.** At least one.
    """
    if noise == 0:
        return ranked
    return max(1, min(ranked, math.floor((QUIET / noise) ** 2) - always))
