"""Where in a parameter the active entries lie: everywhere, whole rows, or scattered; and values that follow them."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True, eq=False)
class Places:
    """Entries of a parameter: all of it, or those with the sorted numbers `index`, of rows or of single entries."""

    full_shape: tuple[int, ...]
    index: Tensor | None = None
    by_row: bool = False

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the active entries as one tensor."""
        if self.index is None:
            return self.full_shape
        return (self.index.numel(), *(self.full_shape[1:] if self.by_row else ()))

    @property
    def flat(self) -> Tensor:
        """Their sorted flat positions, where they are not all of the parameter."""
        assert self.index is not None
        if not self.by_row:
            return self.index
        width = math.prod(self.full_shape[1:])
        return (self.index.unsqueeze(1) * width + torch.arange(width, device=self.index.device)).reshape(-1)

    def read(self, full: Tensor, out: Tensor | None = None) -> Tensor:
        """The active entries of a tensor of the parameter's shape: a copy (in `out`); itself if they are all."""
        if self.index is None:
            return full
        if self.by_row or full.is_contiguous():
            return torch.index_select(full if self.by_row else full.view(-1), 0, self.index, out=out)
        found = full[torch.unravel_index(self.index, self.full_shape)]
        return found if out is None else out.copy_(found)

    def write(self, full: Tensor, values: Tensor) -> None:
        """Put values into the active entries, and leave every other bit alone."""
        if self.index is None:
            full.copy_(values)
        elif self.by_row or full.is_contiguous():
            (full if self.by_row else full.view(-1)).index_copy_(0, self.index, values)
        else:
            full.index_put_(torch.unravel_index(self.index, self.full_shape), values)


def places_in(flat: Tensor, shape: tuple[int, ...], device: torch.device) -> Places:
    """The places of sorted flat positions in a parameter."""
    if flat.numel() == math.prod(shape):
        return Places(shape)
    width = math.prod(shape[1:])
    if flat.numel() and width > 1 and flat.numel() % width == 0:
        rows = Places(shape, flat[::width] // width, by_row=True)
        if torch.equal(rows.flat, flat):
            return Places(shape, flat[::width].to(device) // width, by_row=True)
    return Places(shape, flat.to(device))


def moved(values: Tensor, old: Places, new: Places, full: Tensor, fill: float = 0.0) -> Tensor:
    """Values held for the old places, for the new ones; `fill` where these alone are; `full` gives the strides."""
    if old.index is None:
        return new.read(values)
    if new.index is None:
        out = torch.full_like(full, fill, dtype=values.dtype)
    else:
        out = torch.full(new.shape, fill, dtype=values.dtype, device=values.device)
    carry(values, old, out, new)
    return out


def carry(values: Tensor, old: Places, out: Tensor, new: Places) -> None:
    """Put values held for the old places into those for the new ones, where both have them; costs k."""
    if new.index is None:
        old.write(out, values)
        return
    before, after = old.flat, new.flat
    if not before.numel() or not after.numel():
        return
    place = torch.searchsorted(after, before).clamp_(max=after.numel() - 1)
    kept = after[place] == before
    out.view(-1)[place[kept]] = values.reshape(-1)[kept]
