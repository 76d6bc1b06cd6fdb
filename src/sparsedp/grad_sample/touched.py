"""Which rows of embedding tables each sample touches: private, and looked at by the mechanism alone."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, final

import torch
from torch import Tensor, nn

from sparsedp.batch import MicroBatch, PerSampleLoss, Rows, row_count, select_rows, to_device
from sparsedp.errors import DataError, ModelError
from sparsedp.grad_sample.chances import Chances
from sparsedp.grad_sample.keyed import drawing, keyed_draws
from sparsedp.randomness import SEED_BYTES, Chance, StepSecret

Table = nn.Embedding | nn.EmbeddingBag
Pairs = tuple[Tensor, Tensor]
"""Samples or units, and the rows they touch, numbered through the tables; a pair may come several times."""
_Noted = tuple[int, Tensor, Tensor]
"""The first row of a table, and pairs of sample and row."""
_STRIDE = 97
"""By which the samples that are looked at alone move from batch to batch."""


@final
class TouchedRows:
    """Runs a model's forward pass and notes what its embedding layers are asked for.

    Args:
        model: as it is trained.
        loss: calls it.
        tables: names of the tables' weights; their rows are numbered through in this order.

    Raises:
        ModelError: a table's layer is not a plain one.
    """

    def __init__(self, model: nn.Module, loss: PerSampleLoss, tables: Sequence[str]) -> None:
        self._model, self._loss = model, loss
        self._chances = Chances(model, loss)
        self._seen = 0
        weights = dict(model.named_parameters(remove_duplicate=False))
        firsts, before = {}, 0
        for name in tables:
            firsts[id(weights[name])] = before
            before += weights[name].shape[0]
        self._tables = {before: name for name, before in zip(tables, firsts.values(), strict=True)}
        self._layers = [
            (module, firsts[id(module.weight)])
            for module in model.modules()
            if isinstance(module, Table) and id(module.weight) in firsts
        ]
        for module, first in self._layers:
            _refuse_own_forward(module, self._tables[first])
        self._device = next(model.parameters()).device

    def __call__(self, batch: MicroBatch) -> Pairs:
        """The pairs of unit and row of a batch, as for `pairs`; some samples are looked at alone, too.

        **Privacy.** A unit's vector is bounded, so one unit moves the count by no more than its bound only if it does
        not change what others touch.

        Raises:
            ModelError: a sample touches other rows alone than in company.
        """
        samples, touched = self.pairs(batch.rows, batch.chance)
        for place in self._next_places(batch.row_count):
            self._compare(batch.rows, batch.chance, place, touched[samples == place])
        return samples if batch.units is None else batch.units.cpu()[samples], touched

    def pairs(self, rows: Rows, chance: Chance | None = None) -> Pairs:
        """The pairs of sample and row of some rows. Padding is not counted.

        Raises:
            ModelError: a layer was asked for something else than one list of rows for each sample.
            DataError: a row was asked for that a table does not have.
        """
        return _joined(self._noted(rows, chance))

    def check(self, rows: Rows) -> None:
        """See for some rows that what is taken for a sample's own is what it touches alone.

        Raises:
            ModelError: it is not, as where a layer is given positions first and samples second; or a table is used in
                a way that cannot be seen.
        """
        chance = Chance(StepSecret(bytes(SEED_BYTES)), torch.arange(row_count(rows)))
        noted = self._noted(rows, chance)
        asked = {first for first, _, _ in noted}
        for first, name in self._tables.items():
            if first not in asked:
                raise ModelError(
                    f"the rows of {name} cannot be counted: no nn.Embedding or nn.EmbeddingBag that holds it was "
                    "called. Call the layer, not a function on its weight, or name the table in always="
                )
        owners, touched = _joined(noted)
        for place in range(row_count(rows)):
            self._compare(rows, chance, place, touched[owners == place])

    def _next_places(self, count: int) -> set[int]:
        """Two samples of each batch, in every batch others."""
        self._seen += 1
        if count < 2:
            return set()
        first = self._seen * _STRIDE
        return {first % count, (first + count // 2) % count}

    def _compare(self, rows: Rows, chance: Chance | None, place: int, touched: Tensor) -> None:
        span = slice(place, place + 1)
        alone = self.pairs(select_rows(rows, span), None if chance is None else chance.part(span))[1]
        if set(alone.tolist()) != set(touched.tolist()):
            raise ModelError(
                "a sample asks an embedding layer for other rows alone than beside other samples, so the rows it "
                "touches cannot be told; put the samples on the first axis of the layer's input, keep them apart, or "
                "choose another method"
            )

    def _noted(self, rows: Rows, chance: Chance | None) -> list[_Noted]:
        """What the layers are asked for in one forward, under the random numbers of its rows."""
        draws = self._chances.of(rows)
        if draws is None:
            raise ModelError(
                "the rows a sample touches cannot be told: what the model draws is not a fixed sequence of random "
                "numbers for each sample; call model.eval(), or choose another method"
            )
        keyed = keyed_draws(draws, chance)
        with self._noting(row_count(rows)) as noted, torch.set_grad_enabled(bool(draws)), drawing(keyed):
            self._loss(self._model, to_device(rows, self._device))
        return noted

    @contextmanager
    def _noting(self, count: int) -> Iterator[list[_Noted]]:
        noted: list[_Noted] = []

        def note(first: int, module: Table, given: tuple[Any, ...], named: dict[str, Any]) -> None:
            asked = given[0] if given else named["input"]
            noted.append((first, *_pairs(module, asked, first, count, self._tables[first])))

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


def _refuse_own_forward(module: Table, name: str) -> None:
    """What such a layer looks up need not be what it is given: it may hash, remap, or ask for positions."""
    plain = nn.EmbeddingBag.forward if isinstance(module, nn.EmbeddingBag) else nn.Embedding.forward
    if getattr(module.forward, "__func__", None) is not plain:
        raise ModelError(
            f"the rows of {name} cannot be counted: {type(module).__name__} has a forward pass of its own, so what "
            "it is given need not be what it looks up. Do the same in a module around a plain nn.Embedding or "
            "nn.EmbeddingBag, or name the table in always="
        )


def _joined(noted: list[_Noted]) -> Pairs:
    """The pairs of all layers together."""
    nothing = torch.empty(0, dtype=torch.int64)
    samples = [nothing, *(owners for _, owners, _ in noted)]
    return torch.cat(samples), torch.cat([nothing, *(touched for _, _, touched in noted)])


def _pairs(module: Table, asked: Tensor, first: int, count: int, name: str) -> Pairs:
    flat_bag = isinstance(module, nn.EmbeddingBag) and asked.dim() == 1
    if asked.dim() == 0 or asked.shape[0] != count or flat_bag:
        raise ModelError(
            f"{type(module).__name__}: got indices of shape {tuple(asked.shape)} for {count} samples, expected "
            "[samples, ...]: the rows a sample touches cannot be told"
        )
    indices = asked.detach().to("cpu", torch.int64).reshape(count, -1)
    if indices.numel() and not (int(indices.min()) >= 0 and int(indices.max()) < module.num_embeddings):
        raise DataError(
            f"{name}: a record asks for a row that the table does not have, expected numbers from 0 to "
            f"{module.num_embeddings - 1}; give the table more rows, or map unknown ids to one of them"
        )
    owners = torch.arange(count).unsqueeze(1).expand_as(indices)
    kept = torch.ones_like(indices, dtype=torch.bool)
    if module.padding_idx is not None:
        kept = indices != module.padding_idx
    return owners[kept], indices[kept] + first
