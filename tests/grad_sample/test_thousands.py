"""Thousands of records that all pull the same way: one more moves the sum by at most C, in every dtype."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from sparsedp.batch import MicroBatch
from sparsedp.clipping import FlatClip
from sparsedp.grad_sample import BookKeepingEngine, ClippedSumQuery
from sparsedp.parameters import Support


class Gain(nn.Module):
    """No layer of the table."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.ones(50, dtype=dtype))

    def forward(self, x: Tensor) -> Tensor:
        return (x.to(self.gain.dtype) * self.gain).sum(1, keepdim=True)


def output_sum(model: nn.Module, rows: Tensor) -> Tensor:
    return model(rows).float().flatten(1).sum(1)


def moved(model: nn.Module, rows: Tensor, without: int) -> float:
    """How far one record moves the sum of all."""
    engine = BookKeepingEngine(model, output_sum)
    query = ClippedSumQuery(Support.full(engine.layout.dimension), FlatClip(1.0))
    others = torch.cat([rows[:without], rows[without + 1 :]])
    sums = [engine.clipped_sum([MicroBatch(x)], query) for x in (rows, others)]
    assert not engine.falls_back
    return float((sums[0] - sums[1]).norm())


def aligned(kind: str, count: int, shape: tuple[int, ...]) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    base = 20 * torch.rand(1, *shape, generator=generator) + 4
    if kind == "identical":
        return base.repeat(count, *[1] * len(shape))
    if kind == "nearly":
        return base + 0.2 * torch.rand(count, *shape, generator=generator)
    return (base + 6 * torch.rand(7, *shape, generator=generator))[torch.arange(count) % 7]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("kind", ["identical", "nearly", "periodic"])
def test_a_module_without_a_fast_path_in_half_precision(kind, dtype):
    rows = aligned(kind, 2000, (50,))
    assert all(moved(Gain(dtype), rows, without) <= 1 for without in (0, 1000, 1999))


@pytest.mark.parametrize("kind", ["identical", "nearly", "periodic"])
@pytest.mark.parametrize(
    ("layer", "shape"),
    [
        (nn.Linear(50, 1, bias=False), (50,)),
        (nn.Linear(600, 3, bias=False), (600,)),
        (nn.Linear(20, 20), (4, 20)),
        (nn.Conv2d(3, 8, 3), (3, 6, 6)),
        (nn.Conv2d(16, 4, 3), (16, 4, 4)),
        (nn.LayerNorm(30), (30,)),
    ],
    ids=["linear", "few outputs", "sequence", "convolution", "shifts", "norm"],
)
def test_layers_of_the_table_in_float32(layer, shape, kind):
    rows = aligned(kind, 4000, shape)
    assert all(moved(layer, rows, without) <= 1 for without in (0, 3999))


@pytest.mark.parametrize("value", [0.7, 1 / 3, 0.1234567])
@pytest.mark.parametrize("every", [2, 3, 10])
def test_one_record_in_a_wide_masked_layer(every, value):
    support = Support.from_mask(torch.arange(8192) % every < every - 1)
    engine = BookKeepingEngine(nn.Linear(8192, 1, bias=False), output_sum)
    total = engine.clipped_sum(
        [MicroBatch(torch.full((1, 8192), value))], ClippedSumQuery(support, FlatClip(1.0))
    )
    assert float(total.norm()) <= 1
