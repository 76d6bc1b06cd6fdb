"""A unit's rows as positions of one sum of outer products: right, not formed row by row, safe where they cancel."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from gradient_oracle import clipped_sum, measured, median_norm, plain_loop, unit_means
from torch import nn

from sparsedp.batch import MicroBatch
from sparsedp.clipping import FlatClip
from sparsedp.grad_sample import BookKeepingEngine, ClippedSumQuery
from sparsedp.grad_sample.linear import Outer, SequenceOuter
from sparsedp.grad_sample.sampler import UnitPlaces
from sparsedp.parameters import Support

EVEN = [0, 0, 1, 1, 2, 2, 3, 3]
RAGGED = [0, 0, 1, 2, 2, 2, 3, 3]
ONE_LARGE = [0, 1, 2, 2, 2, 2, 2, 3]


def squares(model, rows):
    return model(rows[0]).flatten(1).square().sum(1) / 100


def make(kind, dtype=torch.float64):
    torch.manual_seed(1)
    shape = (8, 200) if kind == "rows" else (8, 3, 200)
    return nn.Linear(200, 100).to(dtype), (torch.randn(shape, dtype=dtype),)


@pytest.mark.parametrize("share", [1.0, 0.3], ids=["all", "scattered"])
@pytest.mark.parametrize("units", [EVEN, RAGGED, ONE_LARGE], ids=["even", "ragged", "one large"])
@pytest.mark.parametrize("kind", ["rows", "sequences"])
def test_the_clipped_sum_is_that_of_a_plain_loop(kind, units, share):
    model, rows = make(kind)
    engine = BookKeepingEngine(model, squares)
    chosen = torch.rand(engine.layout.dimension, generator=torch.Generator().manual_seed(2)) < share
    support = Support.from_mask(chosen)
    z = measured(unit_means(plain_loop(model, squares, rows), units), support.indices.numpy())
    found = engine.clipped_sum(
        [MicroBatch(rows, torch.tensor(units))], ClippedSumQuery(support, FlatClip(median_norm(z)))
    )
    np.testing.assert_allclose(found.numpy(), clipped_sum(z, median_norm(z)), rtol=1e-9, atol=1e-11)
    assert not engine.notes


@pytest.mark.parametrize("kind", ["rows", "sequences"])
def test_no_gradient_is_formed_where_all_coordinates_take_part(monkeypatch, kind):
    def formed(*_):
        raise AssertionError("a gradient was formed")

    model, rows = make(kind)
    engine, query = BookKeepingEngine(model, squares), ClippedSumQuery(Support.full(20_100), FlatClip(1.0))
    expected = engine.clipped_sum([MicroBatch(rows, torch.tensor(RAGGED))], query)
    for source in (Outer, SequenceOuter):
        monkeypatch.setattr(source, "explicit", formed)
    assert torch.equal(engine.clipped_sum([MicroBatch(rows, torch.tensor(RAGGED))], query), expected)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), 1e25])
def test_a_unit_with_one_row_that_cannot_be_measured_counts_as_absent(bad):
    model, (rows,) = make("rows", torch.float32)
    query = ClippedSumQuery(Support.full(20_100), FlatClip(1.0))
    others = [row for row, unit in enumerate(RAGGED) if unit != 2]
    without = BookKeepingEngine(model, squares).clipped_sum(
        [MicroBatch((rows[others],), torch.tensor([0, 0, 1, 2, 2]))], query
    )
    rows[4] = bad
    found = BookKeepingEngine(model, squares).clipped_sum([MicroBatch((rows,), torch.tensor(RAGGED))], query)
    torch.testing.assert_close(found, without, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("size", [1.0, 1e4])
def test_a_unit_whose_rows_cancel_moves_the_sum_by_no_more_than_the_clip_norm(size):
    """Two rows that all but undo each other, in float32, beside units of ordinary size."""
    model, (rows,) = make("rows", torch.float32)

    def signed(model, rows):
        return model(rows[0]).sum(1) * rows[1]

    signs = torch.tensor([1.0, -1.0, 1.0, 1.0, 1.0, -1.0, 1.0, 1.0])
    rows[1] = rows[0] = size * rows[0]
    rows[1, 0] *= 1 + 2.0**-20
    query = ClippedSumQuery(Support.full(20_100), FlatClip(1.0))
    engine = BookKeepingEngine(model, signed)
    with_it = engine.clipped_sum([MicroBatch((rows, signs), torch.tensor(EVEN))], query)
    rest = (rows[2:], signs[2:])
    without = engine.clipped_sum([MicroBatch(rest, torch.tensor(EVEN[2:]) - 1)], query)
    assert float((with_it - without).norm()) <= 1.0


def test_rows_find_their_places_and_what_is_left_over_is_zero():
    rows = torch.arange(1.0, 9.0).unsqueeze(1)
    beside = UnitPlaces.of(torch.tensor(RAGGED)).beside(rows)
    assert beside.squeeze(2).tolist() == [[1, 2, 0], [3, 0, 0], [4, 5, 6], [7, 8, 0]]
    even = UnitPlaces.of(torch.tensor(EVEN)).beside(rows)
    assert even.data_ptr() == rows.data_ptr()
    assert UnitPlaces.of(torch.tensor(ONE_LARGE)) is None
