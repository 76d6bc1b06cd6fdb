"""The reference engine: per-sample gradients, any model, slow. The executable specification of the fast one."""

from __future__ import annotations

import logging
from collections.abc import Iterable

import torch
from torch import Tensor, nn
from torch.func import grad, vmap
from torch.utils import _pytree as pytree

from sparsedp.batch import MicroBatch, PerSampleLoss, Rows, check_losses, row_count, to_device
from sparsedp.grad_sample.chances import Chances
from sparsedp.grad_sample.keyed import nothing_drawn
from sparsedp.grad_sample.query import Query, See, mean_by_unit, sum_clipped_rows
from sparsedp.grad_sample.rowwise import RowByRow
from sparsedp.grad_sample.vectorised import call_with, detached_and_quiet, places
from sparsedp.parameters import Layout
from sparsedp.randomness import Chance

logger = logging.getLogger("sparsedp")


class ReferenceEngine:
    """Per-sample gradients one by one, then the query word for word.

    `vmap(grad)` where that can stand for a plain loop of `autograd.grad` over the rows, else the loop: always where
    the model draws random numbers.
    """

    def __init__(self, model: nn.Module, loss: PerSampleLoss) -> None:
        self._model = model
        self._loss = loss
        self._layout = Layout.of(model)
        self._row_by_row = RowByRow(model, loss, self._layout)
        self._chances = Chances(model, loss)
        self._vectorised: bool | None = None

    @property
    def layout(self) -> Layout:
        """The flat coordinates of the model's trainable parameters."""
        return self._layout

    def clipped_sum(self, batches: Iterable[MicroBatch], query: Query, see: See | None = None) -> Tensor:
        """The sum over all units of their clipped gradients on the support; `see` is shown every chunk."""
        device = self._layout.parameters(self._model)[0].device
        total = torch.zeros(query.support.size, dtype=torch.float64, device=device)
        for batch in batches:
            if batch.row_count == 0:
                continue
            with detached_and_quiet(), nothing_drawn(device):
                rows = to_device(batch.rows, device)
                gradients = query.support.gather(self._per_sample_gradients(rows, batch.chance))
            if see is not None:
                see(MicroBatch(rows, chance=batch.chance), gradients.__getitem__, None)
            units = None if batch.units is None else batch.units.to(device)
            total += sum_clipped_rows(mean_by_unit(gradients, units), query)
        return total

    def _per_sample_gradients(self, rows: Rows, chance: Chance | None) -> Tensor:
        """The [n, d] matrix of per-sample gradients."""
        if (draws := self._chances.of(rows)) != ():
            return self._row_by_row.gradients(rows, draws, chance)
        if self._vectorised is not False and (reason := self._row_by_row.why_needed(rows)) is not None:
            self._loop_from_now_on(reason)
        if self._vectorised is not False:
            try:
                gradients = self._vectorised_gradients(rows)
            except (
                Exception
            ) as error:  # whatever vmap cannot do; an error of the model's own comes up again below
                self._loop_from_now_on(str(error))
            else:
                self._vectorised = True
                return gradients
        return self._row_by_row.gradients(rows, (), None)

    def _loop_from_now_on(self, reason: str) -> None:
        logger.info("the reference engine loops over samples: %s", reason)
        self._vectorised = False

    def _vectorised_gradients(self, rows: Rows) -> Tensor:
        parameters = {
            slot.name: p.detach()
            for slot, p in zip(self._layout, self._layout.parameters(self._model), strict=True)
        }

        def loss_of_one(values: dict[str, Tensor], row: Rows) -> Tensor:
            single = pytree.tree_map_only(Tensor, lambda leaf: leaf.unsqueeze(0), row)
            return check_losses(_losses_at(self._model, values, self._loss, single), 1)[0]

        by_name = vmap(grad(loss_of_one), in_dims=(None, 0), randomness="error")(parameters, rows)
        wide = torch.float32
        for value in by_name.values():
            wide = torch.promote_types(wide, value.dtype)
        count = row_count(rows)
        return torch.cat([by_name[slot.name].reshape(count, -1).to(wide) for slot in self._layout], dim=1)


class _InItsPlace(nn.Module):
    """Holds a model, so that a loss is given the model itself, its class and all, while other values are in it."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, loss: PerSampleLoss, rows: Rows) -> Tensor:
        return loss(self.model, rows)


def _losses_at(model: nn.Module, values: dict[str, Tensor], loss: PerSampleLoss, rows: Rows) -> Tensor:
    """The losses with other values for some parameters, by their first names, in every place they are held."""
    first_name = {id(p): name for name, p in model.named_parameters()}
    swapped = {
        f"model.{place}": values[name]
        for place, p in places(model).items()
        if (name := first_name[id(p)]) in values
    }
    losses: Tensor = call_with(_InItsPlace(model), swapped, (loss, rows), {})
    return losses
