"""The fast engine equals a plain loop for layers of any shape hypothesis can think of."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from gradient_cases import GEOMETRIES, Case, loss, supports
from gradient_oracle import clipped_sum, measured, median_norm, plain_loop
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import nn

from sparsedp.batch import MicroBatch
from sparsedp.clipping import FlatClip, Standardized
from sparsedp.grad_sample import BookKeepingEngine, ClippedSumQuery

pytestmark = pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel")

few = st.integers(1, 4)


@st.composite
def linears(draw) -> Case:
    inputs, outputs, bias = draw(st.integers(1, 12)), draw(st.integers(1, 12)), draw(st.booleans())
    between = tuple(draw(st.lists(few, max_size=2)))
    return Case(lambda: nn.Linear(inputs, outputs, bias=bias), (*between, inputs))


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
    outputs = groups * draw(few)
    bias = draw(st.booleans())
    return Case(
        lambda: kind(inputs, outputs, kernel, stride, padding, dilation, groups, bias, mode), (inputs, *sizes)
    )


@st.composite
def embeddings(draw) -> Case:
    rows, width = draw(st.integers(1, 8)), draw(few)
    padding = draw(st.one_of(st.none(), st.integers(0, rows - 1)))
    shape = tuple(draw(st.lists(st.integers(1, 6), max_size=2)))
    return Case(lambda: nn.Embedding(rows, width, padding_idx=padding), shape, tokens=rows)


@st.composite
def norms(draw) -> Case:
    sizes = tuple(draw(st.integers(2, 5)) for _ in range(draw(st.integers(1, 3))))
    axes = draw(st.integers(1, len(sizes)))
    groups = draw(st.sampled_from([g for g in (1, 2, 3) if sizes[0] % g == 0 and math.prod(sizes) > g]))
    kinds = [
        lambda: nn.LayerNorm(sizes[-axes:]),
        lambda: nn.RMSNorm(sizes[-axes:]),
        lambda: nn.GroupNorm(groups, sizes[0]),
    ]
    return Case(draw(st.sampled_from(kinds)), sizes)


@settings(max_examples=120)
@given(
    st.one_of(linears(), convolutions(), convolutions(), embeddings(), norms()),
    st.integers(1, 20),
    st.sampled_from(sorted(GEOMETRIES)),
    st.sampled_from(["full", "random", "one", "rows"]),
    st.integers(0, 1000),
)
def test_the_fast_engine_equals_a_plain_loop(case, samples, geometry, kind, seed):
    model, rows = case.make(torch.float64, samples, seed)
    gradients = plain_loop(model, loss, rows)
    engine = BookKeepingEngine(model, loss)
    support = supports(engine.layout)[kind]
    space = GEOMETRIES[geometry](gradients, support)
    parts = (space.centre.numpy(), space.scale.numpy()) if isinstance(space, Standardized) else (0.0, 1.0)
    z = measured(gradients, support.indices.numpy(), *parts)
    clip_norm = median_norm(z)
    found = engine.clipped_sum([MicroBatch(rows)], ClippedSumQuery(support, FlatClip(clip_norm), space))
    np.testing.assert_allclose(found.numpy(), clipped_sum(z, clip_norm), rtol=1e-8, atol=1e-8 * clip_norm)
