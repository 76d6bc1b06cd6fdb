"""A row that is not finite, or overflows, reaches no other, even where an operation's own backward sees all rows."""

from __future__ import annotations

import logging
from collections.abc import Callable

import pytest
import torch
from gradient_cases import loss
from structure_cases import By
from torch import Tensor, nn

from sparsedp.batch import MicroBatch
from sparsedp.clipping import FlatClip
from sparsedp.grad_sample import BookKeepingEngine, ClippedSumQuery
from sparsedp.parameters import Support

CLIP, WIDTH = 0.1, 6
Loss = Callable[[Callable[[Tensor], Tensor], tuple[Tensor, Tensor]], Tensor]


def with_the_gradients_length(model: Callable[[Tensor], Tensor], rows: tuple[Tensor, Tensor]) -> Tensor:
    inputs = rows[0].clone().requires_grad_()
    with torch.enable_grad():
        losses = loss(model, (inputs, rows[1]))
        (found,) = torch.autograd.grad(losses.sum(), inputs, create_graph=True)
    return losses + found.flatten(1).square().sum(1)


def heads(m: nn.Module, x: Tensor) -> Tensor:
    return torch.baddbmm(m.shift, x.view(-1, 2, 3).transpose(0, 1), m.weight).mean(0)


def parameter(*shape: int) -> Tensor:
    return 0.5 + torch.rand(shape)


MODELS: dict[str, tuple[Callable[[], nn.Module], Loss]] = {
    "cdist": (
        lambda: By(
            lambda m, x: m.out(torch.cdist(x, m.c).neg().exp()), c=parameter(8, 6), out=nn.Linear(8, 4)
        ),
        loss,
    ),
    "pow": (lambda: By(lambda m, x: x.abs().pow(m.power), power=parameter(6)), loss),
    "baddbmm": (lambda: By(heads, weight=parameter(2, 3, 4), shift=parameter(2, 1, 4)), loss),
    "lerp": (lambda: By(lambda m, x: torch.lerp(x, x.tanh(), m.share), share=parameter(6)), loss),
    "atan2": (lambda: By(lambda m, x: torch.atan2(x, m.other), other=parameter(6)), loss),
    "a layer norm's gradient": (
        lambda: nn.Sequential(nn.Linear(6, 8), nn.LayerNorm(8), nn.Linear(8, 3)),
        with_the_gradients_length,
    ),
    "a convolution's gradient": (
        lambda: nn.Sequential(nn.Unflatten(1, (2, 3)), nn.Conv1d(2, 4, 3, padding=1), nn.Tanh()),
        with_the_gradients_length,
    ),
}


def table(poison: float | None = None, place: int = 3) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    inputs, targets = torch.randn(12, WIDTH, generator=generator), torch.linspace(0.2, 2.0, 12)
    if poison is not None:
        inputs[place] = poison
    return inputs, targets


def without(rows: tuple[Tensor, Tensor], place: int) -> tuple[Tensor, Tensor]:
    kept = torch.arange(len(rows[0])) != place
    return rows[0][kept], rows[1][kept]


def summed(name: str, rows: tuple[Tensor, Tensor]) -> tuple[Tensor, BookKeepingEngine]:
    torch.manual_seed(0)
    build, its_loss = MODELS[name]
    engine = BookKeepingEngine(build(), its_loss)
    query = ClippedSumQuery(Support.full(engine.layout.dimension), FlatClip(CLIP))
    return engine.clipped_sum([MicroBatch(rows)], query), engine


@pytest.mark.parametrize("poison", [torch.nan, torch.inf, 1e30, 1e38])
@pytest.mark.parametrize("name", MODELS)
def test_one_such_row_silences_no_other(name, poison):
    rows = table(poison)
    found, _ = summed(name, rows)
    expected, _ = summed(name, without(rows, 3))
    assert float(expected.norm()) > 3 * CLIP
    assert float((found - expected).norm()) <= (CLIP if poison < torch.inf else 1e-5)


@pytest.mark.parametrize("place", [0, 3], ids=["first", "later"])
def test_nothing_is_said_of_it_and_the_fast_engine_stays(place, caplog):
    notes = {}
    for poison in (None, torch.nan):
        with caplog.at_level(logging.WARNING, "sparsedp"):
            _, engine = summed("cdist", table(poison, place))
        notes[poison] = engine.notes, tuple(record.message for record in caplog.records)
        caplog.clear()
        assert not engine.falls_back
    assert notes[None] == notes[torch.nan]
