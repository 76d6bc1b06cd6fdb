"""Sums of clients' updates, which come as integers on the mechanism's grid: what a federated round releases."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor

from sparsedp.core.clip import Clip, FlatClip
from sparsedp.privacy.grid import Grid


def on_grid(update: Tensor, clip: Clip, grid: Grid) -> Tensor:
    """A client's own part: its update clipped and rounded to the grid, as int64.

    **Edge cases.** An update that is not finite becomes zero.
    """
    values = update.to(torch.float64)
    factor = clip.tightened(grid.bound).factors(torch.linalg.vector_norm(values))
    return (
        (values * factor / grid.step).round_().to(torch.int64)
        if factor > 0
        else values.new_zeros(len(values), dtype=torch.int64)
    )


def is_within(update: Tensor, grid: Grid) -> bool:
    """Whether an update on the grid keeps to its bound, as every client that clips does."""
    return float(torch.linalg.vector_norm(update.to(torch.float64))) * grid.step <= grid.bound


@final
@dataclass(frozen=True, slots=True, eq=False)
class UpdateSum:
    """The sum of clients' updates on the grid, each held to the clip norm here, whatever the client did.

    **Privacy.** Adding or removing one client adds or removes one vector of integers, of norm at most the grid's
    bound. Nothing is rounded after that.

    Attributes:
        updates: one vector of integers a client. Private.
        length: how many numbers each has; public.
        clip: the bound on a client.
        grid: what the integers are multiples of.
    """

    updates: Sequence[Tensor]
    length: int
    clip: FlatClip
    grid: Grid

    @property
    def size(self) -> int:
        """The length of an update."""
        return self.length

    @property
    def sensitivity(self) -> float:
        """The clip's."""
        return self.clip.sensitivity

    def parts(self, bound: float) -> Iterator[Tensor]:
        """The updates one by one: multiples of the grid's step, so that putting them on the grid changes nothing."""
        yield torch.zeros(self.length, dtype=torch.float64)
        for update in self.updates:
            yield self._clipped(update, bound).mul_(self.grid.step)

    def _clipped(self, update: Tensor, bound: float) -> Tensor:
        """An update's integers in float64; one that is too long is shortened, towards zero."""
        steps = update.to(torch.float64)
        norm = torch.linalg.vector_norm(steps) * self.grid.step
        if float(norm) <= bound:
            return steps
        return (steps * self.clip.tightened(bound).factors(norm)).trunc_()
