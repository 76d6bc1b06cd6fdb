"""Both engines give the clipped sum of a plain loop of `backward`, for every layer, support, geometry and dtype."""

from __future__ import annotations

import logging

import numpy as np
import pytest
import torch
from gradient_cases import CASES, GEOMETRIES, KNOWN, NETWORKS, Case, loss, supports
from gradient_oracle import clipped_sum, measured, median_norm, plain_loop
from torch import Tensor, nn

from sparsedp.batch import MicroBatch
from sparsedp.clipping import FlatClip, Identity, Standardized
from sparsedp.grad_sample import ENGINES, ClippedSumQuery

pytestmark = pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel")

TOLERANCE = {torch.float64: 1e-9, torch.float32: 3e-5, torch.bfloat16: 5e-2}
"""Largest error of a sum, in units of the clip norm times the number of samples."""


def check(engine, rows, gradients, support, geometry, tolerance):
    parts = (
        (geometry.centre.numpy(), geometry.scale.numpy())
        if isinstance(geometry, Standardized)
        else (0.0, 1.0)
    )
    z = measured(gradients, support.indices.numpy(), *parts)
    clip_norm = median_norm(z)
    found = engine.clipped_sum([MicroBatch(rows)], ClippedSumQuery(support, FlatClip(clip_norm), geometry))
    assert found.dtype == torch.float64
    assert found.shape == (support.size,)
    error = np.linalg.norm(found.numpy() - clipped_sum(z, clip_norm))
    assert error <= tolerance * clip_norm * len(gradients)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["float32", "float64"])
@pytest.mark.parametrize("geometry", GEOMETRIES)
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("kind", ENGINES)
def test_the_engine_equals_a_plain_loop(kind, case, geometry, dtype):
    model, rows = CASES[case].make(dtype)
    gradients = plain_loop(model, loss, rows)
    engine = ENGINES[kind](model, loss)
    for support in supports(engine.layout).values():
        check(engine, rows, gradients, support, GEOMETRIES[geometry](gradients, support), TOLERANCE[dtype])


@pytest.mark.parametrize(
    "case", ["linear", "linear-sequence", "conv2d", "conv2d-shifts", "embedding", "layer-norm", "group-norm"]
)
@pytest.mark.parametrize("kind", ENGINES)
def test_the_engine_takes_half_precision(kind, case):
    model, rows = CASES[case].make(torch.bfloat16)
    gradients = plain_loop(model, loss, rows)
    engine = ENGINES[kind](model, loss)
    for support in supports(engine.layout).values():
        check(
            engine,
            rows,
            gradients,
            support,
            GEOMETRIES["identity"](gradients, support),
            TOLERANCE[torch.bfloat16],
        )


@pytest.mark.parametrize("case", {**KNOWN, **NETWORKS})
def test_known_layers_need_no_reference_path(case, caplog):
    model, rows = CASES[case].make(torch.float32)
    with caplog.at_level(logging.DEBUG, logger="sparsedp"):
        engine = ENGINES["bookkeeping"](model, loss)
        engine.clipped_sum(
            [MicroBatch(rows)], ClippedSumQuery(supports(engine.layout)["full"], FlatClip(1.0))
        )
    assert caplog.records == []


def test_an_operation_without_a_formula_is_named_in_the_log(caplog):
    class Blends(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.target = nn.Parameter(torch.ones(4))

        def forward(self, x: Tensor) -> Tensor:
            return torch.lerp(x, self.target, 0.3)

    model, rows = Case(Blends, (4,)).make(torch.float64)
    engine = ENGINES["bookkeeping"](model, loss)
    support = supports(engine.layout)["full"]
    with caplog.at_level(logging.WARNING, logger="sparsedp"):
        check(engine, rows, plain_loop(model, loss, rows), support, Identity(), 1e-9)
    assert len(caplog.records) == 1
    assert "'target'" in caplog.text
    assert "LerpBackward0 has no formula" in caplog.text
