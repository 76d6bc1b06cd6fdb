"""Where in a parameter the active entries lie: whole rows of it, or scattered; and values that follow them."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

_IN_NUMPY = (torch.float32, torch.float64)


@dataclass(frozen=True, slots=True, eq=False)
class WholeRows:
    """Entries that fill whole slices along the first axis."""

    rows: Tensor
    row_shape: tuple[int, ...]

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the active entries as one tensor."""
        return (self.rows.numel(), *self.row_shape)

    @property
    def flat(self) -> Tensor:
        """Their sorted flat positions in the parameter."""
        width = math.prod(self.row_shape)
        return (self.rows.unsqueeze(1) * width + torch.arange(width, device=self.rows.device)).reshape(-1)

    def read(self, full: Tensor, out: Tensor | None = None) -> Tensor:
        """The active entries of a tensor of the parameter's shape, in `out` if there is one."""
        return torch.index_select(full, 0, self.rows, out=out)

    def write(self, full: Tensor, values: Tensor) -> None:
        """Put values into the active entries, and leave every other bit alone."""
        in_numpy = full.device.type == "cpu" and full.dtype == values.dtype and full.dtype in _IN_NUMPY
        if in_numpy and full.is_contiguous() and values.is_contiguous():
            _as_items(full)[self.rows.numpy()] = _as_items(values)
            full.index_copy_(0, self.rows[:0], values[:0])  # so that PyTorch counts it as a change
        else:
            full.index_copy_(0, self.rows, values)


@dataclass(frozen=True, slots=True, eq=False)
class Scattered:
    """Entries anywhere, by sorted flat position."""

    flat: Tensor
    full_shape: tuple[int, ...]

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the active entries as one tensor."""
        return (self.flat.numel(),)

    def read(self, full: Tensor, out: Tensor | None = None) -> Tensor:
        """The active entries of a tensor of the parameter's shape, in `out` if there is one."""
        if full.is_contiguous():
            return torch.index_select(full.view(-1), 0, self.flat, out=out)
        found = full[torch.unravel_index(self.flat, self.full_shape)]
        return found if out is None else out.copy_(found)

    def write(self, full: Tensor, values: Tensor) -> None:
        """Put values into the active entries, and leave every other bit alone."""
        if full.is_contiguous():
            full.view(-1).index_copy_(0, self.flat, values)
        else:
            full.index_put_(torch.unravel_index(self.flat, self.full_shape), values)


Places = WholeRows | Scattered


def _as_items(rows: Tensor) -> npt.NDArray[np.void]:
    """The same memory as one item a row: NumPy then copies row by row, where PyTorch does number by number."""
    flat = rows.detach().numpy().reshape(len(rows), -1)
    return flat.view(f"V{flat.shape[1] * flat.itemsize}").reshape(-1)


def places_in(flat: Tensor, shape: tuple[int, ...], device: torch.device) -> Places | None:
    """The places of sorted flat positions in a parameter; None when they are all of it."""
    if flat.numel() == math.prod(shape):
        return None
    width = math.prod(shape[1:])
    if flat.numel() and width > 1 and flat.numel() % width == 0:
        rows = flat[::width] // width
        whole = WholeRows(rows, shape[1:])
        if torch.equal(whole.flat, flat):
            return WholeRows(rows.to(device), shape[1:])
    return Scattered(flat.to(device), shape)


def moved(values: Tensor, old: Places | None, new: Places | None, full: Tensor, fill: float = 0.0) -> Tensor:
    """Values held for the old places, for the new ones: kept where both have them, `fill` where only the new do.

    `full` gives the parameter's shape and strides.
    """
    if old is None and new is None:
        return values
    if old is None:
        assert new is not None
        return new.read(values)
    if new is None:
        whole = torch.full_like(full, fill, dtype=values.dtype)
        old.write(whole, values)
        return whole
    out = torch.full(new.shape, fill, dtype=values.dtype, device=values.device)
    carry(values, old, out, new)
    return out


def carry(values: Tensor, old: Places, out: Tensor, new: Places) -> None:
    """Put values held for the old places into those for the new ones, where both have them; costs k."""
    before, after = old.flat, new.flat
    if not before.numel() or not after.numel():
        return
    place = torch.searchsorted(after, before).clamp_(max=after.numel() - 1)
    kept = after[place] == before
    out.view(-1)[place[kept]] = values.reshape(-1)[kept]
