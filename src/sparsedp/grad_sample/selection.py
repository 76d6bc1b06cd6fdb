"""Which rows of embedding tables each example looks up: private, and asked for by the mechanism alone."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any, final

import torch
from torch import Tensor, nn

from sparsedp.batch import Batch, LossFunction, MicroBatch, to_device
from sparsedp.errors import DataError, ModelError
from sparsedp.grad_sample.isolation import Isolated, fixed_draws, fork_draws, isolated, singles

Table = nn.Embedding | nn.EmbeddingBag
Pairs = tuple[Tensor, Tensor]
"""Examples or units, and the rows they look up, numbered through the tables; a pair may come several times."""
_LookUps = list[tuple[Table, int, Tensor]]
"""Layers in the order of calls, the first example of each call, and what it was asked for: [examples, ...]."""


@final
class EmbeddingRowCounter:
    """Runs a model's forward pass, one example at a time, and notes what its embedding layers are asked for.

    Rows are numbered through, in the order of `tables`, the names of the tables' weights.

    Formal guarantees: what is noted for an example is a function of the example, the parameters and the random
    numbers drawn for it (`isolation`), so leaving a unit out takes away its own pairs and no others.
    """

    def __init__(self, model: nn.Module, loss: LossFunction, tables: Sequence[str]) -> None:
        self._model, self._loss = model, loss
        self._isolated = Isolated(model, loss)
        weights = dict(model.named_parameters(remove_duplicate=False))
        self._names = {id(weights[name]): name for name in tables}
        ends = itertools.accumulate((len(weights[name]) for name in tables), initial=0)
        self._firsts = dict(zip((id(weights[name]) for name in tables), ends, strict=False))
        parts = (part for part in model.modules() if isinstance(part, Table))
        self._layers = [part for part in parts if id(part.weight) in self._names]
        for layer in self._layers:
            _refuse_own_forward(layer, self._names[id(layer.weight)])
        self._device = next(model.parameters()).device

    def __call__(self, batch: MicroBatch) -> Pairs:
        """The pairs of unit and row of a batch."""
        examples, rows = self.pairs(batch.rows, batch.seed)
        return examples if batch.units is None else batch.units.cpu()[examples], rows

    def pairs(self, rows: Batch, seed: bytes | None = None) -> Pairs:
        """The pairs of example and row of some examples. Padding is not counted."""
        examples, touched = [torch.empty(0, dtype=torch.int64)], [torch.empty(0, dtype=torch.int64)]
        for layer, first, asked in self._looked_up(rows, seed):
            indices = asked.detach().to("cpu", torch.int64).reshape(len(asked), -1)
            kept = torch.ones_like(indices, dtype=torch.bool)
            if layer.padding_idx is not None:
                kept = indices != layer.padding_idx
            owners = torch.arange(first, first + len(asked)).unsqueeze(1).expand_as(indices)
            examples.append(owners[kept])
            touched.append(indices[kept] + self._firsts[id(layer.weight)])
        return torch.cat(examples), torch.cat(touched)

    def check(self, rows: Batch) -> None:
        """Refuse a model in which a table is not used by a layer that holds it."""
        asked = {id(layer.weight) for layer, _, _ in self._looked_up(rows, None)}
        for table, name in self._names.items():
            if table not in asked:
                raise ModelError(
                    f"the rows of {name} cannot be counted: no nn.Embedding or nn.EmbeddingBag that holds it was "
                    "called. Call the layer, not a function on its weight, or name the table in always="
                )

    def _looked_up(self, rows: Batch, seed: bytes | None) -> _LookUps:
        rows = to_device(rows, self._device)
        in_turn = self._isolated.in_turn(rows)
        try:
            with fork_draws(seed, self._device), torch.no_grad():
                if not in_turn:
                    return self._all_at_once(rows)
                return [
                    (layer, i, asked.unsqueeze(0))
                    for i, one in enumerate(singles(rows))
                    for layer, asked in self._of_one(one)
                ]
        except IndexError:
            sizes = ", ".join(
                f"{self._names[id(x.weight)]}: 0 to {x.num_embeddings - 1}" for x in self._layers
            )
            raise DataError(
                f"a record asks for a row that an embedding table does not have, expected numbers in {sizes}; give "
                "the table more rows, or map unknown ids to one of them"
            ) from None

    def _all_at_once(self, rows: Batch) -> _LookUps:
        layers: list[Table] = []

        def asked(one: Batch) -> list[Tensor]:
            found = self._of_one(one)
            layers[:] = [layer for layer, _ in found]
            return [indices for _, indices in found]

        found = isolated(self._model, asked, rows)
        return [(layer, 0, indices) for layer, indices in zip(layers, found, strict=True)]

    def _of_one(self, one: Batch) -> list[tuple[Table, Tensor]]:
        found: list[tuple[Table, Tensor]] = []

        def note(layer: nn.Module, given: tuple[Any, ...], named: dict[str, Any]) -> None:
            assert isinstance(layer, Table)
            found.append((layer, given[0] if given else named["input"]))

        handles = [layer.register_forward_pre_hook(note, with_kwargs=True) for layer in self._layers]
        try:
            with fixed_draws(self._device):
                self._loss(self._model, one)
        finally:
            for handle in handles:
                handle.remove()
        return found


def _refuse_own_forward(module: Table, name: str) -> None:
    """What such a layer looks up need not be what it is given: it may hash, remap, or ask for positions."""
    plain = nn.EmbeddingBag.forward if isinstance(module, nn.EmbeddingBag) else nn.Embedding.forward
    if getattr(module.forward, "__func__", None) is not plain:
        raise ModelError(
            f"the rows of {name} cannot be counted: {type(module).__name__} has a forward pass of its own, so what "
            "it is given need not be what it looks up. Do the same in a module around a plain nn.Embedding or "
            "nn.EmbeddingBag, or name the table in always="
        )
