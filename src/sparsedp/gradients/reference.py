"""The reference engine: `vmap(grad)`, any model, slow. The executable specification of the fast one."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import grad, vmap
from torch.utils import _pytree as pytree

from sparsedp.core.batch import MicroBatch, PerSampleLoss, Rows, check_losses, to_device
from sparsedp.core.layout import Layout
from sparsedp.gradients.query import Query, mean_by_unit, sum_clipped_rows
from sparsedp.gradients.vectorised import call_with, detached_and_quiet, places

logger = logging.getLogger("sparsedp")


class ReferenceEngine:
    """Per-sample gradients one by one in vectorised form, then the query word for word."""

    def __init__(self, model: nn.Module, loss: PerSampleLoss) -> None:
        self._model = model
        self._loss = loss
        self._layout = Layout.of(model)
        self._vectorised = True

    @property
    def layout(self) -> Layout:
        """The flat coordinates of the model's trainable parameters."""
        return self._layout

    def clipped_sum(self, batches: Iterable[MicroBatch], query: Query) -> Tensor:
        """The sum over all units of their clipped gradients on the support."""
        device = self._layout.parameters(self._model)[0].device
        total = torch.zeros(query.support.size, dtype=torch.float64, device=device)
        for batch in batches:
            if batch.row_count == 0:
                continue
            with detached_and_quiet():
                gradients = query.support.gather(self._per_sample_gradients(to_device(batch.rows, device)))
            units = None if batch.units is None else batch.units.to(device)
            total += sum_clipped_rows(mean_by_unit(gradients, units), query)
        return total

    def _per_sample_gradients(self, rows: Rows) -> Tensor:
        """The [n, d] matrix of per-sample gradients."""
        parameters = {
            slot.name: p.detach()
            for slot, p in zip(self._layout, self._layout.parameters(self._model), strict=True)
        }

        def loss_of_one(values: dict[str, Tensor], row: Rows) -> Tensor:
            single = pytree.tree_map_only(Tensor, lambda leaf: leaf.unsqueeze(0), row)
            losses = self._loss(_call_with(self._model, values), single)
            return check_losses(losses, 1)[0]

        leaves = [leaf for leaf in pytree.tree_leaves(rows) if isinstance(leaf, Tensor)]
        count = leaves[0].shape[0]
        if self._vectorised:
            try:
                by_name = vmap(grad(loss_of_one), in_dims=(None, 0), randomness="different")(parameters, rows)
                return self._flat(by_name, count)
            except RuntimeError as error:
                logger.info("vmap cannot run this model (%s); the reference engine loops over samples", error)
                self._vectorised = False
        looped = [grad(loss_of_one)(parameters, _row(rows, i)) for i in range(count)]
        return torch.stack([self._flat({n: g.unsqueeze(0) for n, g in one.items()}, 1)[0] for one in looped])

    def _flat(self, by_name: dict[str, Tensor], count: int) -> Tensor:
        wide = torch.float32
        for value in by_name.values():
            wide = torch.promote_types(wide, value.dtype)
        return torch.cat([by_name[slot.name].reshape(count, -1).to(wide) for slot in self._layout], dim=1)


def _call_with(model: nn.Module, values: dict[str, Tensor]) -> Callable[..., Any]:
    first_name = {id(p): name for name, p in model.named_parameters()}
    names = {place: first_name[id(p)] for place, p in places(model).items() if first_name[id(p)] in values}

    def call(*args: Any, **kwargs: Any) -> Any:
        return call_with(model, {place: values[name] for place, name in names.items()}, args, kwargs)

    return call


def _row(rows: Rows, index: int) -> Rows:
    return pytree.tree_map_only(Tensor, lambda leaf: leaf[index], rows)
