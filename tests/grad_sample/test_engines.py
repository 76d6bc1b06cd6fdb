"""Both engines equal a plain loop: layers, shapes, edge cases, units, tables, memory."""

from __future__ import annotations

import itertools
import logging

import numpy as np
import pytest
import torch
from gradient_cases import (
    CASES,
    GEOMETRIES,
    KNOWN,
    NETWORKS,
    Case,
    assert_equals_a_plain_loop,
    clipped_sum,
    loss,
    measured,
    plain_loop,
    supports,
)
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from sparsedp.batch import MicroBatch, slice_batch
from sparsedp.clipping import FlatClip, LayerClip
from sparsedp.grad_sample import ENGINES, BookKeepingEngine, ClippedSumQuery, bookkeeping, make_engine
from sparsedp.parameters import Support

# Both engines give the clipped sum of a plain loop of `backward`, for every layer, support, geometry and dtype.


pytestmark = pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel")

TOLERANCE = {torch.float64: 1e-9, torch.float32: 3e-5, torch.bfloat16: 5e-2}
"""Largest error of a sum, in units of the clip norm times the number of samples."""


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["float32", "float64"])
@pytest.mark.parametrize("geometry", GEOMETRIES)
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("kind", ENGINES)
def test_the_engine_equals_a_plain_loop(kind, case, geometry, dtype, caplog):
    model, rows = CASES[case].make(dtype)
    engine = ENGINES[kind](model, loss)
    with caplog.at_level(logging.DEBUG, logger="sparsedp"):
        assert_equals_a_plain_loop(engine, model, rows, geometry=geometry, tolerance=TOLERANCE[dtype])
    assert kind == "reference" or case not in {**KNOWN, **NETWORKS} or caplog.records == []


@pytest.mark.parametrize("case", ["linear-sequence", "conv2d-many-channels", "embedding", "group-norm"])
@pytest.mark.parametrize("kind", ENGINES)
def test_the_engine_takes_half_precision(kind, case):
    model, rows = CASES[case].make(torch.bfloat16)
    assert_equals_a_plain_loop(ENGINES[kind](model, loss), model, rows, tolerance=TOLERANCE[torch.bfloat16])


# The fast engine equals a plain loop for convolutions of any shape.


@st.composite
def convolutions(draw) -> Case:
    dims = draw(st.integers(1, 3))
    groups = draw(st.sampled_from([1, 1, 2]))
    inputs = groups * draw(st.sampled_from([1, 2, 3, 16, 17] if dims < 3 else [1, 2, 16]))
    kernel, stride, dilation = (tuple(draw(st.integers(1, most)) for _ in range(dims)) for most in (3, 3, 2))
    mode = draw(st.sampled_from(["zeros", "reflect", "replicate", "circular"]))
    same = draw(st.booleans()) and max(stride) == 1
    padding = "same" if same else tuple(draw(st.integers(0, 2)) for _ in range(dims))
    sizes = tuple(draw(st.integers(3, 6)) for _ in range(dims))
    reach = [d * (k - 1) + 1 for k, d in zip(kernel, dilation, strict=True)]
    pads = [r // 2 + 1 for r in reach] if same else [2 * p for p in padding]
    assume(all(size + pad >= r for size, pad, r in zip(sizes, pads, reach, strict=True)))
    kind = (nn.Conv1d, nn.Conv2d, nn.Conv3d)[dims - 1]
    outputs = groups * draw(st.integers(1, 4))
    bias = draw(st.booleans())
    return Case(
        lambda: kind(inputs, outputs, kernel, stride, padding, dilation, groups, bias, mode), (inputs, *sizes)
    )


@settings(max_examples=100)
@given(convolutions(), st.integers(1, 20), st.sampled_from(sorted(GEOMETRIES)), st.integers(0, 1000))
def test_the_fast_engine_equals_a_plain_loop(case, samples, geometry, seed):
    model, rows = case.make(torch.float64, samples, seed)
    assert_equals_a_plain_loop(BookKeepingEngine(model, loss), model, rows, geometry=geometry, tolerance=1e-8)


# Empty batches, empty supports, samples that are not finite; and how a batch is cut changes nothing.


MODELS = ["linear", "linear-sequence", "conv2d", "conv2d-many-channels", "embedding-repeated"]
MODELS += ["own-parameter", "cnn", "text"]
GEOMETRIC = sorted(GEOMETRIES)
POISON = [torch.nan, torch.inf, -torch.inf, 1e38]


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
        expected = engine.clipped_sum([MicroBatch((rows[0][good], rows[1][good]))], query)
        if poison == 1e38 and kind == "reference":  # measured in float64, it is finite, and clipped
            assert float((found - expected).norm()) <= 2 * 0.7
        else:
            torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)


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
    parts = [MicroBatch(slice_batch(rows, slice(a, b))) for a, b in itertools.pairwise(edges)]
    whole = engine.clipped_sum([MicroBatch(rows)], query)
    torch.testing.assert_close(engine.clipped_sum(parts, query), whole, rtol=1e-9, atol=1e-11)


@settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(
    st.sampled_from(MODELS),
    st.sampled_from(GEOMETRIC),
    st.integers(1, 9),
    st.integers(0, 20),
    st.booleans(),
    st.booleans(),
)
def test_any_chunk_size_gives_the_same_sum(
    monkeypatch, model, geometry, rows_in_chunk, log_bytes, units, by_layer
):
    network, rows = CASES[model].make(torch.float64, 9)
    support = supports(BookKeepingEngine(network, loss).layout)["random"]
    clip = LayerClip((("*weight*", 0.4), ("*", 0.2))) if by_layer else FlatClip(0.7)
    query = ClippedSumQuery(support, clip, GEOMETRIES[geometry](np.ones(1), support))
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
            [MicroBatch(slice_batch(rows, slice(0, 11)))], ClippedSumQuery(kinds[name], FlatClip(0.3))
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


# Units of several rows are clipped once, and the per-sample top-r keeps what it should.


UNITS = [0, 0, 1, 2, 2, 2, 3]
SOME = ["linear", "linear-sequence", "conv2d-many-channels", "conv2d-groups", "embedding-repeated"]
SOME += ["embedding-padding", "embedding-bag-weights", "layer-norm-sequence", "group-norm", "own-parameter"]
SOME += ["lstm-final-state", "perceptron", "cnn", "text", "tables"]
TIED = "lstm-final-state"
"""Its two biases have the same gradient, so which of them is larger is a matter of rounding."""


@pytest.fixture
def small_chunks(monkeypatch):
    """Chunks of two rows, so that units must be kept whole."""
    for name in ("LEAST_CHUNK", "MOST_CHUNK"):
        monkeypatch.setattr(bookkeeping, name, 2)


def assert_right(kind, case, geometry, keep=None, units=None):
    model, rows = CASES[case].make(torch.float64, len(UNITS))
    engine = ENGINES[kind](model, loss)
    assert_equals_a_plain_loop(
        engine, model, rows, geometry=geometry, units=units, keep=keep, tolerance=1e-9 / len(UNITS)
    )


@pytest.mark.usefixtures("small_chunks")
@pytest.mark.parametrize("geometry", GEOMETRIES)
@pytest.mark.parametrize("case", SOME)
@pytest.mark.parametrize("kind", ENGINES)
def test_a_units_mean_gradient_is_clipped_once(kind, case, geometry):
    assert_right(kind, case, geometry, units=UNITS)


@pytest.mark.parametrize("geometry", GEOMETRIES)
@pytest.mark.parametrize("keep", [0.01, 0.4, 1.0])
@pytest.mark.parametrize("case", [case for case in SOME if case != TIED])
@pytest.mark.parametrize("kind", ENGINES)
def test_the_largest_magnitudes_of_each_sample_are_kept(kind, case, keep, geometry):
    assert_right(kind, case, geometry, keep=keep)


@pytest.mark.parametrize("kind", ENGINES)
def test_the_top_of_ties_is_the_lower_index(kind):
    def equal(model: nn.Module, rows: Tensor) -> Tensor:
        return model(rows).sum(1)

    model = nn.Linear(3, 2)
    engine = ENGINES[kind](model, equal)
    query = ClippedSumQuery(Support.full(8), FlatClip(1e30), per_sample_top=0.5)
    found = engine.clipped_sum([MicroBatch(torch.ones(4, 3))], query)
    assert found.tolist() == [4.0, 4.0, 4.0, 4.0, 0.0, 0.0, 0.0, 0.0]


# A unit's rows as positions of one sum of outer products: right, not formed row by row, safe where they cancel.


EVEN = [0, 0, 1, 1, 2, 2, 3, 3]
RAGGED = [0, 0, 1, 2, 2, 2, 3, 3]
ONE_LARGE = [0, 1, 2, 2, 2, 2, 2, 3]


def squares(model, rows):
    return model(rows[0]).flatten(1).square().sum(1) / 100


def make(kind, dtype=torch.float64):
    torch.manual_seed(1)
    shape = (8, 200) if kind == "rows" else (8, 3, 200)
    return nn.Linear(200, 100).to(dtype), (torch.randn(shape, dtype=dtype),)


@pytest.mark.parametrize("units", [EVEN, RAGGED, ONE_LARGE], ids=["even", "ragged", "one large"])
@pytest.mark.parametrize("kind", ["rows", "sequences"])
def test_the_clipped_sum_is_that_of_a_plain_loop(kind, units):
    model, rows = make(kind)
    engine = BookKeepingEngine(model, squares)
    assert_equals_a_plain_loop(engine, model, rows, loss=squares, units=units)
    assert not engine.notes


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
