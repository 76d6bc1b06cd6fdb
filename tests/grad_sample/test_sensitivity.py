"""Sensitivity, measured: one record or one unit, whatever it holds, moves the clipped sum by at most C."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
import torch
from gradient_cases import CASES, GEOMETRIES, loss, supports
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from sparsedp.batch import MicroBatch
from sparsedp.clipping import FlatClip
from sparsedp.grad_sample import ENGINES, ClippedSumQuery, make_engine
from sparsedp.parameters import Support

MODELS = ["linear", "linear-sequence", "linear-wide", "conv2d", "conv2d-shifts", "conv2d-depthwise", "conv3d"]
MODELS += ["embedding-repeated", "embedding-padding", "layer-norm-sequence", "group-norm", "rms-norm"]
MODELS += ["own-parameter", "attention", "perceptron", "cnn", "text"]
RECORDS = [
    "normal",
    "nan input",
    "infinite input",
    "nan loss",
    "infinite loss",
    "huge input",
    "huge loss",
    "scaled",
]
Rows = tuple[Tensor, Tensor]


def spoil(rows: Rows, kind: str, powers: tuple[int, int]) -> Rows:
    """A record of a kind out of an ordinary one."""
    inputs, targets = rows[0].clone(), rows[1].clone()
    changes = {
        "nan input": (torch.nan, 1.0),
        "infinite input": (torch.inf, 1.0),
        "nan loss": (1.0, torch.nan),
        "infinite loss": (1.0, torch.inf),
        "huge input": (1e30, 1.0),
        "huge loss": (1.0, 1e30),
        "scaled": (10.0 ** powers[0], 10.0 ** powers[1]),
    }
    by_input, by_loss = changes.get(kind, (1.0, 1.0))
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
@given(questions, st.sampled_from(RECORDS), powers, st.integers(0, 4), st.data())
def test_one_record_moves_the_sum_by_at_most_the_clip_norm(question, kind, powers, others, data):
    rows, ask = question.ask()
    place = data.draw(st.integers(0, others))
    record = spoil((rows[0][7:], rows[1][7:]), kind, powers)
    before, after = (rows[0][:place], rows[1][:place]), (rows[0][place:others], rows[1][place:others])
    assert_moves_at_most(question, ask(joined(before, record, after)), ask(joined(before, after)))


@settings(max_examples=120)
@given(questions, st.sampled_from(RECORDS), powers, st.integers(1, 4), st.integers(0, 2))
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
        for clip_norm in (0.01, 1.0):
            query = ClippedSumQuery(Support.full(engine.layout.dimension), FlatClip(clip_norm))
            total = engine.clipped_sum([MicroBatch((inputs.contiguous(), gradients.contiguous()))], query)
            assert float(total.norm()) <= clip_norm


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
        for clip_norm in (1e-6, 1.0):
            query = ClippedSumQuery(supports(engine.layout)[support], FlatClip(clip_norm))
            assert float(engine.clipped_sum([MicroBatch(rows)], query).norm()) <= clip_norm
