"""Norms from Gram matrices of positions: right, used where they pay, and safe where positions cancel."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from gradient_cases import CASES, loss, supports
from gradient_oracle import clipped_sum, measured, median_norm, plain_loop, unit_means
from torch import nn

from sparsedp.batch import MicroBatch
from sparsedp.clipping import FlatClip
from sparsedp.grad_sample import BookKeepingEngine, ClippedSumQuery, linear
from sparsedp.grad_sample.buffers import Space, Workspace
from sparsedp.grad_sample.conv import ConvWeight
from sparsedp.grad_sample.linear import SequenceOuter
from sparsedp.grad_sample.sampler import Metric
from sparsedp.parameters import Support

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
    gradients = plain_loop(model, loss, rows)
    engine = BookKeepingEngine(model, loss)
    for support in supports(engine.layout).values():
        z = measured(gradients, support.indices.numpy())
        clip_norm = median_norm(z)
        found = engine.clipped_sum([MicroBatch(rows)], ClippedSumQuery(support, FlatClip(clip_norm)))
        error = np.linalg.norm(found.numpy() - clipped_sum(z, clip_norm))
        assert error <= 1e-9 * clip_norm * len(gradients)


@pytest.mark.parametrize("case", ["linear-sequence", "conv2d-shifts"])
def test_rows_of_one_unit_are_added_before_they_are_measured(always, case):
    units = [0, 0, 1, 2, 2, 2]
    model, rows = CASES[case].make(torch.float64, len(units))
    z = unit_means(plain_loop(model, loss, rows), units)
    engine = BookKeepingEngine(model, loss)
    query = ClippedSumQuery(Support.full(engine.layout.dimension), FlatClip(median_norm(z)))
    found = engine.clipped_sum([MicroBatch(rows, torch.tensor(units))], query)
    np.testing.assert_allclose(found.numpy(), clipped_sum(z, median_norm(z)), rtol=1e-9, atol=1e-11)


def sequence(a, b):
    return SequenceOuter(a, b, Space(Workspace(), "test"))


def convolution(a, b):
    return ConvWeight(a, b, (1,), (1,), (1,), 1, Space(Workspace(), "test"), (0,))


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
def test_a_cancelling_record_cannot_disturb_the_sum_of_the_others(always, size):
    model = nn.Linear(64, 64, bias=False)
    others, record = torch.randn(40, 4, 64), torch.zeros(1, 4, 64)
    record[0, 0], record[0, 1] = size, -size
    engine = BookKeepingEngine(model, lambda model, rows: model(rows).flatten(1).sum(1))
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
