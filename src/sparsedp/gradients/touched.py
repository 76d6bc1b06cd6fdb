"""Which rows of embedding tables each sample touches: private, and looked at by the mechanism alone."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, final

import torch
from torch import Tensor, nn

from sparsedp.core.batch import MicroBatch, PerSampleLoss, Rows, row_count, select_rows, to_device
from sparsedp.core.errors import ModelError

Table = nn.Embedding | nn.EmbeddingBag
Pairs = tuple[Tensor, Tensor]
"""Samples or units, and the rows they touch, numbered through the tables; a pair may come several times."""


@final
class TouchedRows:
    """Runs a model's forward pass and notes what its embedding layers are asked for.

    Args:
        model: as it is trained.
        loss: calls it.
        tables: names of the tables' weights; their rows are numbered through in this order.
    """

    def __init__(self, model: nn.Module, loss: PerSampleLoss, tables: Sequence[str]) -> None:
        self._model, self._loss = model, loss
        weights = dict(model.named_parameters(remove_duplicate=False))
        firsts, before = {}, 0
        for name in tables:
            firsts[id(weights[name])] = before
            before += weights[name].shape[0]
        self._layers = [
            (module, firsts[id(module.weight)])
            for module in model.modules()
            if isinstance(module, Table) and id(module.weight) in firsts
        ]
        self._device = next(model.parameters()).device

    def __call__(self, batch: MicroBatch) -> Pairs:
        """The pairs of unit and row of a batch, as for `pairs`."""
        samples, touched = self.pairs(batch.rows)
        return samples if batch.units is None else batch.units.cpu()[samples], touched

    def pairs(self, rows: Rows) -> Pairs:
        """The pairs of sample and row of some rows. Padding is not counted.

        Raises:
            ModelError: a layer was asked for something else than one list of rows for each sample.
        """
        count = row_count(rows)
        with self._noting(count) as noted, torch.no_grad():
            self._loss(self._model, to_device(rows, self._device))
        nothing = torch.empty(0, dtype=torch.int64)
        samples = [nothing, *(owners for owners, _ in noted)]
        return torch.cat(samples), torch.cat([nothing, *(touched for _, touched in noted)])

    def check(self, rows: Rows) -> None:
        """See for some rows that what is taken for a sample's own is what it touches alone.

        Raises:
            ModelError: it is not, as where a layer is given positions first and samples second.
        """
        owners, touched = self.pairs(rows)
        for place in range(row_count(rows)):
            alone = self.pairs(select_rows(rows, slice(place, place + 1)))[1]
            if set(alone.tolist()) != set(touched[owners == place].tolist()):
                raise ModelError(
                    "an embedding layer's input does not have the samples on its first axis, so the rows a sample "
                    "touches cannot be told; put the batch first, or choose another method"
                )

    @contextmanager
    def _noting(self, count: int) -> Iterator[list[Pairs]]:
        noted: list[Pairs] = []

        def note(first: int, module: Table, given: tuple[Any, ...], named: dict[str, Any]) -> None:
            noted.append(_pairs(module, given[0] if given else named["input"], first, count))

        handles = [
            module.register_forward_pre_hook(
                lambda module, given, named, first=first: note(first, module, given, named), with_kwargs=True
            )
            for module, first in self._layers
        ]
        try:
            yield noted
        finally:
            for handle in handles:
                handle.remove()


def _pairs(module: Table, asked: Tensor, first: int, count: int) -> Pairs:
    flat_bag = isinstance(module, nn.EmbeddingBag) and asked.dim() == 1
    if asked.dim() == 0 or asked.shape[0] != count or flat_bag:
        raise ModelError(
            f"{type(module).__name__}: got indices of shape {tuple(asked.shape)} for {count} samples, expected "
            "[samples, ...]: the rows a sample touches cannot be told"
        )
    indices = asked.detach().to("cpu", torch.int64).reshape(count, -1)
    owners = torch.arange(count).unsqueeze(1).expand_as(indices)
    kept = torch.ones_like(indices, dtype=torch.bool)
    if module.padding_idx is not None:
        kept = indices != module.padding_idx
    return owners[kept], indices[kept] + first
