"""Empty batches, empty supports, samples that are not finite; and how a batch is cut changes nothing."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from gradient_cases import CASES, GEOMETRIES, loss, supports
from gradient_oracle import clipped_sum, measured, plain_loop
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from sparsedp.batch import MicroBatch
from sparsedp.clipping import FlatClip, NoClip
from sparsedp.errors import SparseDPError
from sparsedp.grad_sample import ENGINES, BookKeepingEngine, ClippedSumQuery, bookkeeping, make_engine
from sparsedp.parameters import Support

MODELS = [
    "linear",
    "linear-sequence",
    "conv2d",
    "conv2d-shifts",
    "embedding-repeated",
    "own-parameter",
    "cnn",
    "text",
]
GEOMETRIC = sorted(GEOMETRIES)
POISON = [torch.nan, torch.inf, -torch.inf, 1e38]


def select(rows: tuple[Tensor, Tensor], which: object) -> tuple[Tensor, Tensor]:
    return rows[0][which], rows[1][which]


@pytest.mark.parametrize("poison", POISON)
@pytest.mark.parametrize("geometry", GEOMETRIC)
@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("kind", ENGINES)
def test_a_sample_that_is_not_finite_contributes_exactly_zero(kind, model, geometry, poison):
    network, rows = CASES[model].make(torch.float32)
    engine = ENGINES[kind](network, loss)
    good = torch.tensor([0, 1, 3, 5])
    rows[1][[2, 4]] = poison  # a loss of 1e38 has a gradient whose square is not finite in float32
    for name in ("full", "random", "rows"):
        support = supports(engine.layout)[name]
        query = ClippedSumQuery(support, FlatClip(0.7), GEOMETRIES[geometry](np.ones(1), support))
        found = engine.clipped_sum([MicroBatch(rows)], query)
        expected = engine.clipped_sum([MicroBatch(select(rows, good))], query)
        if poison == 1e38 and kind == "reference":  # measured in float64, it is finite, and clipped
            assert float((found - expected).norm()) <= 2 * 0.7
        else:
            torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("clip", [FlatClip(0.7), NoClip()], ids=["clip", "no clip"])
@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("kind", ENGINES)
def test_a_batch_of_nothing_finite_gives_exact_zeros(kind, model, clip):
    network, rows = CASES[model].make(torch.float32)
    engine = ENGINES[kind](network, loss)
    rows[1][:] = torch.nan
    for support in supports(engine.layout).values():
        found = engine.clipped_sum([MicroBatch(rows)], ClippedSumQuery(support, clip))
        assert torch.equal(found, torch.zeros(support.size, dtype=torch.float64))


@pytest.mark.parametrize("kind", ENGINES)
def test_a_unit_with_one_row_that_is_not_finite_contributes_nothing(kind):
    network, rows = CASES["cnn"].make(torch.float32)
    engine = ENGINES[kind](network, loss)
    rows[1][1] = torch.nan
    query = ClippedSumQuery(Support.full(engine.layout.dimension), FlatClip(0.7))
    found = engine.clipped_sum([MicroBatch(rows, torch.tensor([0, 0, 0, 1, 1, 2]))], query)
    rest = MicroBatch(select(rows, slice(3, None)), torch.tensor([0, 0, 1]))
    torch.testing.assert_close(found, engine.clipped_sum([rest], query), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("batches", ["none", "one empty", "several empty"])
@pytest.mark.parametrize("geometry", GEOMETRIC)
@pytest.mark.parametrize("kind", ENGINES)
def test_an_empty_batch_gives_exact_zeros(kind, geometry, batches):
    network, rows = CASES["cnn"].make(torch.float32)
    engine = ENGINES[kind](network, loss)
    empty = MicroBatch(select(rows, slice(0, 0)))
    given = {"none": [], "one empty": [empty], "several empty": [empty, empty]}[batches]
    for support in supports(engine.layout).values():
        query = ClippedSumQuery(support, FlatClip(0.7), GEOMETRIES[geometry](np.ones(1), support))
        assert torch.equal(engine.clipped_sum(given, query), torch.zeros(support.size, dtype=torch.float64))


@pytest.mark.parametrize("kind", ENGINES)
def test_an_empty_support_gives_an_empty_sum(kind):
    network, rows = CASES["cnn"].make(torch.float32)
    engine = ENGINES[kind](network, loss)
    query = ClippedSumQuery(Support.empty(engine.layout.dimension), FlatClip(0.7), per_sample_top=0.5)
    assert engine.clipped_sum([MicroBatch(rows)], query).shape == (0,)


@pytest.mark.parametrize("kind", ENGINES)
def test_without_clip_and_with_every_coordinate_it_is_the_gradient_of_the_summed_loss(kind):
    network, rows = CASES["cnn"].make(torch.float64)
    engine = ENGINES[kind](network, loss)
    found = engine.clipped_sum(
        [MicroBatch(rows)], ClippedSumQuery(Support.full(engine.layout.dimension), NoClip())
    )
    loss(network, rows).sum().backward()
    expected = torch.cat([p.grad.reshape(-1) for p in network.parameters()])
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-12)


@settings(max_examples=40)
@given(
    st.sampled_from(sorted(ENGINES)),
    st.sampled_from(MODELS),
    st.sampled_from(GEOMETRIC),
    st.lists(st.integers(0, 9), max_size=4),
)
def test_any_split_into_micro_batches_gives_the_same_sum(kind, model, geometry, cuts):
    network, rows = CASES[model].make(torch.float64, 9)
    engine = make_engine(network, loss, kind)
    support = supports(engine.layout)["random"]
    query = ClippedSumQuery(support, FlatClip(0.7), GEOMETRIES[geometry](np.ones(1), support))
    edges = [0, *sorted(cuts), 9]
    parts = [MicroBatch(select(rows, slice(a, b))) for a, b in itertools.pairwise(edges)]
    whole = engine.clipped_sum([MicroBatch(rows)], query)
    torch.testing.assert_close(engine.clipped_sum(parts, query), whole, rtol=1e-9, atol=1e-11)


@settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(
    st.sampled_from(MODELS), st.sampled_from(GEOMETRIC), st.integers(1, 9), st.integers(0, 20), st.booleans()
)
def test_any_chunk_size_gives_the_same_sum(monkeypatch, model, geometry, rows_in_chunk, log_bytes, units):
    network, rows = CASES[model].make(torch.float64, 9)
    support = supports(BookKeepingEngine(network, loss).layout)["random"]
    query = ClippedSumQuery(support, FlatClip(0.7), GEOMETRIES[geometry](np.ones(1), support))
    batch = MicroBatch(rows, torch.tensor([0, 0, 1, 2, 2, 2, 3, 3, 4]) if units else None)
    whole = BookKeepingEngine(network, loss).clipped_sum([batch], query)
    with monkeypatch.context() as patch:
        for name in ("LEAST_CHUNK", "MOST_CHUNK"):
            patch.setattr(bookkeeping, name, rows_in_chunk)
        patch.setitem(bookkeeping.CHUNK_BYTES, "cpu", 1 << log_bytes)
        chunked = BookKeepingEngine(network, loss).clipped_sum([batch], query)
    torch.testing.assert_close(chunked, whole, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("model", ["cnn", "text"])
def test_the_sums_bits_do_not_depend_on_what_the_engine_saw_before(model):
    network, rows = CASES[model].make(torch.float32, 40)
    used, fresh = BookKeepingEngine(network, loss), BookKeepingEngine(network, loss)
    kinds = supports(used.layout)
    for name in ("full", "random", "rows", "random"):
        used.clipped_sum(
            [MicroBatch(select(rows, slice(0, 11)))], ClippedSumQuery(kinds[name], FlatClip(0.3))
        )
    query = ClippedSumQuery(kinds["random"], FlatClip(0.7))
    first = used.clipped_sum([MicroBatch(rows)], query)
    assert torch.equal(used.clipped_sum([MicroBatch(rows)], query), first)
    assert torch.equal(fresh.clipped_sum([MicroBatch(rows)], query), first)


def test_inputs_of_several_lengths_in_one_step():
    network, long = CASES["text"].make(torch.float64)
    short = (long[0][:4, :2], long[1][:4])
    engine = BookKeepingEngine(network, loss)
    support = supports(engine.layout)["random"]
    found = engine.clipped_sum([MicroBatch(long), MicroBatch(short)], ClippedSumQuery(support, FlatClip(0.7)))
    indices = support.indices.numpy()
    expected = sum(clipped_sum(measured(plain_loop(network, loss, r), indices), 0.7) for r in (long, short))
    np.testing.assert_allclose(found.numpy(), expected, rtol=1e-9, atol=1e-11)


def test_batches_may_come_from_a_generator_and_are_read_once():
    network, rows = CASES["linear"].make(torch.float64)
    engine = BookKeepingEngine(network, loss)
    query = ClippedSumQuery(Support.full(engine.layout.dimension), FlatClip(0.7))
    stream = (MicroBatch(select(rows, slice(i, i + 2))) for i in (0, 2, 4))
    found = engine.clipped_sum(stream, query)
    torch.testing.assert_close(found, engine.clipped_sum([MicroBatch(rows)], query), rtol=1e-9, atol=1e-11)
    assert next(stream, None) is None


def test_an_unknown_engine_is_refused_with_the_choices():
    with pytest.raises(SparseDPError, match=r"bookkeeping.*reference"):
        make_engine(CASES["linear"].build(), loss, "fast")
