"""Flat, automatic and per-layer clips: a plain loop agrees, and no unit moves the sum by more, rounding included."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from gradient_cases import CASES, By, loss, output_sum, plain_loop, supports, unit_means
from structure_cases import STRUCTURES
from torch import Tensor, nn

from sparsedp import PrivacyError
from sparsedp.batch import MicroBatch
from sparsedp.clipping import GAMMA, AutomaticClip, Clip, FlatClip, LayerClip, Standardized
from sparsedp.grad_sample import ENGINES, BookKeepingEngine, ClippedSumQuery
from sparsedp.parameters import ParameterLayout, Support

MODELS = ["perceptron", "cnn", "text", "attention", "linear-sequence", "own-parameter"]
MARGIN = 1.001
CLIPS = {
    "flat": lambda layout: FlatClip(0.3),
    "automatic": lambda layout: AutomaticClip(0.3),
    "by layer": lambda layout: LayerClip(((layout.slots[0].name, 0.1), ("*bias*", 0.2), ("*", 0.05))),
    "one group": lambda layout: LayerClip((("*", 0.3),)),
}


def factors_of(clip: Clip, layout: ParameterLayout, rows: np.ndarray) -> np.ndarray:
    """The factor of every number, written out: one row after another, one parameter after another."""
    found = np.zeros_like(rows)
    for row, out in zip(rows, found, strict=True):
        if not isinstance(clip, LayerClip):
            norm, bound = np.sqrt((row**2).sum()), clip.norm / MARGIN
            automatic = isinstance(clip, AutomaticClip)
            out[:] = bound / (norm + GAMMA) if automatic else min(1.0, bound / max(norm, 1e-300))
            continue
        group = np.concatenate([np.full(slot.size, clip.group(slot.name)) for slot in layout])
        for number, (_, bound) in enumerate(clip.norms):
            norm = np.sqrt((row[group == number] ** 2).sum())
            out[group == number] = min(1.0, bound / MARGIN / max(norm, 1e-300))
    return found


@pytest.mark.parametrize("kind", CLIPS)
@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("engine", ENGINES)
def test_an_engine_clips_as_a_plain_loop_does(engine, model, kind):
    network, rows = CASES[model].make(torch.float64, 6)
    units = torch.tensor([0, 0, 1, 2, 2, 2])
    built = ENGINES[engine](network, loss)
    clip = CLIPS[kind](built.layout)
    gradients = plain_loop(network, loss, rows)
    for support in ("full", "random", "rows"):
        chosen = supports(built.layout)[support]
        active = np.isin(np.arange(chosen.dimension), chosen.indices.numpy())
        for given, each in ((None, gradients), (units, unit_means(gradients, units.tolist()))):
            z = np.where(active, each, 0.0)
            wanted = (factors_of(clip, built.layout, z) * z).sum(0)[active]
            found = built.clipped_sum([MicroBatch(rows, given)], ClippedSumQuery(chosen, clip))
            torch.testing.assert_close(found, torch.from_numpy(wanted), rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("kind", CLIPS)
def test_the_largest_of_each_example_are_clipped_by_group_too(kind):
    network, rows = CASES["perceptron"].make(torch.float64, 5)
    layout = ParameterLayout.of(network)
    query = ClippedSumQuery(supports(layout)["random"], CLIPS[kind](layout), per_sample_top=0.4)
    one, other = (engine(network, loss).clipped_sum([MicroBatch(rows)], query) for engine in ENGINES.values())
    torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-9)


CRAFTED = {
    "ordinary": (1.0, 1.0),
    "nan": (math.nan, 1.0),
    "infinite": (1.0, math.inf),
    "huge": (1e30, 1e8),
    "large": (1.0, 1e6),
    "zero": (1.0, 0.0),
    "tiny": (1.0, 1e-12),
    "tiny and huge": (1e-20, 1e25),
}


ZOO = CASES | STRUCTURES
TRIED = [(engine, model, kind) for engine in ENGINES for model in MODELS for kind in CLIPS]
TRIED += [("bookkeeping", model, "flat") for model in ZOO if model not in MODELS]


@pytest.mark.filterwarnings("ignore:Using padding='same'", "ignore:.*(nested_tensor|weight_norm)")
@pytest.mark.parametrize(("engine", "model", "kind"), TRIED)
def test_leaving_one_unit_out_moves_the_sum_by_at_most_the_sensitivity(engine, model, kind):
    network, rows = ZOO[model].make(torch.float32, 6)
    built = ENGINES[engine](network, loss)
    clip = CLIPS[kind](built.layout)
    query = ClippedSumQuery(Support.full(built.layout.dimension), clip)
    without = built.clipped_sum([MicroBatch((rows[0][1:], rows[1][1:]))], query)
    for by_input, by_loss in CRAFTED.values():
        inputs, targets = rows[0].clone(), rows[1].clone()
        if inputs.is_floating_point():
            inputs[0] *= by_input
        targets[0] *= by_loss
        moved = built.clipped_sum([MicroBatch((inputs, targets))], query) - without
        assert float(moved.norm()) <= clip.sensitivity
        if isinstance(clip, LayerClip):
            for slot in built.layout:
                assert float(moved[slot.span].norm()) <= clip.norms[clip.group(slot.name)][1]


@pytest.mark.parametrize("engine", ENGINES)
def test_a_unit_that_fills_every_group_reaches_the_root_of_the_squares(engine):
    """So no smaller sensitivity would be true: the noise is scaled by it."""
    network, rows = CASES["perceptron"].make(torch.float64, 1)
    built = ENGINES[engine](network, loss)
    clip = LayerClip(tuple((slot.name, 0.1 * (1 + number)) for number, slot in enumerate(built.layout)))
    extreme = (rows[0], rows[1] * 1e6)
    query = ClippedSumQuery(Support.full(built.layout.dimension), clip)
    found = float(built.clipped_sum([MicroBatch(extreme)], query).norm())
    assert found == pytest.approx(clip.sensitivity / MARGIN, rel=1e-6)
    assert clip.sensitivity == pytest.approx(math.sqrt(sum(norm**2 for _, norm in clip.norms)))


@pytest.mark.parametrize("clip", [FlatClip(0.7), AutomaticClip(0.7), LayerClip((("a", 0.4), ("*", 0.6)))])
def test_a_tightened_clip_has_at_most_the_bound_as_its_sensitivity(clip):
    assert clip.tightened(0.1).sensitivity <= 0.1 * (1 + 1e-12)
    assert clip.tightened(math.inf) == clip


def test_the_first_pattern_that_matches_decides():
    clip = LayerClip((("0.*", 1.0), ("*.weight", 2.0), ("*", 3.0)))
    assert [clip.group(name) for name in ("0.weight", "1.weight", "1.bias")] == [0, 1, 2]


@pytest.mark.parametrize(
    ("norms", "match"),
    [
        ((("0.*", 1.0),), "no pattern matches the parameter 'weight'"),
        ((("*", 1.0), ("bias", 1.0)), r"\['bias'\] are the first match of no trainable parameter"),
    ],
)
def test_patterns_that_leave_out_a_parameter_or_match_none_are_refused(norms, match):
    with pytest.raises(PrivacyError, match=match):
        LayerClip(norms).check([name for name, _ in nn.Linear(2, 2).named_parameters()])


# Float rounding may not carry a record past the clip: norms and sums must see the same numbers.


def linear_loss(model, rows):
    """The gradient of a row is the row itself, so that its norm is known."""
    return model(rows).squeeze(1)


@pytest.mark.parametrize(
    ("inputs", "every"), [(8192, 2), (8192, 3), (8192, 10), (200_000, 2), (200_000, None)]
)
@pytest.mark.parametrize("value", [0.7, 1 / 3, 0.1234567])
def test_a_constant_record_in_many_features_stays_within_the_clip(value, inputs, every):
    """Long float32 sums of equal squares fall short of the truth."""
    left_out = torch.zeros(inputs, dtype=torch.bool) if every is None else torch.arange(inputs) % every == 0
    query = ClippedSumQuery(Support((~left_out).nonzero().flatten(), len(left_out)), FlatClip(1.0))
    engine = BookKeepingEngine(nn.Linear(inputs, 1, bias=False), linear_loss)
    assert float(engine.clipped_sum([MicroBatch(torch.full((1, inputs), value))], query).norm()) <= 1


@pytest.mark.parametrize("centre", [10.0, 1000.0])
def test_a_far_centre_does_not_let_rounding_past_the_clip(centre):
    generator = torch.Generator().manual_seed(1)
    model = nn.Linear(200, 1, bias=False)
    geometry = Standardized(torch.full((200,), centre), torch.ones(200))
    query = ClippedSumQuery(Support.full(200), FlatClip(1.0), geometry)
    rows = centre + torch.randn(2000, 200, generator=generator)
    engine = BookKeepingEngine(model, linear_loss)
    change = engine.clipped_sum([MicroBatch(rows)], query) - engine.clipped_sum(
        [MicroBatch(rows[:-1])], query
    )
    assert float(change.norm()) <= 1


# Thousands of records that all pull the same way: one more moves the sum by at most C, in every dtype.


def moved(model: nn.Module, rows: Tensor, without: int) -> float:
    """How far one record moves the sum of all."""
    engine = BookKeepingEngine(model, output_sum)
    query = ClippedSumQuery(Support.full(engine.layout.dimension), FlatClip(1.0))
    others = torch.cat([rows[:without], rows[without + 1 :]])
    sums = [engine.clipped_sum([MicroBatch(x)], query) for x in (rows, others)]
    assert not engine.falls_back
    return float((sums[0] - sums[1]).norm())


def aligned(kind: str, count: int, shape: tuple[int, ...]) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    base = 20 * torch.rand(1, *shape, generator=generator) + 4
    if kind == "identical":
        return base.repeat(count, *[1] * len(shape))
    if kind == "nearly":
        return base + 0.2 * torch.rand(count, *shape, generator=generator)
    return (base + 6 * torch.rand(7, *shape, generator=generator))[torch.arange(count) % 7]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("kind", ["identical", "nearly", "periodic"])
def test_a_module_without_a_fast_path_in_half_precision(kind, dtype):
    rows = aligned(kind, 2000, (50,))
    model = By(lambda m, x: (x.to(dtype) * m.gain).sum(1, keepdim=True), gain=torch.ones(50, dtype=dtype))
    assert all(moved(model, rows, without) <= 1 for without in (0, 1000, 1999))


@pytest.mark.parametrize("kind", ["identical", "nearly", "periodic"])
@pytest.mark.parametrize(
    ("layer", "shape"),
    [
        (nn.Linear(50, 1, bias=False), (50,)),
        (nn.Linear(600, 3, bias=False), (600,)),
        (nn.Linear(20, 20), (4, 20)),
        (nn.Conv2d(3, 8, 3), (3, 6, 6)),
        (nn.Conv2d(16, 4, 3), (16, 4, 4)),
        (nn.LayerNorm(30), (30,)),
    ],
    ids=["linear", "few outputs", "sequence", "convolution", "shifts", "norm"],
)
def test_layers_of_the_table_in_float32(layer, shape, kind):
    rows = aligned(kind, 4000, shape)
    assert all(moved(layer, rows, without) <= 1 for without in (0, 3999))
