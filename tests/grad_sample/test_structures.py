"""What real models are made of, on the fast path alone: equal to a plain loop of `backward`, nothing in the log."""

from __future__ import annotations

import logging

import numpy as np
import pytest
import torch
from gradient_cases import GEOMETRIES, Case, loss, supports
from gradient_oracle import clipped_sum, measured, median_norm, plain_loop, unit_means
from structure_cases import STRUCTURES, By, autocast, bare, by, cosine, linear
from torch import Tensor, nn

from sparsedp.batch import MicroBatch
from sparsedp.clipping import FlatClip, Standardized
from sparsedp.grad_sample import BookKeepingEngine, ClippedSumQuery
from sparsedp.grad_sample.rules import RULES, Rule
from sparsedp.parameters import Support

UNITS = [0, 0, 1, 2, 2, 2, 3]

pytestmark = pytest.mark.filterwarnings(
    "ignore:.*(nested_tensor|lr_scheduler|weight_norm).*", "ignore:.*enable_nested_tensor"
)


NOT_VECTORISED = ("packed", "bilinear", "checkpointed")
WITHOUT_A_FORMULA = {"token-written-in-place"}


def assert_right(case: Case, geometry: str, units=None, tolerance: float = 1e-9) -> BookKeepingEngine:
    model, rows = case.make(torch.float64, len(UNITS))
    gradients = plain_loop(model, loss, rows)
    contributions = gradients if units is None else unit_means(gradients, units)
    engine = BookKeepingEngine(model, loss)
    for name, support in supports(engine.layout).items():
        space = GEOMETRIES[geometry](gradients, support)
        parts = (space.centre.numpy(), space.scale.numpy()) if isinstance(space, Standardized) else (0.0, 1.0)
        z = measured(contributions, support.indices.numpy(), *parts)
        clip_norm = median_norm(z)
        batch = MicroBatch(rows, None if units is None else torch.tensor(units))
        found = engine.clipped_sum([batch], ClippedSumQuery(support, FlatClip(clip_norm), space))
        error = np.linalg.norm(found.numpy() - clipped_sum(z, clip_norm))
        least = 1e-6 * np.abs(gradients).max()  # a key's bias has no gradient but rounding
        assert error <= tolerance * max(clip_norm, least) * len(contributions), name
    return engine


@pytest.mark.parametrize(
    "units", [pytest.param(None, id="rows"), pytest.param(UNITS, id="units", marks=pytest.mark.nightly)]
)
@pytest.mark.parametrize("geometry", GEOMETRIES)
@pytest.mark.parametrize("case", STRUCTURES)
def test_the_fast_path_equals_a_plain_loop(case, geometry, units, caplog):
    with caplog.at_level(logging.INFO, logger="sparsedp"):
        engine = assert_right(STRUCTURES[case], geometry, units)
    assert engine.falls_back == case.startswith(NOT_VECTORISED)
    assert len(caplog.records) == (engine.falls_back or case in WITHOUT_A_FORMULA)


SLOW = {
    "distances": Case(
        by(lambda m, x: torch.cdist(m.body(x), m.centres), body=linear(3, 2), centres=bare(4, 2)), (2, 3)
    ),
    "logarithm": Case(
        by(lambda m, x: torch.logaddexp(m.body(x), m.floor), body=linear(3, 2), floor=bare(2)), (3,)
    ),
}


@pytest.mark.parametrize("case", SLOW)
def test_an_operation_without_a_formula_costs_only_itself(case, caplog):
    with caplog.at_level(logging.WARNING, logger="sparsedp"):
        engine = assert_right(SLOW[case], "identity")
    assert not engine.falls_back
    assert "has no formula" in caplog.text


def test_a_formula_that_does_not_hold_is_found_out(monkeypatch, caplog):
    """As after a change in PyTorch: the model goes to the reference engine, and the sum stays right."""
    wrong = Rule((), RULES["ExpandBackward0"].contribution)
    monkeypatch.setitem(RULES, "MulBackward0", wrong)
    case = Case(by(lambda m, x: m.body(x) * m.gain, body=linear(3, 4), gain=bare(4)), (3,))
    with caplog.at_level(logging.WARNING, logger="sparsedp"):
        engine = assert_right(case, "identity")
    assert engine.falls_back
    assert "the formula of MulBackward0 does not hold" in caplog.text


@pytest.mark.parametrize("samples", [1, 2, 5])
def test_rows_picked_by_their_content_are_never_taken_for_others(samples):
    """Two positions of the first row are kept, but of other rows more or fewer, with the same number in all."""

    def forward(m: nn.Module, x: Tensor) -> Tensor:
        kept = x[..., 0] > 0
        out = torch.zeros(*x.shape[:2], 4, dtype=x.dtype).masked_scatter(
            kept.unsqueeze(-1), m.body(x[kept]) * m.gain
        )
        return out.sum(1)

    torch.manual_seed(0)
    model = By(forward, body=nn.Linear(3, 4), gain=torch.ones(4)).double()
    x = torch.randn(samples, 4, 3, dtype=torch.float64)
    x[..., 0] = -1
    for row, count in enumerate([2, 1, 3, 4, 0][:samples]):
        x[row, :count, 0] = 1
    rows = (x, torch.linspace(0.2, 2.0, samples).double())
    gradients = plain_loop(model, loss, rows)
    clip_norm = median_norm(gradients)
    engine = BookKeepingEngine(model, loss)
    found = engine.clipped_sum(
        [MicroBatch(rows)], ClippedSumQuery(Support.full(engine.layout.dimension), FlatClip(clip_norm))
    )
    np.testing.assert_allclose(found.numpy(), clipped_sum(gradients, clip_norm), atol=1e-9)


def test_a_compiled_model_runs_as_written():
    case = Case(by(cosine, body=linear(3, 4), prototypes=bare(5, 4), temperature=bare()), (3,))
    compiled = Case(lambda: torch.compile(case.build(), backend="eager"), (3,))
    assert not assert_right(compiled, "identity").falls_back


def test_half_precision_activations_are_measured_in_full():
    """Under autocast the engine's sums are the plain loop's, but for what eight bits of a product can say."""
    build = by(autocast, body=linear(3, 8), norm=lambda: nn.LayerNorm(8), gain=bare(8), head=linear(8, 2))
    model, rows = Case(build, (4, 3)).make(torch.float32, len(UNITS))
    gradients = plain_loop(model, loss, rows)
    engine = BookKeepingEngine(model, loss)
    for name, support in supports(engine.layout).items():
        z = measured(gradients, support.indices.numpy())
        clip_norm = median_norm(z)
        found = engine.clipped_sum([MicroBatch(rows)], ClippedSumQuery(support, FlatClip(clip_norm)))
        assert np.linalg.norm(found.numpy() - clipped_sum(z, clip_norm)) <= 0.03 * clip_norm * len(UNITS), (
            name
        )
    assert not engine.falls_back
