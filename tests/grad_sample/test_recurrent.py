"""Recurrent layers on the fast path: what it needs to know of packed rows, and what it leaves behind."""

from __future__ import annotations

import copy
import gc

import numpy as np
import pytest
import torch
from gradient_cases import loss
from gradient_oracle import clipped_sum, median_norm, plain_loop
from structure_cases import By
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

from sparsedp.batch import MicroBatch
from sparsedp.core.clip import FlatClip
from sparsedp.grad_sample import ENGINES, BookkeepingEngine, Query
from sparsedp.grad_sample.recurrent.follow import followed_recurrence
from sparsedp.parameters import Support
from sparsedp.randomness import Chance, SeededRandomness

CELLS = {
    "lstm": (nn.LSTM, {}),
    "gru": (nn.GRU, {}),
    "rnn": (nn.RNN, {}),
    "relu": (nn.RNN, {"nonlinearity": "relu"}),
}
LENGTHS = torch.tensor([2, 4, 1, 4, 3])


def cell(kind: str, **kwargs) -> nn.RNNBase:
    torch.manual_seed(0)
    layer, more = CELLS[kind]
    return layer(3, 4, num_layers=2, bidirectional=True, batch_first=True, **more, **kwargs).double()


def rows(*shape: int) -> tuple[Tensor, Tensor]:
    torch.manual_seed(1)
    return torch.randn(5, *shape, dtype=torch.float64), torch.linspace(0.2, 2.0, 5).double()


def assert_sum_is_right(model: nn.Module, batch: tuple[Tensor, Tensor], loss=loss) -> BookkeepingEngine:
    gradients = plain_loop(model, loss, batch)
    engine = BookkeepingEngine(model, loss)
    query = Query(Support.full(engine.layout.dimension), FlatClip(median_norm(gradients)))
    found = engine.clipped_sum([MicroBatch(batch)], query)
    np.testing.assert_allclose(found.numpy(), clipped_sum(gradients, query.clip.norm), atol=1e-9)
    return engine


@pytest.mark.parametrize("kind", CELLS)
@pytest.mark.parametrize("packs", [False, True], ids=["padded", "packed"])
def test_outputs_states_and_gradients_are_pytorchs_own(kind, packs):
    """The same numbers in and out, for a sum of everything a layer gives out."""
    ours, theirs = cell(kind), copy.deepcopy(cell(kind))
    x = rows(4, 3)[0]
    start = torch.randn(4, 5, 4, dtype=torch.float64)
    results = []
    for model in (ours, theirs):
        given, first = x.clone().requires_grad_(), start.clone().requires_grad_()
        states = (first, first * 2) if kind == "lstm" else first

        def run(model=model, given=given, states=states) -> list[Tensor]:
            if packs:
                packed = pack_padded_sequence(given, LENGTHS, batch_first=True, enforce_sorted=False)
                outputs, last = model(packed, states)
                padded, lengths = pad_packed_sequence(outputs, batch_first=True, padding_value=0.5)
                assert torch.equal(lengths, LENGTHS)
                return [padded, *(last if isinstance(last, tuple) else (last,))]
            outputs, last = model(given, states)
            return [outputs, *(last if isinstance(last, tuple) else (last,))]

        if model is ours:
            with followed_recurrence(model.modules()):
                found = run()
        else:
            found = run()
        total = sum((part * torch.arange(part.numel()).view(part.shape).sin()).sum() for part in found)
        results.append([*found, *torch.autograd.grad(total, [given, first])])
    for mine, expected in zip(*results, strict=True):
        torch.testing.assert_close(mine, expected, rtol=1e-12, atol=1e-12)


def test_rows_that_a_model_sorts_itself_go_through_the_reference_engine():
    """Packed in order of their lengths, it cannot be told whose they are."""

    def forward(m: nn.Module, x: Tensor) -> Tensor:
        lengths = 1 + (x[:, 0, 0] > 0).long() + (x[:, 1, 1] > 0)
        order = lengths.argsort(descending=True, stable=True)
        states = m.cell(pack_padded_sequence(x[order], lengths[order], batch_first=True))[1]
        return states.transpose(0, 1)[order.argsort()].flatten(1)

    engine = assert_sum_is_right(By(forward, cell=cell("gru")), rows(3, 3))
    assert "enforce_sorted=True" in engine.notes[0]


def test_a_packed_layer_inside_a_subclass_is_right():
    class Sorting(nn.GRU):
        def forward(self, x: Tensor) -> Tensor:
            lengths = 1 + (x[:, 0, 0] > 0).long() + (x[:, 1, 1] > 0)
            packed = pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)
            return super().forward(packed)[1].transpose(0, 1)

    torch.manual_seed(0)
    assert_sum_is_right(Sorting(3, 4).double(), rows(3, 3))


@pytest.mark.parametrize("packs", [False, True], ids=["padded", "packed"])
def test_dropout_between_layers_is_the_same_in_both_engines(packs):
    def forward(m: nn.Module, x: Tensor) -> Tensor:
        lengths = 1 + (x[:, 0, 0] > 0).long() + (x[:, 1, 1] > 0)
        given = pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False) if packs else x
        return m.cell(given)[1].transpose(0, 1)

    model = By(forward, cell=cell("gru", dropout=0.5))
    chance = Chance(SeededRandomness(0).secret((0,)), torch.arange(5))
    query = Query(Support.full(sum(p.numel() for p in model.parameters())), FlatClip(0.5))
    batch = rows(3, 3)
    batch[0][0] = 1.0  # three steps: what packed rows draw is then seen to depend on their lengths
    fast, plain = (
        make(model, loss).clipped_sum([MicroBatch(batch, chance=chance)], query)
        for make in (BookkeepingEngine, ENGINES["reference"])
    )
    assert float(fast.norm()) > 0
    torch.testing.assert_close(fast, plain, rtol=0, atol=1e-9)


@pytest.mark.parametrize("kind", CELLS)
def test_a_gradient_inside_the_loss_goes_through_the_reference_engine(kind):
    """What this engine leaves in the graph has a gradient, but no gradient of it."""

    def steep(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        x = batch[0].clone().requires_grad_()
        with torch.enable_grad():
            losses = loss(model, (x, batch[1]))
            (slope,) = torch.autograd.grad(losses.sum(), x, create_graph=True)
        return losses + 10 * slope.flatten(1).square().sum(1)

    torch.manual_seed(0)
    layer, more = CELLS[kind]
    model = By(lambda m, x: m.cell(x)[0][:, -1], cell=layer(3, 4, batch_first=True, **more).double())
    engine = assert_sum_is_right(model, rows(2, 3), steep)
    assert engine.gave_way
    assert "a gradient is taken inside the loss through a recurrent layer" in engine.notes[0]


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
    engine = BookkeepingEngine(model, loss)
    query = Query(Support.full(engine.layout.dimension), FlatClip(median_norm(gradients)))
    found = engine.clipped_sum([MicroBatch(batch)], query).numpy()
    assert np.linalg.norm(found - clipped_sum(gradients, query.clip.norm)) <= 0.03 * query.clip.norm * 5


def test_nothing_of_a_chunk_outlives_it():
    """A node that held what it gave out would keep itself alive, and all of its sequence with it."""
    model = cell("lstm")
    batch = rows(3, 3)
    engine = BookkeepingEngine(By(lambda m, x: m.cell(x)[0], cell=model), loss)
    query = Query(Support.full(engine.layout.dimension), FlatClip(1.0))

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
