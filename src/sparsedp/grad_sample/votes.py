"""Which groups of coordinates carry most of each unit's gradient: private, and looked at by the mechanism alone."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import final

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from sparsedp.core.batch import MicroBatch, PerSampleLoss, Rows, select_rows, to_device
from sparsedp.grad_sample.alone import RowsAlone
from sparsedp.grad_sample.touched import Pairs


@final
class GradientVotes:
    """Each unit's few groups with the most gradient energy, by per-sample gradients of the model as it is.

    Args:
        model: as it is trained.
        loss: calls it.
        groups: the group of each of the d coordinates; -1 for those that nobody can vote for.
        most: for how many groups a unit votes.

    **Privacy.** Every row is taken alone, in memory of its own: in company the last bits of a gradient hang on who
    else is there, and where two groups tie (both rows of a two-class head do) the last bit moves a whole vote.

    **Edge cases.** A unit whose gradient is zero or not finite votes for nothing; ties go to the lower group. A
    unit's gradient is the mean over its rows. One pass costs a backward pass and d numbers for each row.
    """

    def __init__(self, model: nn.Module, loss: PerSampleLoss, groups: Tensor, most: int) -> None:
        self._alone = RowsAlone(model, loss)
        self._device = next(model.parameters()).device
        self._groups, self._most = groups, most

    def __call__(self, batch: MicroBatch) -> Pairs:
        """The pairs of unit and group voted for, in a batch."""
        nothing = torch.empty(0, dtype=torch.int64)
        owners, voted = [nothing], [nothing]
        for place, groups in enumerate(votes(self._unit_gradients(batch), self._groups, self._most)):
            owners.append(torch.full_like(groups, place))
            voted.append(groups)
        return torch.cat(owners), torch.cat(voted)

    def _unit_gradients(self, batch: MicroBatch) -> Iterator[Tensor]:
        """The mean gradient of each unit's rows."""
        rows = to_device(batch.rows, self._device)
        units = torch.arange(batch.row_count) if batch.units is None else batch.units.cpu()
        start = 0
        for size in torch.bincount(units).tolist() if batch.row_count else []:
            total = sum(self._row_gradient(rows, batch, row) for row in range(start, start + size))
            yield torch.as_tensor(total / size)
            start += size

    def _row_gradient(self, rows: Rows, batch: MicroBatch, row: int) -> Tensor:
        span = slice(row, row + 1)
        own = pytree.tree_map_only(Tensor, torch.clone, select_rows(rows, span))
        chance = None if batch.chance is None else batch.chance.part(span)
        return self._alone.gradient(MicroBatch(own, chance=chance)).to("cpu", torch.float64)


def votes(gradients: Iterable[Tensor], groups: Tensor, most: int) -> Iterator[Tensor]:
    """The groups that each of some units votes for, by its gradient: d numbers, on the CPU."""
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
