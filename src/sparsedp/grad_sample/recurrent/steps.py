"""The steps of a batch of sequences: which rows take part in each, and where these rows lie."""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch
from torch import Tensor

from sparsedp.grad_sample.graph import CannotBookError


@dataclass(frozen=True, eq=False)
class Steps:
    """How many rows take part in each step, never more than in the step before.

    `places` is None where all rows take part in all steps. Else rows are packed as PyTorch packs them, the longest
    first, and `places` says for each packed row where it lies in [steps, samples], flattened, the samples in order.

    Index conventions: s packed row, t step, n sample, f feature.
    """

    sizes: tuple[int, ...]
    places: Tensor | None = None

    @classmethod
    def of_packed(cls, batch_sizes: Tensor, order: Tensor | None) -> Steps:
        """Those of a `PackedSequence`; `order` says which sample each of its rows is (None: as they come).

        Raises:
            CannotBookError: rows of several lengths were in order of their lengths before they were packed, so that
                it cannot be told whose they are.
        """
        sizes = tuple(batch_sizes.tolist())
        if order is None and len(set(sizes)) > 1:
            raise CannotBookError("it packs rows of several lengths with enforce_sorted=True")
        step, row = packed_rows(batch_sizes)
        samples = row if order is None else order.cpu()[row]
        return cls(sizes, step * sizes[0] + samples)

    @property
    def samples(self) -> int:
        """All rows take part in the first step."""
        return self.sizes[0]

    @functools.cached_property
    def shape(self) -> tuple[int, ...]:
        """Of everything but the features, as a layer gives it out."""
        return (len(self.sizes), self.samples) if self.places is None else (sum(self.sizes),)

    def rows(self, data: Tensor) -> Tensor:
        """What a layer was given, [s, f], step after step, without its graph."""
        return data.detach().reshape(-1, data.shape[-1])

    def by_sample(self, data: Tensor) -> Tensor:
        """What a layer was given or a step left, as [t, n, f], samples in order, zero where there is no step."""
        if self.places is None:
            return data.view(len(self.sizes), self.samples, -1) if data.dim() == 2 else data
        room = data.new_zeros(len(self.sizes) * self.samples, data.shape[1])
        spread = room.index_copy(0, self.places.to(data.device), data)
        return spread.view(len(self.sizes), self.samples, -1)


def packed_rows(batch_sizes: Tensor) -> tuple[Tensor, Tensor]:
    """The step of every packed row, and its number among the rows of that step."""
    step = torch.arange(len(batch_sizes)).repeat_interleave(batch_sizes)
    return step, torch.arange(len(step)) - (batch_sizes.cumsum(0) - batch_sizes)[step]
