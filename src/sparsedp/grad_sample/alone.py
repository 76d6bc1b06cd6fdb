"""Single rows with nothing beside them: the gradient that a row must have in any company, and how exact it can be."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import numpy as np
import torch
from torch import Tensor, nn

from sparsedp.batch import MicroBatch, PerSampleLoss, select_rows
from sparsedp.grad_sample.chances import Chances
from sparsedp.grad_sample.rowwise import RowByRow
from sparsedp.parameters import Layout

TOLERANCES = {torch.float64: 1e-6, torch.float32: 1e-3, torch.float16: 2e-2, torch.bfloat16: 0.15}
"""Relative difference between a row alone and in company that rounding in a dtype explains."""
JITTER = 4
"""How many units of rounding parameters are moved by, to see what rounding does to a row's gradient."""


class RowsAlone:
    """Gradients of single rows by plain autograd, on the model as it stands. Private.

    The global generators are put back afterwards, so that looking changes no seeded run.
    """

    def __init__(self, model: nn.Module, loss: PerSampleLoss) -> None:
        self._model = model
        self._loss = loss
        self._layout = Layout.of(model)
        self._row_by_row = RowByRow(model, loss, self._layout)
        self._chances = Chances(model, loss)

    @property
    def layout(self) -> Layout:
        """The flat coordinates of the model's trainable parameters."""
        return self._layout

    @property
    def tolerance(self) -> float:
        """For the coarsest dtype of the trainable parameters."""
        return max(tolerance(p.dtype) for p in self._layout.parameters(self._model))

    def gradient(self, row: MicroBatch) -> Tensor:
        """The d-vector of one row, under the random numbers it has in company."""
        with generators_put_back(self._device):
            return self._row_by_row.gradients(row.rows, self._chances.of(row.rows), row.chance)[0]

    def jittered(self, row: MicroBatch) -> list[Tensor]:
        """The row's gradient with every parameter moved by a few units of rounding, up and down; [] if that fails.

        What this does to a gradient (logits that nearly cancel, a unit at its kink), rounding may do as well. It is
        the model itself that is moved and put back: a loss may treat whatever stands in for it in another way.
        """
        found = []
        for stretch in (1, 2, 3):
            with _moved(self._layout.parameters(self._model), stretch), suppress(Exception):
                found.append(self.gradient(row))
        return found

    @property
    def _device(self) -> torch.device:
        return self._layout.parameters(self._model)[0].device


def single_row(rows: MicroBatch, place: int) -> MicroBatch:
    """One row of a batch, with its own random numbers; a unit by itself."""
    span = slice(place, place + 1)
    return MicroBatch(
        select_rows(rows.rows, span), chance=None if rows.chance is None else rows.chance.part(span)
    )


def tolerance(dtype: torch.dtype) -> float:
    """The tolerance of a dtype; float32's for those not in the table."""
    return TOLERANCES.get(dtype, TOLERANCES[torch.float32])


def distances(one: Tensor, other: Tensor) -> Tensor:
    """How far apart vectors are, along the last axis: zero where both are not finite, infinite where just one is."""
    broken = ~one.isfinite().all(-1), ~other.isfinite().all(-1)
    apart = torch.linalg.vector_norm(one.double() - other.double(), dim=-1)
    apart = torch.where(broken[0] | broken[1], torch.inf, apart)
    return torch.where(broken[0] & broken[1], 0.0, apart)


@contextmanager
def generators_put_back(device: torch.device) -> Iterator[None]:
    """Leave the global generators of torch, NumPy and Python as they were found."""
    python, numpy = random.getstate(), np.random.get_state()  # noqa: NPY002
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        try:
            yield
        finally:
            random.setstate(python)
            np.random.set_state(numpy)  # noqa: NPY002


@contextmanager
def _moved(parameters: list[nn.Parameter], stretch: int) -> Iterator[None]:
    """Inside, every value is a few units of rounding up or down; afterwards, to the bit, what it was.

    Written through `data`, which counts as no new version: nothing has changed in the end.
    """
    before = [p.detach().clone() for p in parameters]
    try:
        for p, values in zip(parameters, before, strict=True):
            p.data.copy_(_move(values, stretch))
        yield
    finally:
        for p, values in zip(parameters, before, strict=True):
            p.data.copy_(values)


def _move(values: Tensor, stretch: int) -> Tensor:
    """Every value up or down by a few units of rounding, in a pattern of stripes."""
    places = torch.arange(values.numel(), device=values.device) // stretch % 2
    signs = (2 * places - 1).reshape(values.shape).to(values)
    return values * (1 + JITTER * torch.finfo(values.dtype).eps * signs)
