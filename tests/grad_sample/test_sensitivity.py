"""Sensitivity, measured: one record or unit, whatever it holds, moves the clipped sum by at most C."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from gradient_cases import (
    CASES,
    GEOMETRIES,
    By,
    assert_equals_a_plain_loop,
    loss,
    supports,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from sparsedp.batch import MicroBatch
from sparsedp.clipping import AutomaticClip, FlatClip
from sparsedp.grad_sample import (
    ENGINES,
    BookKeepingEngine,
    ClippedSumQuery,
    bookkeeping,
    linear,
    make_engine,
)
from sparsedp.grad_sample.conv import ConvWeight
from sparsedp.grad_sample.linear import SequenceOuter
from sparsedp.grad_sample.sampler import Metric
from sparsedp.parameters import Support

# Sensitivity, measured: one record or one unit, whatever it holds, moves the clipped sum by at most C.


MODELS = [
    "linear",
    "linear-sequence",
    "linear-wide",
    "conv2d",
    "conv2d-many-channels",
    "conv2d-depthwise",
    "conv3d",
]
MODELS += ["embedding-repeated", "embedding-padding", "layer-norm-sequence", "group-norm", "rms-norm"]
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


def joined(*parts: Rows) -> Rows:
    return torch.cat([part[0] for part in parts]), torch.cat([part[1] for part in parts])


@dataclass(frozen=True)
class Question:
    """An engine and a query on it."""

    engine: str
    model: str
    support: str
    geometry: str
    clip_norm: float
    top: float | None
    dtype: torch.dtype
    seed: int

    def ask(self) -> tuple[Rows, object]:
        """Eight rows of data, and a function from rows and units to the clipped sum."""
        model, rows = CASES[self.model].make(self.dtype, 8, self.seed)
        engine = make_engine(model, loss, self.engine)
        support = supports(engine.layout)[self.support]
        geometry = GEOMETRIES[self.geometry](np.ones(1), support)
        query = ClippedSumQuery(support, FlatClip(self.clip_norm), geometry, self.top)
        return rows, lambda rows, units=None: engine.clipped_sum([MicroBatch(rows, units)], query)


questions = st.builds(
    Question,
    engine=st.sampled_from(sorted(ENGINES)),
    model=st.sampled_from(MODELS),
    support=st.sampled_from(["full", "random", "one", "none", "rows"]),
    geometry=st.sampled_from(sorted(GEOMETRIES)),
    clip_norm=st.sampled_from([1e-3, 0.1, 1.0, 100.0]),
    top=st.sampled_from([None, None, 0.3]),
    dtype=st.sampled_from([torch.float32, torch.float64]),
    seed=st.integers(0, 10_000),
)
powers = st.tuples(st.integers(-30, 30), st.integers(-30, 30))


def assert_moves_at_most(question: Question, one: Tensor, other: Tensor) -> None:
    moved = float((one - other).norm())
    assert moved <= question.clip_norm


@settings(max_examples=250)
@given(questions, st.sampled_from(sorted(RECORDS)), powers, st.integers(0, 4), st.data())
def test_one_record_moves_the_sum_by_at_most_the_clip_norm(question, kind, powers, others, data):
    rows, ask = question.ask()
    place = data.draw(st.integers(0, others))
    record = spoil((rows[0][7:], rows[1][7:]), kind, powers)
    before, after = (rows[0][:place], rows[1][:place]), (rows[0][place:others], rows[1][place:others])
    assert_moves_at_most(question, ask(joined(before, record, after)), ask(joined(before, after)))


@settings(max_examples=120)
@given(questions, st.sampled_from(sorted(RECORDS)), powers, st.integers(1, 4), st.integers(0, 2))
def test_one_unit_moves_the_sum_by_at_most_the_clip_norm(question, kind, powers, rows_of_unit, others):
    rows, ask = question.ask()
    unit = (rows[0][:rows_of_unit], rows[1][:rows_of_unit])
    spoilt = spoil((unit[0][:1], unit[1][:1]), kind, powers)
    unit = joined(spoilt, (unit[0][1:], unit[1][1:]))
    rest = (rows[0][4 : 4 + 2 * others], rows[1][4 : 4 + 2 * others])
    rest_units = torch.arange(others).repeat_interleave(2)
    with_it = ask(
        joined(unit, rest), torch.cat([torch.zeros(rows_of_unit, dtype=torch.int64), rest_units + 1])
    )
    assert_moves_at_most(question, with_it, ask(rest, rest_units))


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
        model, inputs, gradients = {
            "embedding": (
                nn.Embedding(2, 6),
                torch.zeros(1, 12, dtype=torch.int64),
                undone((12, 6), size, generator),
            ),
            "linear": (nn.Linear(5, 6), undone((12, 5), size, generator), ones),
            "conv": (
                nn.Conv1d(5, 6, 1),
                undone((12, 5), size, generator).transpose(1, 2),
                ones.transpose(1, 2),
            ),
            "norm": (
                nn.LayerNorm(6),
                torch.randn(1, 12, 6, generator=generator),
                undone((12, 6), size, generator),
            ),
        }[layer]
        engine = ENGINES[kind](model, position_weighted)
        for clip in (FlatClip(0.01), FlatClip(1.0), AutomaticClip(1.0)):
            query = ClippedSumQuery(Support.full(engine.layout.dimension), clip)
            total = engine.clipped_sum([MicroBatch((inputs.contiguous(), gradients.contiguous()))], query)
            assert float(total.norm()) <= clip.sensitivity


@pytest.mark.parametrize("kind", ENGINES)
@pytest.mark.parametrize("support", ["full", "random"])
@pytest.mark.parametrize("layer", ["linear", "linear-sequence", "conv", "embedding"])
def test_the_product_of_something_tiny_and_something_huge_is_bounded(layer, support, kind):
    """A square may underflow to zero in float32 where its product with a companion would not be small at all."""
    model = {
        "linear": nn.Linear(5, 6, bias=False),
        "linear-sequence": nn.Linear(5, 6, bias=False),
        "conv": nn.Conv1d(5, 6, 1, bias=False),
        "embedding": nn.Embedding(2, 6),
    }[layer]
    shapes = {"linear": ((5,), (6,)), "linear-sequence": ((3, 5), (3, 6)), "conv": ((5, 3), (6, 3))}
    engine = ENGINES[kind](model, position_weighted)
    for tiny, huge in [(a, b) for a in range(-40, 1, 4) for b in range(0, 39, 3)]:
        if layer == "embedding":
            rows = torch.zeros(1, 3, dtype=torch.int64), torch.full((1, 3, 6), 10.0 ** (tiny + huge))
        else:
            rows = tuple(
                torch.full((1, *s), 10.0**p) for s, p in zip(shapes[layer], (tiny, huge), strict=True)
            )
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


def heads(m: nn.Module, x: Tensor) -> Tensor:
    return torch.baddbmm(m.shift, x.view(-1, 2, 3).transpose(0, 1), m.weight).mean(0)


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
    build, its_loss = MODELS_EXTREME_ROWS[name]
    engine = BookKeepingEngine(build(), its_loss)
    query = ClippedSumQuery(Support.full(engine.layout.dimension), FlatClip(CLIP))
    return engine.clipped_sum([MicroBatch(rows)], query), engine


@pytest.mark.parametrize("poison", [torch.nan, torch.inf, 1e30, 1e38])
@pytest.mark.parametrize("name", MODELS_EXTREME_ROWS)
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


# Norms from Gram matrices of positions: right, used where they pay, and safe where positions cancel.


pytestmark = pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel")

BY_POSITION = sorted(
    name
    for name in CASES
    if name.startswith(("linear-s", "linear-g", "linear-l", "conv", "attention", "lstm", "gru"))
)
AS_IT_IS = Metric(None, None)


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


def output_sum(model, rows):
    return model(rows).float().flatten(1).sum(1)


def sequence(a, b):
    return SequenceOuter(a, b)


def convolution(a, b):
    return ConvWeight(a, b, (1,), (1,), (0,), (1,), 1)


@pytest.mark.parametrize("kind", ["sequence", "convolution"])
@pytest.mark.parametrize("size", [1e3, 1e7])
def test_a_record_whose_positions_cancel_is_measured_as_it_is_summed(kind, size):
    """The first record has a gradient of rounding size: the exact one counts, and the others stay as they are."""
    generator = torch.Generator().manual_seed(0)
    a, b = torch.randn(5, 4, 6, generator=generator), torch.randn(5, 4, 3, generator=generator)
    a[0, :2], b[0] = size, 0.0
    b[0, 0], b[0, 1] = 1.0 + 2.0**-20, -1.0
    exact = torch.einsum("nto,nti->noi", b.double(), a.double())
    source = sequence(a, b) if kind == "sequence" else convolution(a.mT.contiguous(), b.mT.contiguous())
    torch.testing.assert_close(source.squared_norms(AS_IT_IS), exact.square().sum((1, 2)), rtol=1e-12, atol=0)
    total = torch.zeros(18, dtype=torch.float64)
    factors = torch.tensor([0.7, 0.5, 1.0, 0.0, 0.25], dtype=torch.float64)
    source.add_weighted_sum(factors, total, AS_IT_IS)
    expected = torch.einsum("n,noi->oi", factors, exact).flatten()
    torch.testing.assert_close(total, expected, rtol=0, atol=1e-5)


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


@pytest.mark.parametrize(
    ("positions", "inputs", "outputs", "expected"),
    [
        (64, 768, 3072, True),  # GPT-2
        (16, 384, 1536, True),  # ConvNeXt's third stage
        (64, 128, 128, False),  # BERT-tiny: formed gradients are small
        (256, 96, 384, False),  # many positions
        (4, 64, 64, False),  # a small layer: nothing to win
    ],
)
def test_gram_matrices_are_used_where_they_cost_less(positions, inputs, outputs, expected):
    source = sequence(torch.empty(1, positions, inputs), torch.empty(1, positions, outputs))
    assert source.has_ghost_norm(AS_IT_IS) is expected
    assert not source.has_ghost_norm(Metric(torch.ones(outputs, inputs), None))
