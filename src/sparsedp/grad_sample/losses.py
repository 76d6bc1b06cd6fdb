"""The loss of every example alone, without its gradient: what a private training loss is summed from."""

from __future__ import annotations

from hashlib import blake2b

import torch
from torch import Tensor, nn

from sparsedp.batch import Batch, LossFunction, MicroBatch, slice_batch, to_device, validate_losses
from sparsedp.grad_sample.isolation import (
    fixed_draws,
    fork_draws,
    isolated_losses,
    modes_of,
    why_not_isolated,
)
from sparsedp.randomness import SEED_BYTES

AT_ONCE = 32
"""Examples whose losses are computed together."""


class ExampleLosses:
    """Computes the losses of a micro-batch, [n]: vectorised, or in a loop where PyTorch cannot. Private.

    Formal guarantees: the loss of an example is a function of the example, the parameters and the random numbers
    drawn for it, which are not those of its gradient: in chunks of another size, those would be another example's.
    """

    def __init__(self, model: nn.Module, loss: LossFunction) -> None:
        self._model, self._loss = model, loss
        self._in_turn: dict[tuple[bool, ...], bool] = {}

    def __call__(self, batch: MicroBatch) -> Tensor:
        device = next(self._model.parameters()).device
        key, count = batch.seed, batch.example_count
        seed = None if key is None else blake2b(b"losses", key=key, digest_size=SEED_BYTES).digest()
        # With gradients, as in a step: without, some of PyTorch's layers run kernels that cannot be vectorised.
        with fork_draws(seed, device), torch.enable_grad():
            rows = to_device(batch.rows, device)
            if (modes := modes_of(self._model)) not in self._in_turn:
                self._in_turn[modes] = why_not_isolated(self._model, self._loss, rows) is not None
            size = 1 if self._in_turn[modes] else AT_ONCE
            parts = (slice_batch(rows, slice(i, min(i + size, count))) for i in range(0, count, size))
            return torch.cat([self._of(part, alone=size == 1).detach() for part in parts])

    def _of(self, rows: Batch, *, alone: bool) -> Tensor:
        if not alone:
            return isolated_losses(self._model, self._loss, rows)
        with fixed_draws(next(self._model.parameters()).device):
            return validate_losses(self._loss(self._model, rows), 1)
