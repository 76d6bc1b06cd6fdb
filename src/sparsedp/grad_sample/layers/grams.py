"""Norms of sums of outer products from the Gram matrices of their positions ("ghost norms"), where positions are few.

A sample's gradient sum_t b_t a_t^T has the squared norm sum_{t,s} (a_t . a_s)(b_t . b_s), and the weighted sum over
samples is one ordinary weight gradient: no sample's gradient is formed. The Gram matrices are float64, so the norm is
exact to float64 rounding of the terms.

A sample whose positions nearly cancel has large terms and a small gradient. In the float32 sum that samples share,
its rounding would be bounded by its terms, not by the clip. So a sample whose terms add up to more than `MOST_TERMS`
times its gradient is kept out of that sum: its gradient is formed in float64, by itself, for norm and sum alike.

Index conventions: n sample, t and s positions.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from sparsedp.grad_sample.layers.source import MOST_SUMMED

MOST_TERMS = 64.0
"""Times a sample's gradient that the norms of its terms may add up to in a sum that samples share."""
EXTREME = 2.0**40
"""Beyond this size squares of companions may underflow in float32: such a sample counts as not finite."""
MOST_POSITIONS = 4096
"""Positions of samples summed in float32 before the sum goes on in float64."""
WIDE_BYTES = 4 << 20
"""What is turned into float64 at a time, so that it stays in the cache."""

LEAST_BLOCK, LARGE_BLOCK = 1 << 14, 1 << 19
"""Scalars below which a formed gradient stays in the cache, and beyond which too few samples' fit to be kept: these
are formed twice, for the norm and for the sum."""
FORMING = 16.0
"""Products in float64 that cost as much as to write a scalar of a formed gradient and read it twice."""


def pays(products: int, positions: int, block: int) -> bool:
    """Whether Gram matrices of so many products cost less than forming a block's gradients; by shapes alone."""
    again = positions / 2 if block > LARGE_BLOCK else 0.0
    return block >= LEAST_BLOCK and products <= (FORMING + again) * block


@dataclass(frozen=True, slots=True, eq=False)
class GramNorms:
    """Squared norms [n], and the samples whose gradients are summed alone. Private."""

    squared: Tensor
    alone: list[int]

    def together(self, factors: Tensor) -> Tensor:
        """The factors in the shared sum: zero for those that are summed alone."""
        return (
            factors.index_fill(0, torch.tensor(self.alone, device=factors.device), 0)
            if self.alone
            else factors
        )


def measure(grams: Iterable[tuple[Tensor, Tensor]], form: Callable[[int], Tensor], exact: bool) -> GramNorms:
    """Squared norms from the Gram matrices of inputs and output gradients, [n, t, t] each, some samples at a time.

    `form` gives one sample's gradient in float64. Where the sum is float64 as well (`exact`), nothing is extreme.
    """
    squares, terms, extremes = [], [], []
    for a, b in grams:
        squares.append((a * b).sum((1, 2)))
        sizes = [gram.diagonal(dim1=1, dim2=2) for gram in (a, b)]
        terms.append((sizes[0] * sizes[1]).sqrt().sum(1))
        extremes.append((torch.maximum(*sizes) > EXTREME**2).any(1))
    squared, largest = torch.cat(squares), torch.cat(terms)
    alone = (largest.square() > MOST_TERMS**2 * squared).nonzero().squeeze(1).tolist()
    for sample in alone:
        squared[sample] = form(sample).square().sum()
    if not exact:
        squared.masked_fill_(torch.cat(extremes), torch.inf)
    return GramNorms(squared, alone)


def cached(samples: int, scalars: int) -> list[slice]:
    """Samples of so many scalars each, as many at a time as stay in the cache in float64."""
    return _spans(samples, WIDE_BYTES // (8 * max(scalars, 1)))


def summed(samples: int, positions: int) -> list[slice]:
    """Samples of so many positions each, as many at a time as may be summed in float32."""
    return _spans(samples, min(MOST_SUMMED, MOST_POSITIONS // max(positions, 1)))


def _spans(samples: int, step: int) -> list[slice]:
    step = max(step, 1)
    return [slice(start, start + step) for start in range(0, samples, step)]
