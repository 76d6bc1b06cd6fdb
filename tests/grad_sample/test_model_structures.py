"""Models that share, re-use, freeze or hide parameters: the right sum or a clear error, never a silent wrong one."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from gradient_cases import loss, supports
from gradient_oracle import clipped_sum, measured, median_norm, plain_loop
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from sparsedp.batch import MicroBatch, slice_batch
from sparsedp.clipping import FlatClip
from sparsedp.errors import ModelError, SparseDPError
from sparsedp.grad_sample import ENGINES, BookKeepingEngine, ClippedSumQuery
from sparsedp.grad_sample.isolation import same_draws
from sparsedp.parameters import Support
from sparsedp.randomness import SeededRandomness

SAMPLES = 7


def assert_right(model: nn.Module, inputs: Tensor, loss=loss, kinds=tuple(ENGINES)) -> None:
    """Both engines agree with a plain loop of `backward` on every kind of support."""
    rows = (inputs, torch.linspace(0.2, 2.0, len(inputs)))
    gradients = plain_loop(model, loss, rows)
    for kind in kinds:
        engine = ENGINES[kind](model, loss)
        for name, support in supports(engine.layout).items():
            z = measured(gradients, support.indices.numpy())
            clip_norm = median_norm(z)
            found = engine.clipped_sum([MicroBatch(rows)], ClippedSumQuery(support, FlatClip(clip_norm)))
            error = np.linalg.norm(found.numpy() - clipped_sum(z, clip_norm))
            assert error <= 3e-5 * clip_norm * len(inputs), (kind, name)


def inputs(*shape: int) -> Tensor:
    return torch.randn(SAMPLES, *shape, generator=torch.Generator().manual_seed(1))


def tokens(length: int, below: int) -> Tensor:
    return torch.randint(0, below, (SAMPLES, length), generator=torch.Generator().manual_seed(1))


class By(nn.Module):
    """A model out of named layers and a forward function."""

    def __init__(self, forward, **layers: nn.Module) -> None:
        super().__init__()
        for name, layer in layers.items():
            self.add_module(name, layer)
        self._forward = forward

    def forward(self, x: Tensor) -> Tensor:
        return self._forward(self, x)


def test_two_layers_that_share_a_parameter():
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))
    model[2].weight = model[0].weight
    assert_right(model, inputs(4))


def test_two_convolutions_that_share_a_weight_in_different_ways():
    model = nn.Sequential(nn.Conv2d(2, 2, 3, padding=1), nn.Tanh(), nn.Conv2d(2, 2, 3, stride=2))
    model[2].weight = model[0].weight
    assert_right(model, inputs(2, 5, 5))


def test_an_embedding_tied_to_the_output_layer():
    model = nn.Sequential(nn.Embedding(6, 4), nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 6, bias=False))
    model[3].weight = model[0].weight
    assert_right(model, tokens(5, 6))


def test_a_layer_called_twice():
    model = By(lambda m, x: m.layer(torch.tanh(m.layer(x))), layer=nn.Linear(4, 4))
    assert_right(model, inputs(4))


def test_one_module_under_two_names():
    layer = nn.Linear(4, 4)
    assert_right(nn.Sequential(layer, nn.Tanh(), layer), inputs(4))


def test_a_convolution_called_on_two_sizes():
    model = By(
        lambda m, x: m.conv(x).flatten(1).sum(1, keepdim=True) + m.conv(x[:, :, ::2, ::2]).flatten(1),
        conv=nn.Conv2d(17, 3, 2),
    )
    assert_right(model, inputs(17, 4, 4))


def test_a_parameter_used_by_hand_outside_its_layer():
    model = By(lambda m, x: F.linear(m.embedding(x).tanh(), m.embedding.weight), embedding=nn.Embedding(6, 4))
    assert_right(model, tokens(5, 6))


def test_a_parameter_used_by_hand_only():
    model = By(
        lambda m, x: m.body(x) @ m.head.weight.T, body=nn.Linear(4, 3), head=nn.Linear(3, 2, bias=False)
    )
    assert_right(model, inputs(4))


def test_frozen_layers():
    model = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 5), nn.Tanh(), nn.Linear(5, 3))
    model[0].requires_grad_(False)
    model[4].requires_grad_(False)
    assert_right(model, inputs(4))


@pytest.mark.parametrize("frozen", ["weight", "bias"])
@pytest.mark.parametrize(
    ("layer", "shape"), [(nn.Linear(4, 3), (4,)), (nn.Conv1d(4, 3, 2), (4, 5)), (nn.GroupNorm(2, 4), (4, 3))]
)
def test_partly_frozen_layers(layer, shape, frozen):
    layer.requires_grad_(True)
    getattr(layer, frozen).requires_grad_(False)
    assert_right(nn.Sequential(layer, nn.Tanh()), inputs(*shape))


@pytest.mark.parametrize(
    "forward",
    [
        lambda m, x: m.used(x),
        lambda m, x: m.used(x) + 0 * m.other(x).detach(),
        lambda m, x: (m.other(x), m.used(x))[1],
    ],
    ids=["never called", "detached", "output ignored"],
)
def test_parameters_that_get_no_gradient_count_as_zero(forward):
    assert_right(By(forward, other=nn.Linear(4, 3), used=nn.Linear(4, 3)), inputs(4))


def test_a_layer_called_without_gradient():
    def forward(m: nn.Module, x: Tensor) -> Tensor:
        with torch.no_grad():
            features = m.body(x)
        return m.head(features)

    assert_right(By(forward, body=nn.Linear(4, 4), head=nn.Linear(4, 3)), inputs(4))


def test_mixed_dtypes_in_one_model():
    model = By(lambda m, x: m.head(m.body(x).double()), body=nn.Linear(4, 5), head=nn.Linear(5, 3).double())
    assert_right(model, inputs(4))


def test_an_in_place_activation_after_a_layer():
    model = nn.Sequential(nn.Linear(4, 5), nn.ReLU(inplace=True), nn.Linear(5, 3), nn.ELU(inplace=True))
    assert_right(model, inputs(4))


def test_an_in_place_activation_after_a_layer_on_sequences_stays_on_the_fast_path():
    model = nn.Sequential(nn.Linear(4, 5), nn.ReLU(inplace=True), nn.Linear(5, 3), nn.ELU(inplace=True))
    assert_right(model, inputs(3, 4))
    engine = BookKeepingEngine(model, loss)
    query = ClippedSumQuery(Support.full(engine.layout.dimension), FlatClip(1.0))
    engine.clipped_sum([MicroBatch((inputs(3, 4), torch.ones(SAMPLES)))], query)
    assert engine.notes == ()


def test_an_in_place_activation_on_a_turned_sequence_is_right():
    def forward(m: nn.Module, x: Tensor) -> Tensor:
        turned = m.body(x).transpose(0, 1)
        turned.relu_()
        return m.head(turned).transpose(0, 1)

    assert_right(By(forward, body=nn.Linear(4, 5), head=nn.Linear(5, 3)), inputs(3, 4))


def test_an_in_place_write_to_a_part_of_an_output():
    def forward(m: nn.Module, x: Tensor) -> Tensor:
        hidden = m.body(x)
        hidden[:, :2] *= 3
        return m.head(hidden)

    assert_right(By(forward, body=nn.Linear(4, 5), head=nn.Linear(5, 3)), inputs(4))


def test_an_input_overwritten_after_use_is_refused():
    def forward(m: nn.Module, x: Tensor) -> Tensor:
        hidden = torch.tanh(x)
        first = m.first(hidden)
        hidden.mul_(2)
        return first + m.second(hidden)

    model = By(forward, first=nn.Linear(4, 3), second=nn.Linear(4, 3))
    engine = BookKeepingEngine(model, loss)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        engine.clipped_sum(
            [MicroBatch((inputs(4), torch.ones(SAMPLES)))], ClippedSumQuery(Support.full(30), FlatClip(1.0))
        )


@pytest.mark.parametrize("length", [3, SAMPLES])
def test_a_model_that_flattens_batch_and_sequence(length):
    model = By(lambda m, x: m.layer(x.reshape(-1, 4)).reshape(len(x), -1), layer=nn.Linear(4, 3))
    assert_right(model, inputs(length, 4))


@pytest.mark.parametrize(("length", "samples"), [(3, SAMPLES), (SAMPLES, SAMPLES), (2, 2), (3, 3), (1, 1)])
def test_a_model_that_puts_the_sequence_first(length, samples):
    def forward(m: nn.Module, x: Tensor) -> Tensor:
        return m.layer(x.transpose(0, 1).contiguous()).transpose(0, 1)

    assert_right(By(forward, layer=nn.Linear(4, 3)), inputs(length, 4)[:samples])


def test_a_layer_called_by_keyword():
    assert_right(By(lambda m, x: m.layer(input=x), layer=nn.Linear(4, 3)), inputs(4))


def test_activation_checkpointing():
    model = By(
        lambda m, x: checkpoint(m.body, x, use_reentrant=False),
        body=nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3)),
    )
    assert_right(model, inputs(4))


def test_a_layer_with_a_forward_hook_of_the_users_own():
    model = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3))
    model[0].register_forward_hook(lambda module, args, output: output * 3)
    assert_right(model, inputs(4))


def test_the_engine_leaves_no_hooks_and_no_gradients_behind():
    model = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3))
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    for make in ENGINES.values():
        engine = make(model, loss)
        rows = (inputs(4), torch.ones(SAMPLES))
        total = engine.clipped_sum([MicroBatch(rows)], ClippedSumQuery(Support.full(43), FlatClip(1.0)))
        assert not total.requires_grad
    assert all(not module._forward_hooks for module in model.modules())
    assert all(p.grad is None and torch.equal(p, before[name]) for name, p in model.named_parameters())


@pytest.mark.parametrize("kind", ENGINES)
def test_it_works_where_gradients_are_switched_off(kind):
    model = nn.Linear(4, 3)
    rows = (inputs(4), torch.ones(SAMPLES))
    query = ClippedSumQuery(Support.full(15), FlatClip(1.0))
    expected = ENGINES[kind](model, loss).clipped_sum([MicroBatch(rows)], query)
    with torch.no_grad():
        assert torch.equal(ENGINES[kind](model, loss).clipped_sum([MicroBatch(rows)], query), expected)


@pytest.mark.parametrize("kind", ENGINES)
def test_dropout_draws_a_mask_per_example_and_step(kind):
    model = nn.Sequential(nn.Linear(4, 64), nn.Dropout(0.5), nn.Tanh(), nn.Linear(64, 3))
    alike = (torch.ones(SAMPLES, 4), torch.ones(SAMPLES))
    engine = ENGINES[kind](model, loss)
    query = ClippedSumQuery(Support.full(engine.layout.dimension), FlatClip(1e3))

    def total(step: int, rows: int = SAMPLES) -> Tensor:
        seed = SeededRandomness(0).secret((step,)).model_seed(0)
        return engine.clipped_sum([MicroBatch(slice_batch(alike, slice(rows)), seed=seed)], query)

    assert bool(total(0).isfinite().all())
    assert torch.equal(total(0), total(0))
    assert not torch.equal(total(0), total(1))
    with same_draws():
        torch.testing.assert_close(total(0), SAMPLES * total(0, 1), rtol=1e-4, atol=1e-5)
    assert float((total(0) - SAMPLES * total(0, 1)).norm()) > 0.1 * float(total(0).norm())


def test_dropout_of_nothing_changes_nothing():
    assert_right(nn.Sequential(nn.Linear(4, 5), nn.Dropout(0.0), nn.Tanh(), nn.Linear(5, 3)), inputs(4))


def test_dropout_inside_an_unknown_module_is_finite_and_bounded():
    class Attend(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attention = nn.MultiheadAttention(4, 2, dropout=0.5, batch_first=True)

        def forward(self, x: Tensor) -> Tensor:
            return self.attention(x, x, x)[0]

    engine = BookKeepingEngine(Attend(), loss)
    query = ClippedSumQuery(Support.full(engine.layout.dimension), FlatClip(0.5))
    seed = SeededRandomness(0).secret((0,)).model_seed(0)
    total = engine.clipped_sum([MicroBatch((inputs(3, 4), torch.ones(SAMPLES)), seed=seed)], query)
    assert 0 < float(total.norm()) <= 0.5 * SAMPLES


@pytest.mark.parametrize("kind", ENGINES)
@pytest.mark.parametrize("reduce", [torch.mean, torch.sum])
def test_a_scalar_loss_is_refused_with_the_remedy(kind, reduce):
    model = nn.Linear(4, 3)
    engine = ENGINES[kind](model, lambda model, rows: reduce(model(rows)))
    with pytest.raises(SparseDPError, match='reduction="none"'):
        engine.clipped_sum([MicroBatch(inputs(4))], ClippedSumQuery(Support.full(15), FlatClip(1.0)))


def test_a_column_of_losses_is_accepted():
    def column(model: nn.Module, rows: tuple[Tensor, Tensor]) -> Tensor:
        return loss(model, rows).unsqueeze(1)

    assert_right(nn.Linear(4, 3), inputs(4), loss=column)


@pytest.mark.parametrize(
    ("layer", "complaint"),
    [
        (nn.Embedding(5, 3, scale_grad_by_freq=True), "scale_grad_by_freq"),
        (nn.Embedding(5, 3, max_norm=1.0), "max_norm"),
    ],
)
def test_embeddings_that_mix_or_rewrite_are_refused_with_the_remedy(layer, complaint):
    with pytest.raises(ModelError, match=complaint):
        BookKeepingEngine(nn.Sequential(layer), loss)


def test_a_model_that_changed_since_is_refused():
    model = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 3))
    engine = BookKeepingEngine(model, loss)
    model[0].requires_grad_(False)
    with pytest.raises(ModelError, match="changed since"):
        engine.clipped_sum(
            [MicroBatch((inputs(4), torch.ones(SAMPLES)))], ClippedSumQuery(Support.full(27), FlatClip(1.0))
        )


def test_weights_changed_between_steps_are_seen():
    model = nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 3))
    rows = (inputs(4), torch.ones(SAMPLES))
    query = ClippedSumQuery(Support.full(27), FlatClip(1.0))
    engine = BookKeepingEngine(model, loss)
    engine.clipped_sum([MicroBatch(rows)], query)
    with torch.no_grad():
        model[2].weight.mul_(-2)
    expected = BookKeepingEngine(model, loss).clipped_sum([MicroBatch(rows)], query)
    assert torch.equal(engine.clipped_sum([MicroBatch(rows)], query), expected)
