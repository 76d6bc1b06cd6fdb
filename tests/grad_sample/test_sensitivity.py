"""Sensitivity, measured: one record or unit, whatever it holds, moves the clipped sum by at most C."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import numpy as np
import pytest
import torch
from gradient_cases import CASES, GEOMETRIES, By, assert_equals_a_plain_loop, loss, output_sum, supports
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from sparsedp.batch import MicroBatch
from sparsedp.clipping import AutomaticClip, FlatClip
from sparsedp.grad_sample import ENGINES, BookKeepingEngine, ClippedSumQuery, bookkeeping, linear, make_engine
from sparsedp.parameters import Support

MODELS = ["linear", "linear-sequence", "linear-wide", "conv2d", "conv2d-many-channels", "conv2d-depthwise"]
MODELS += [
    "conv3d",
    "embedding-repeated",
    "embedding-padding",
    "layer-norm-sequence",
    "group-norm",
    "rms-norm",
]
MODELS += ["own-parameter", "attention", "perceptron", "cnn", "text"]
RECORDS = {
    "normal": (1.0, 1.0),
    "nan input": (torch.nan, 1.0),
    "infinite input": (torch.inf, 1.0),
    "nan loss": (1.0, torch.nan),
    "infinite loss": (1.0, torch.inf),
    "huge input": (1e30, 1.0),
    "huge loss": (1.0, 1e30),
    "scaled": None,
}
"""By what input and loss are multiplied; None: by powers of ten."""
Rows = tuple[Tensor, Tensor]


def spoil(rows: Rows, kind: str, powers: tuple[int, int]) -> Rows:
    """A record of a kind out of an ordinary one."""
    inputs, targets = rows[0].clone(), rows[1].clone()
    by_input, by_loss = RECORDS[kind] or (10.0 ** powers[0], 10.0 ** powers[1])
    if inputs.is_floating_point():
        inputs.flatten(1)[:, : max(1, inputs[0].numel() // 2)] *= by_input
    return inputs, targets * by_loss


def rows_of(rows: Rows, first: int, last: int) -> Rows:
    return rows[0][first:last], rows[1][first:last]


def joined(*parts: Rows) -> Rows:
    return torch.cat([part[0] for part in parts]), torch.cat([part[1] for part in parts])


@st.composite
def questions(draw) -> tuple[float, Rows, Callable[..., Tensor]]:
    """A clip norm, eight rows of data, and a function from rows and units to the clipped sum."""
    dtype = draw(st.sampled_from([torch.float32, torch.float64]))
    model, rows = CASES[draw(st.sampled_from(MODELS))].make(dtype, 8, draw(st.integers(0, 10_000)))
    engine = make_engine(model, loss, draw(st.sampled_from(sorted(ENGINES))))
    support = supports(engine.layout)[draw(st.sampled_from(["full", "random", "one", "none", "rows"]))]
    geometry = GEOMETRIES[draw(st.sampled_from(sorted(GEOMETRIES)))](np.ones(1), support)
    clip_norm = draw(st.sampled_from([1e-3, 0.1, 1.0, 100.0]))
    query = ClippedSumQuery(support, FlatClip(clip_norm), geometry, draw(st.sampled_from([None, None, 0.3])))
    return clip_norm, rows, lambda rows, units=None: engine.clipped_sum([MicroBatch(rows, units)], query)


powers = st.tuples(st.integers(-30, 30), st.integers(-30, 30))


@settings(max_examples=250)
@given(questions(), st.sampled_from(sorted(RECORDS)), powers, st.integers(0, 4), st.data())
def test_one_record_moves_the_sum_by_at_most_the_clip_norm(question, kind, powers, others, data):
    clip_norm, rows, ask = question
    place = data.draw(st.integers(0, others))
    record = spoil(rows_of(rows, 7, 8), kind, powers)
    before, after = rows_of(rows, 0, place), rows_of(rows, place, others)
    moved = ask(joined(before, record, after)) - ask(joined(before, after))
    assert float(moved.norm()) <= clip_norm


@settings(max_examples=120)
@given(questions(), st.sampled_from(sorted(RECORDS)), powers, st.integers(1, 4), st.integers(0, 2))
def test_one_unit_moves_the_sum_by_at_most_the_clip_norm(question, kind, powers, size, others):
    clip_norm, rows, ask = question
    unit = joined(spoil(rows_of(rows, 0, 1), kind, powers), rows_of(rows, 1, size))
    rest, units = rows_of(rows, 4, 4 + 2 * others), torch.arange(others).repeat_interleave(2)
    with_it = ask(joined(unit, rest), torch.cat([torch.zeros(size, dtype=torch.int64), units + 1]))
    assert float((with_it - ask(rest, units)).norm()) <= clip_norm


def position_weighted(model: nn.Module, rows: Rows) -> Tensor:
    """The gradient with respect to the output is whatever the record says."""
    inputs, gradients = rows
    return (model(inputs) * gradients).flatten(1).sum(1)


def undone(shape: tuple[int, ...], size: float, generator: torch.Generator) -> Tensor:
    """Large numbers [1, positions, features] that add up to nearly nothing along the positions."""
    values = size * torch.randn(1, *shape, generator=generator)
    values[:, -1] = -values[:, :-1].double().sum(1).float()
    return values


@pytest.mark.parametrize("size", [1.0, 1e2, 1e4])
@pytest.mark.parametrize("kind", ENGINES)
@pytest.mark.parametrize("layer", ["embedding", "linear", "conv", "norm"])
def test_contributions_that_nearly_undo_themselves_are_bounded_all_the_same(layer, kind, size):
    """Sums over positions cancel in float32; a norm computed by another formula than the sum would not bound it."""
    generator = torch.Generator().manual_seed(0)
    ones = torch.full((1, 12, 6), 100.0)
    for _ in range(20):
        normal = torch.randn(1, 12, 6, generator=generator)
        sums, undone_outputs = (undone((12, width), size, generator) for width in (5, 6))
        model, inputs, gradients = {
            "embedding": (nn.Embedding(2, 6), torch.zeros(1, 12, dtype=torch.int64), undone_outputs),
            "linear": (nn.Linear(5, 6), sums, ones),
            "conv": (nn.Conv1d(5, 6, 1), sums.mT, ones.mT),
            "norm": (nn.LayerNorm(6), normal, undone_outputs),
        }[layer]
        engine = ENGINES[kind](model, position_weighted)
        for clip in (FlatClip(0.01), FlatClip(1.0), AutomaticClip(1.0)):
            query = ClippedSumQuery(Support.full(engine.layout.dimension), clip)
            total = engine.clipped_sum([MicroBatch((inputs.contiguous(), gradients.contiguous()))], query)
            assert float(total.norm()) <= clip.sensitivity


@pytest.mark.parametrize("kind", ENGINES)
@pytest.mark.parametrize("support", ["full", "random"])
@pytest.mark.parametrize("layer", ["linear", "linear-sequence", "conv"])
def test_the_product_of_something_tiny_and_something_huge_is_bounded(layer, support, kind):
    """A square may underflow to zero in float32 where its product with a companion would not be small at all."""
    model, *shapes = {
        "linear": (nn.Linear(5, 6, bias=False), (5,), (6,)),
        "linear-sequence": (nn.Linear(5, 6, bias=False), (3, 5), (3, 6)),
        "conv": (nn.Conv1d(5, 6, 1, bias=False), (5, 3), (6, 3)),
    }[layer]
    engine = ENGINES[kind](model, position_weighted)
    for powers in itertools.product(range(-40, 1, 4), range(0, 39, 3)):
        rows = tuple(torch.full((1, *s), 10.0**p) for s, p in zip(shapes, powers, strict=True))
        for clip in (FlatClip(1e-6), FlatClip(1.0), AutomaticClip(1.0)):
            query = ClippedSumQuery(supports(engine.layout)[support], clip)
            assert float(engine.clipped_sum([MicroBatch(rows)], query).norm()) <= clip.sensitivity


# A row that is not finite, or overflows, reaches no other, even where an operation's own backward sees all rows.


CLIP, WIDTH = 0.1, 6
Loss = Callable[[Callable[[Tensor], Tensor], tuple[Tensor, Tensor]], Tensor]


def with_the_gradients_length(model: Callable[[Tensor], Tensor], rows: tuple[Tensor, Tensor]) -> Tensor:
    inputs = rows[0].clone().requires_grad_()
    with torch.enable_grad():
        losses = loss(model, (inputs, rows[1]))
        (found,) = torch.autograd.grad(losses.sum(), inputs, create_graph=True)
    return losses + found.flatten(1).square().sum(1)


def parameter(*shape: int) -> Tensor:
    return 0.5 + torch.rand(shape)


MODELS_EXTREME_ROWS: dict[str, tuple[Callable[[], nn.Module], Loss]] = {
    "cdist": (
        lambda: By(
            lambda m, x: m.out(torch.cdist(x, m.c).neg().exp()), c=parameter(8, 6), out=nn.Linear(8, 4)
        ),
        loss,
    ),
    "pow": (lambda: By(lambda m, x: x.abs().pow(m.power), power=parameter(6)), loss),
    "a layer norm's gradient": (
        lambda: nn.Sequential(nn.Linear(6, 8), nn.LayerNorm(8), nn.Linear(8, 3)),
        with_the_gradients_length,
    ),
    "a convolution's gradient": (
        lambda: nn.Sequential(nn.Unflatten(1, (2, 3)), nn.Conv1d(2, 4, 3, padding=1), nn.Tanh()),
        with_the_gradients_length,
    ),
}


def summed(name: str, rows: Rows) -> Tensor:
    torch.manual_seed(0)
    build, its_loss = MODELS_EXTREME_ROWS[name]
    engine = BookKeepingEngine(build(), its_loss)
    query = ClippedSumQuery(Support.full(engine.layout.dimension), FlatClip(CLIP))
    return engine.clipped_sum([MicroBatch(rows)], query)


@pytest.mark.parametrize("poison", [torch.nan, torch.inf, 1e30, 1e38])
@pytest.mark.parametrize("name", MODELS_EXTREME_ROWS)
def test_one_such_row_silences_no_other(name, poison):
    inputs = torch.randn(12, WIDTH, generator=torch.Generator().manual_seed(1))
    rows = inputs, torch.linspace(0.2, 2.0, 12)
    expected = summed(name, joined(rows_of(rows, 0, 3), rows_of(rows, 4, 12)))
    inputs[3] = poison
    found = summed(name, rows)
    assert float(expected.norm()) > 3 * CLIP
    assert float((found - expected).norm()) <= (CLIP if poison < torch.inf else 1e-5)


# Norms from Gram matrices of positions: right, used where they pay, and safe where positions cancel.


pytestmark = pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel")

BY_POSITION = sorted(
    name
    for name in CASES
    if name.startswith(("linear-s", "linear-g", "linear-l", "conv", "attention", "lstm", "gru"))
)


@pytest.fixture
def always(monkeypatch):
    """Gram matrices everywhere, and few samples at a time."""
    for module in ("linear", "conv"):
        monkeypatch.setattr(f"sparsedp.grad_sample.{module}.pays", lambda *sizes: True)
    monkeypatch.setattr(linear, "WIDE_BYTES", 1 << 10)
    monkeypatch.setattr(linear, "MOST_POSITIONS", 8)


@pytest.mark.parametrize("most_terms", [64.0, 1.5, 0.0], ids=["together", "mixed", "alone"])
@pytest.mark.parametrize("case", BY_POSITION)
def test_the_engine_equals_a_plain_loop(always, monkeypatch, case, most_terms):
    """Whether samples are summed together, each by itself, or some so and some so."""
    monkeypatch.setattr(linear, "MOST_TERMS", most_terms)
    model, rows = CASES[case].make(torch.float64)
    assert_equals_a_plain_loop(BookKeepingEngine(model, loss), model, rows)


@pytest.mark.parametrize("kind", ["sequence", "convolution"])
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), 1e20])
def test_a_record_that_cannot_be_measured_counts_as_absent(always, kind, bad):
    model = nn.Linear(5, 4, bias=False) if kind == "sequence" else nn.Conv1d(5, 4, 1, bias=False)
    rows = torch.randn(6, 3, 5) if kind == "sequence" else torch.randn(6, 5, 3)
    broken = rows.clone()
    broken[2] = bad

    def total(model, rows):
        return model(rows).flatten(1).square().sum(1)

    query = ClippedSumQuery(Support.full(20), FlatClip(1.0))
    without = BookKeepingEngine(model, total).clipped_sum([MicroBatch(rows[[0, 1, 3, 4, 5]])], query)
    found = BookKeepingEngine(model, total).clipped_sum([MicroBatch(broken)], query)
    torch.testing.assert_close(found, without, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("size", [1e3, 1e5, 1e7])
@pytest.mark.parametrize("kind", ["sequence", "convolution"])
@pytest.mark.parametrize("how", ["formed", "gram"])
def test_a_cancelling_record_cannot_disturb_the_sum_of_the_others(how, kind, size, monkeypatch, request):
    """Its norm is about zero; its terms must not pass through a sum shared with the others."""
    if how == "gram":
        request.getfixturevalue("always")
    monkeypatch.setitem(bookkeeping.CHUNK_BYTES, "cpu", 1 << 16)
    generator = torch.Generator().manual_seed(0)
    others, record = torch.randn(40, 4, 64, generator=generator), torch.zeros(1, 4, 64)
    record[0, 0], record[0, 1] = size, -size
    model = nn.Linear(64, 64, bias=False)
    if kind == "convolution":
        model, others, record = (
            nn.Conv1d(64, 64, 1, bias=False),
            others.mT.contiguous(),
            record.mT.contiguous(),
        )
    engine = BookKeepingEngine(model, output_sum)
    query = ClippedSumQuery(Support.full(64 * 64), FlatClip(1.0))
    without = engine.clipped_sum([MicroBatch(others)], query)
    joined = engine.clipped_sum([MicroBatch(torch.cat([others[:1], record, others[1:]]))], query)
    assert float((joined - without).norm()) <= 1e-5
