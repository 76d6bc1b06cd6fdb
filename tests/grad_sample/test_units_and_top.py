"""Units of several rows are clipped once, and the per-sample top-r keeps what it should."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from gradient_cases import CASES, GEOMETRIES, loss, supports
from gradient_oracle import clipped_sum, measured, median_norm, plain_loop, unit_means
from torch import Tensor, nn

from sparsedp.batch import MicroBatch
from sparsedp.clipping import FlatClip, NoClip, Standardized
from sparsedp.errors import SparseDPError
from sparsedp.grad_sample import ENGINES, ClippedSumQuery, bookkeeping
from sparsedp.grad_sample.query import keep_largest
from sparsedp.parameters import Support

UNITS = [0, 0, 1, 2, 2, 2, 3]
SOME = ["linear", "linear-sequence", "conv2d", "conv2d-shifts", "conv2d-groups", "embedding-repeated"]
SOME += [
    "layer-norm-sequence",
    "group-norm",
    "own-parameter",
    "lstm-final-state",
    "perceptron",
    "cnn",
    "text",
    "embedding-padding",
    "embedding-bag-weights",
    "tables",
    "tied-to-output",
]
TIED = "lstm-final-state"
"""Its two biases have the same gradient, so which of them is larger is a matter of rounding."""


@pytest.fixture
def small_chunks(monkeypatch):
    """Chunks of two rows, so that units must be kept whole."""
    for name in ("LEAST_CHUNK", "MOST_CHUNK"):
        monkeypatch.setattr(bookkeeping, name, 2)


def assert_right(kind, case, geometry, keep=None, units=None):
    model, rows = CASES[case].make(torch.float64, len(UNITS))
    gradients = plain_loop(model, loss, rows)
    contributions = gradients if units is None else unit_means(gradients, units)
    engine = ENGINES[kind](model, loss)
    for name, support in supports(engine.layout).items():
        space = GEOMETRIES[geometry](gradients, support)
        parts = (space.centre.numpy(), space.scale.numpy()) if isinstance(space, Standardized) else (0.0, 1.0)
        count = None if keep is None else max(1, int(keep * support.size))
        z = measured(contributions, support.indices.numpy(), *parts, keep=count)
        clip_norm = median_norm(z)
        batch = MicroBatch(rows, None if units is None else torch.tensor(units))
        found = engine.clipped_sum([batch], ClippedSumQuery(support, FlatClip(clip_norm), space, keep))
        error = np.linalg.norm(found.numpy() - clipped_sum(z, clip_norm))
        assert error <= 1e-9 * clip_norm, name


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


@pytest.mark.usefixtures("small_chunks")
@pytest.mark.parametrize("kind", ENGINES)
def test_units_and_top_work_together(kind):
    assert_right(kind, "cnn", "standardized", keep=0.3, units=UNITS)


@pytest.mark.parametrize("kind", ENGINES)
def test_a_unit_of_one_row_is_that_row(kind):
    model, rows = CASES["cnn"].make(torch.float64)
    engine = ENGINES[kind](model, loss)
    query = ClippedSumQuery(Support.full(engine.layout.dimension), FlatClip(0.5))
    alone = engine.clipped_sum([MicroBatch(rows)], query)
    as_units = engine.clipped_sum([MicroBatch(rows, torch.arange(len(rows[0])))], query)
    torch.testing.assert_close(as_units, alone, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("kind", ENGINES)
def test_the_top_of_ties_is_the_lower_index(kind):
    def equal(model: nn.Module, rows: Tensor) -> Tensor:
        return model(rows).sum(1)

    model = nn.Linear(3, 2)
    engine = ENGINES[kind](model, equal)
    query = ClippedSumQuery(Support.full(8), NoClip(), per_sample_top=0.5)
    found = engine.clipped_sum([MicroBatch(torch.ones(4, 3))], query)
    assert found.tolist() == [4.0, 4.0, 4.0, 4.0, 0.0, 0.0, 0.0, 0.0]


def test_keep_largest_keeps_exactly_that_many_of_each_row():
    rows = torch.tensor([[3.0, -3.0, 3.0, 1.0], [0.0, 0.0, 0.0, 0.0], [1.0, 2.0, -4.0, 3.0]])
    assert keep_largest(rows, 2).tolist() == [[3.0, -3.0, 0.0, 0.0], [0.0] * 4, [0.0, 0.0, -4.0, 3.0]]
    assert keep_largest(rows, 4) is rows


def test_keep_largest_cannot_hide_a_number_that_is_not_finite():
    rows = torch.tensor([[torch.nan, 5.0, 1.0], [torch.inf, 5.0, 1.0]])
    kept = keep_largest(rows, 1)
    assert not bool(kept.isfinite().all(dim=1).any())


@pytest.mark.parametrize("top", [0.0, -0.5, 1.5])
def test_a_top_that_is_no_fraction_is_refused(top):
    with pytest.raises(SparseDPError, match="per_sample_top"):
        ClippedSumQuery(Support.full(3), FlatClip(1.0), per_sample_top=top)


def test_a_geometry_of_another_size_than_the_support_is_refused():
    with pytest.raises(SparseDPError, match="aligned"):
        ClippedSumQuery(Support.full(3), FlatClip(1.0), Standardized(torch.zeros(2), torch.ones(2)))
