"""A plain loop of `autograd.grad` over the rows, on the model as it stands: what every other way must agree with."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from sparsedp.batch import PerSampleLoss, Rows, check_losses, row_count, select_rows
from sparsedp.grad_sample.chances import Draw
from sparsedp.grad_sample.trace import Graph
from sparsedp.grad_sample.hooks import (
    custom_backward,
    refuse_inside_a_function,
    standing_hooks,
    tensor_hooks_noted,
)
from sparsedp.grad_sample.keyed import drawing, keyed_draws, named
from sparsedp.parameters import Layout
from sparsedp.randomness import SEED_BYTES, Chance, own_generators


class RowByRow:
    """Per-sample gradients of a model, one backward pass each.

    Hooks, custom backward functions, sparse gradients, checkpointing and gradients inside the loss all keep the
    meaning they have in ordinary training with batches of one row.
    """

    def __init__(self, model: nn.Module, loss: PerSampleLoss, layout: Layout) -> None:
        self._model = model
        self._loss = loss
        self._layout = layout
        self._examined = False
        self._owners = {
            name: part
            for name, part in model.named_modules()
            if any(p.requires_grad for p in part.parameters(recurse=False))
        }

    def why_needed(self, rows: Rows) -> str | None:
        """What only this loop gets right about the model, in words: hooks, or a backward of its own."""
        if (reason := standing_hooks(self._model)) is not None or self._examined:
            return reason
        self._examined = True
        device = self._layout.parameters(self._model)[0].device
        with own_generators(bytes(SEED_BYTES), device), torch.enable_grad(), tensor_hooks_noted() as noted:
            losses = check_losses(self._loss(self._model, select_rows(rows, slice(0, 1))), 1)
        if noted:
            return noted[0]
        if not losses.requires_grad:
            return None
        return custom_backward(Graph.of(losses).nodes, node_hooks=True)

    def gradients(self, rows: Rows, draws: tuple[Draw, ...] | None, chance: Chance | None) -> Tensor:
        """The [n, d] matrix of per-sample gradients, in float32 or wider, each under its own random numbers."""
        found = []
        with torch.enable_grad(), self._hidden_calls_refused():
            for i in range(row_count(rows)):
                span = slice(i, i + 1)
                with self.own_numbers(draws, None if chance is None else chance.part(span)):
                    found.append(self._one(select_rows(rows, span)))
        return found[0].unsqueeze(0) if len(found) == 1 else torch.stack(found)

    def own_numbers(
        self, draws: tuple[Draw, ...] | None, chance: Chance | None
    ) -> AbstractContextManager[object]:
        """Inside, a single row draws its own numbers."""
        if draws is not None:
            return drawing(keyed_draws(draws, chance))
        mine = named(chance)
        device = self._layout.parameters(self._model)[0].device
        return own_generators(mine.secret.seed(int(mine.rows[0])), device)

    def _one(self, row: Rows) -> Tensor:
        parameters = self._layout.parameters(self._model)
        losses = check_losses(self._loss(self._model, row), 1)
        found: list[Tensor | None] = [None] * len(parameters)
        if losses.requires_grad:
            found = list(torch.autograd.grad(losses.sum(), parameters, allow_unused=True))
        wide = torch.float32
        for parameter in parameters:
            wide = torch.promote_types(wide, parameter.dtype)
        parts = [
            torch.zeros_like(p) if g is None else g.to_dense() if g.is_sparse else g
            for p, g in zip(parameters, found, strict=True)
        ]
        return torch.cat([part.detach().reshape(-1).to(wide) for part in parts])

    @contextmanager
    def _hidden_calls_refused(self) -> Iterator[None]:
        handles = [part.register_forward_hook(_refuse(name)) for name, part in self._owners.items()]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()


def _refuse(name: str) -> Callable[..., None]:
    def hook(module: nn.Module, args: Any, output: Any) -> None:
        refuse_inside_a_function(name)

    return hook
