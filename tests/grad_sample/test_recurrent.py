"""Recurrent layers: the sum of a plain loop, whatever runs through them, and nothing left behind."""

from __future__ import annotations

import gc

import numpy as np
import pytest
import torch
from gradient_cases import loss
from gradient_oracle import clipped_sum, median_norm, plain_loop
from structure_cases import By
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence

from sparsedp.batch import MicroBatch
from sparsedp.clipping import FlatClip
from sparsedp.grad_sample import BookKeepingEngine, ClippedSumQuery
from sparsedp.parameters import Support

CELLS = {
    "lstm": (nn.LSTM, {}),
    "gru": (nn.GRU, {}),
    "rnn": (nn.RNN, {}),
    "relu": (nn.RNN, {"nonlinearity": "relu"}),
}


def cell(kind: str, **kwargs) -> nn.RNNBase:
    torch.manual_seed(0)
    layer, more = CELLS[kind]
    return layer(3, 4, num_layers=2, bidirectional=True, batch_first=True, **more, **kwargs).double()


def rows(*shape: int) -> tuple[Tensor, Tensor]:
    torch.manual_seed(1)
    return torch.randn(5, *shape, dtype=torch.float64), torch.linspace(0.2, 2.0, 5).double()


def assert_sum_is_right(model: nn.Module, batch: tuple[Tensor, Tensor], loss=loss) -> BookKeepingEngine:
    gradients = plain_loop(model, loss, batch)
    engine = BookKeepingEngine(model, loss)
    query = ClippedSumQuery(Support.full(engine.layout.dimension), FlatClip(median_norm(gradients)))
    found = engine.clipped_sum([MicroBatch(batch)], query)
    np.testing.assert_allclose(found.numpy(), clipped_sum(gradients, query.clip.norm), atol=1e-9)
    return engine


def test_a_packed_layer_inside_a_subclass_is_right():
    class Sorting(nn.GRU):
        def forward(self, x: Tensor) -> Tensor:
            lengths = 1 + (x[:, 0, 0] > 0).long() + (x[:, 1, 1] > 0)
            packed = pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)
            return super().forward(packed)[1].transpose(0, 1)

    torch.manual_seed(0)
    assert_sum_is_right(Sorting(3, 4).double(), rows(3, 3))


@pytest.mark.parametrize("kind", CELLS)
def test_a_gradient_inside_the_loss_gives_the_sum_of_a_plain_loop(kind):

    def steep(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        x = batch[0].clone().requires_grad_()
        with torch.enable_grad():
            losses = loss(model, (x, batch[1]))
            (slope,) = torch.autograd.grad(losses.sum(), x, create_graph=True)
        return losses + 10 * slope.flatten(1).square().sum(1)

    torch.manual_seed(0)
    layer, more = CELLS[kind]
    model = By(lambda m, x: m.cell(x)[0][:, -1], cell=layer(3, 4, batch_first=True, **more).double())
    assert_sum_is_right(model, rows(2, 3), steep)


def test_frozen_weights_and_a_frozen_layer_pass_gradients_on():
    def forward(m: nn.Module, x: Tensor) -> Tensor:
        return m.cell(m.body(x))[0] + m.other(m.body(x))[0]

    model = By(forward, body=nn.Linear(3, 3), cell=cell("lstm"), other=cell("gru")).double()
    model.other.requires_grad_(False)
    model.cell.weight_hh_l0.requires_grad_(False)
    assert assert_sum_is_right(model, rows(3, 3)).notes == ()


def test_half_precision_by_autocast_is_left_to_pytorch():
    def forward(m: nn.Module, x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return m.cell(x)[0].float()

    torch.manual_seed(0)
    model = By(forward, cell=nn.GRU(3, 4, batch_first=True))
    batch = tuple(part.float() for part in rows(3, 3))
    gradients = plain_loop(model, loss, batch)
    engine = BookKeepingEngine(model, loss)
    query = ClippedSumQuery(Support.full(engine.layout.dimension), FlatClip(median_norm(gradients)))
    found = engine.clipped_sum([MicroBatch(batch)], query).numpy()
    assert np.linalg.norm(found - clipped_sum(gradients, query.clip.norm)) <= 0.03 * query.clip.norm * 5


def test_nothing_of_a_chunk_outlives_it():
    """A node that held what it gave out would keep itself alive, and all of its sequence with it."""
    model = cell("lstm")
    batch = rows(3, 3)
    engine = BookKeepingEngine(By(lambda m, x: m.cell(x)[0], cell=model), loss)
    query = ClippedSumQuery(Support.full(engine.layout.dimension), FlatClip(1.0))

    def tensors_after_a_sum() -> int:
        engine.clipped_sum([MicroBatch(batch)], query)
        return sum(issubclass(type(held), Tensor) for held in gc.get_objects())

    gc.collect()
    gc.disable()
    try:
        first, *others = [tensors_after_a_sum() for _ in range(4)][1:]
    finally:
        gc.enable()
    assert others == [first, first]
