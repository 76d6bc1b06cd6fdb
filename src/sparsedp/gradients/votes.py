"""Which groups of coordinates carry most of each unit's gradient: private, and looked at by the mechanism alone."""

from __future__ import annotations

from collections.abc import Iterator
from typing import final

import numpy as np
import torch
from torch import Tensor, nn

from sparsedp.core.batch import MicroBatch, PerSampleLoss, select_rows
from sparsedp.gradients.reference import ReferenceEngine
from sparsedp.gradients.touched import Pairs

_BYTES = 2**26
"""About how much memory the gradients of one chunk take."""


@final
class GradientVotes:
    """Each unit's few groups with the most gradient energy, by per-sample gradients of the model as it is.

    Args:
        model: as it is trained.
        loss: calls it.
        groups: the group of each of the d coordinates; -1 for those that nobody can vote for.
        most: for how many groups a unit votes.

    **Edge cases.** A unit whose gradient is zero or not finite votes for nothing; ties go to the lower group. A
    unit's gradient is the mean over its rows. One pass costs d numbers for each sample, as the
    reference engine does.
    """

    def __init__(self, model: nn.Module, loss: PerSampleLoss, groups: Tensor, most: int) -> None:
        self._engine = ReferenceEngine(model, loss)
        self._groups, self._most = groups, most

    def __call__(self, batch: MicroBatch) -> Pairs:
        """The pairs of unit and group voted for, in a batch."""
        nothing = torch.empty(0, dtype=torch.int64)
        owners, voted, first = [nothing], [nothing], 0
        for chunk in self._chunks(batch):
            gradients = self._engine.unit_gradients(chunk).cpu()
            for place, groups in enumerate(votes(gradients, self._groups, self._most), start=first):
                owners.append(torch.full_like(groups, place))
                voted.append(groups)
            first += gradients.shape[0]
        return torch.cat(owners), torch.cat(voted)

    def _chunks(self, batch: MicroBatch) -> Iterator[MicroBatch]:
        """The batch in pieces of whole units."""
        most = max(1, _BYTES // (8 * self._engine.layout.dimension))
        count = batch.row_count
        units = torch.arange(count) if batch.units is None else batch.units.cpu()
        sizes = torch.bincount(units).cumsum(0).tolist() if count else []
        start = 0
        for place, end in enumerate(sizes):
            following = sizes[place + 1] if place + 1 < len(sizes) else None
            if following is None or following - start > most:
                span = slice(start, end)
                chance = None if batch.chance is None else batch.chance.part(span)
                yield MicroBatch(select_rows(batch.rows, span), units[span] - units[start], chance)
                start = end


def votes(gradients: Tensor, groups: Tensor, most: int) -> Iterator[Tensor]:
    """The groups that each of some units votes for, by its gradient: [units, d], on the CPU."""
    runs, sizes = torch.unique_consecutive(groups, return_counts=True)
    starts, able = (sizes.cumsum(0) - sizes).numpy(), runs >= 0
    count = int(groups.max()) + 1 if groups.numel() else 0
    for gradient in gradients:
        squares = gradient.to(torch.float64, copy=True).square_().numpy()
        of_runs = torch.from_numpy(np.add.reduceat(squares, starts))[able]
        energy = torch.zeros(count, dtype=torch.float64).index_add_(0, runs[able], of_runs)
        if not energy.isfinite().all():
            energy.zero_()
        best = torch.sort(energy, descending=True, stable=True)
        yield best.indices[:most][best.values[:most] > 0]
