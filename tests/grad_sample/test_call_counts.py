"""A convolution called once in one chunk and twice in the next: its gradients come in two orders, and add up."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from gradient_cases import GEOMETRIES, loss, supports
from gradient_oracle import clipped_sum, measured, median_norm, plain_loop
from structure_cases import By
from torch import Tensor, nn

from sparsedp.batch import MicroBatch
from sparsedp.core.clip import FlatClip
from sparsedp.grad_sample import BookkeepingEngine, Query

WIDE = 20
"""Channels enough for one product per kernel offset."""


def again_where_long(m: nn.Module, x: Tensor) -> Tensor:
    hidden = torch.tanh(m.conv(x))
    while hidden.shape[-1] > 4:
        hidden = F.avg_pool1d(hidden, 2)
        hidden = hidden + torch.tanh(m.conv(hidden))
    return m.out(hidden.mean(-1))


def again_where_asked(m: nn.Module, x: Tensor) -> Tensor:
    hidden, again = torch.tanh(m.conv(x)), (x[:, 0, 0] > 0).view(-1, 1, 1)
    if bool(again.any()):
        hidden = torch.where(again, torch.tanh(m.conv(hidden)), hidden)
    return m.out(hidden.mean(-1))


def rows(length: int, asks: float) -> tuple[Tensor, Tensor]:
    inputs = torch.randn(4, WIDE, length, generator=torch.Generator().manual_seed(length))
    inputs[:, 0, 0] = asks * inputs[:, 0, 0].abs()
    return inputs.double(), torch.linspace(0.2, 2.0, 4).double()


BATCHES = {
    again_where_long: [rows(4, 1.0), rows(8, 1.0)],
    again_where_asked: [rows(4, -1.0), rows(4, 1.0)],
}


@pytest.mark.parametrize("support", ["full", "random", "rows"])
@pytest.mark.parametrize("geometry", sorted(GEOMETRIES))
@pytest.mark.parametrize("order", [1, -1], ids=["once then twice", "twice then once"])
@pytest.mark.parametrize("forward", BATCHES, ids=["longer rows", "rows that ask"])
def test_the_sum_is_that_of_a_plain_loop(forward, order, geometry, support):
    torch.manual_seed(0)
    model = By(forward, conv=nn.Conv1d(WIDE, WIDE, 3, padding=1), out=nn.Linear(WIDE, 3)).double()
    batches = BATCHES[forward][::order]
    engine = BookkeepingEngine(model, loss)
    chosen = supports(engine.layout)[support]
    gradients = np.concatenate([plain_loop(model, loss, part) for part in batches])
    measure = GEOMETRIES[geometry](np.abs(gradients).mean(0), chosen)
    centre, scale = (0.0, 1.0) if geometry == "identity" else (measure.centre.numpy(), measure.scale.numpy())
    z = measured(gradients, chosen.indices.numpy(), centre, scale)
    query = Query(chosen, FlatClip(median_norm(z)), measure)
    for _ in range(2):
        found = engine.clipped_sum([MicroBatch(part) for part in batches], query)
        np.testing.assert_allclose(found.numpy(), clipped_sum(z, query.clip.norm), rtol=1e-7, atol=1e-9)
    assert engine.notes == ()
