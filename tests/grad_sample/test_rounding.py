"""Float rounding may not carry a record past the clip: norms and sums must see the same numbers."""

import pytest
import torch
from torch import nn

from sparsedp.batch import MicroBatch
from sparsedp.clipping import FlatClip, Standardized
from sparsedp.grad_sample import BookKeepingEngine, ClippedSumQuery, ReferenceEngine, bookkeeping
from sparsedp.parameters import Support


def output_sum(model, rows):
    return model(rows).flatten(1).sum(1)


def linear_loss(model, rows):
    """The gradient of a row is the row itself, so that its norm is known."""
    return model(rows).squeeze(1)


@pytest.mark.parametrize("size", [1e3, 1e5, 1e7])
@pytest.mark.parametrize("kind", ["sequence", "convolution"])
def test_a_record_whose_positions_cancel_cannot_disturb_the_sum_of_the_others(monkeypatch, kind, size):
    """Its norm is about zero; its terms must not pass through a sum shared with the others."""
    monkeypatch.setitem(bookkeeping.CHUNK_BYTES, "cpu", 1 << 16)
    generator = torch.Generator().manual_seed(0)
    if kind == "sequence":
        model = nn.Linear(64, 64, bias=False)
        others, record = torch.randn(40, 4, 64, generator=generator), torch.zeros(1, 4, 64)
    else:
        model = nn.Conv2d(16, 64, 3, bias=False)
        others, record = torch.randn(40, 16, 4, 4, generator=generator), torch.zeros(1, 16, 4, 4)
        others = torch.cat([others[:, :, :, :3], others[:, :, :, :3], others[:, :, :, :3]], dim=3)
        record = torch.zeros(1, 16, 4, 9)
    flat = record.view(1, 4, -1) if kind == "sequence" else record[:, :, :, :3]
    if kind == "sequence":
        flat[0, 0], flat[0, 1] = size, -size
    else:
        record[..., :3], record[..., 3:6] = size, -size
        record[..., 6:] = 0
    engine = BookKeepingEngine(model, output_sum)
    query = ClippedSumQuery(Support.full(model.weight.numel()), FlatClip(1.0))
    without = engine.clipped_sum([MicroBatch(others)], query)
    joined = engine.clipped_sum([MicroBatch(torch.cat([others, record]))], query)
    assert float((joined - without).norm()) <= 1


@pytest.mark.parametrize("ratio", [1.0, 0.5])
def test_a_constant_record_in_many_features_stays_within_the_clip(ratio):
    """Long float32 sums of equal squares fall short of the truth."""
    inputs = 200_000
    model = nn.Linear(inputs, 1, bias=False)
    support = Support.from_mask(torch.arange(inputs) % 10 < 10 * ratio)
    row = torch.full((1, inputs), 0.7)
    total = BookKeepingEngine(model, linear_loss).clipped_sum(
        [MicroBatch(row)], ClippedSumQuery(support, FlatClip(1.0))
    )
    assert float(total.norm()) <= 1


def test_a_constant_record_in_a_large_sequence_layer_stays_within_the_clip():
    model = nn.Linear(512, 512, bias=False)
    query = ClippedSumQuery(Support.full(512 * 512), FlatClip(1.0))
    total = BookKeepingEngine(model, output_sum).clipped_sum(
        [MicroBatch(torch.full((1, 4, 512), 0.7))], query
    )
    assert float(total.norm()) <= 1


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


class Scaled(nn.Module):
    def __init__(self, inner):
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.inner = inner

    def forward(self, x):
        return self.scale * self.inner(x)


class UsesALayerInsideAndOutside(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Linear(5, 5)
        self.custom = Scaled(self.body)

    def forward(self, x):
        return self.custom(torch.tanh(self.body(x)))


def test_a_layer_used_inside_and_outside_an_unknown_module_is_counted_once():
    model = UsesALayerInsideAndOutside()
    rows = MicroBatch(torch.randn(6, 5))
    query = ClippedSumQuery(Support.full(31), FlatClip(0.5))
    expected = ReferenceEngine(model, output_sum).clipped_sum([rows], query)
    torch.testing.assert_close(BookKeepingEngine(model, output_sum).clipped_sum([rows], query), expected)


def test_the_reference_engine_leaves_a_module_met_under_two_names_as_it_was():
    model = UsesALayerInsideAndOutside()
    before = dict(model.named_parameters())
    ReferenceEngine(model, output_sum).clipped_sum(
        [MicroBatch(torch.randn(2, 5))], ClippedSumQuery(Support.full(31), FlatClip(1.0))
    )
    assert all(before[name] is parameter for name, parameter in model.named_parameters())
    output_sum(model, torch.randn(2, 5)).sum().backward()
    assert all(parameter.grad is not None for parameter in model.parameters())
