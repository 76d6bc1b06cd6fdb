"""Models as people write them: what no layer answers for is followed through the graph."""

from __future__ import annotations

import gc
import logging

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from gradient_cases import (
    GEOMETRIES,
    STRUCTURES,
    By,
    Case,
    autocast,
    bare,
    by,
    clipped_sum,
    cosine,
    linear,
    loss,
    measured,
    median_norm,
    plain_loop,
    supports,
    unit_means,
)
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence
from torch.utils.checkpoint import checkpoint

from sparsedp.batch import MicroBatch, slice_batch
from sparsedp.clipping import FlatClip, Standardized
from sparsedp.errors import ModelError, SparseDPError
from sparsedp.grad_sample import ENGINES, BookKeepingEngine, ClippedSumQuery
from sparsedp.grad_sample.isolation import same_draws
from sparsedp.grad_sample.rules import RULES, Rule
from sparsedp.parameters import Support
from sparsedp.randomness import SeededRandomness

# What real models are made of, on the fast path alone: equal to a plain loop of `backward`, nothing in the log.


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


# Models that share, re-use, freeze or hide parameters: the right sum or a clear error, never a silent wrong one.


SAMPLES = 7


def assert_equals_the_loop(model: nn.Module, inputs: Tensor, loss=loss, kinds=tuple(ENGINES)) -> None:
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


class Written(nn.Module):
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
    assert_equals_the_loop(model, inputs(4))


def test_two_convolutions_that_share_a_weight_in_different_ways():
    model = nn.Sequential(nn.Conv2d(2, 2, 3, padding=1), nn.Tanh(), nn.Conv2d(2, 2, 3, stride=2))
    model[2].weight = model[0].weight
    assert_equals_the_loop(model, inputs(2, 5, 5))


def test_an_embedding_tied_to_the_output_layer():
    model = nn.Sequential(nn.Embedding(6, 4), nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 6, bias=False))
    model[3].weight = model[0].weight
    assert_equals_the_loop(model, tokens(5, 6))


def test_a_layer_called_twice():
    model = Written(lambda m, x: m.layer(torch.tanh(m.layer(x))), layer=nn.Linear(4, 4))
    assert_equals_the_loop(model, inputs(4))


def test_one_module_under_two_names():
    layer = nn.Linear(4, 4)
    assert_equals_the_loop(nn.Sequential(layer, nn.Tanh(), layer), inputs(4))


def test_a_convolution_called_on_two_sizes():
    model = Written(
        lambda m, x: m.conv(x).flatten(1).sum(1, keepdim=True) + m.conv(x[:, :, ::2, ::2]).flatten(1),
        conv=nn.Conv2d(17, 3, 2),
    )
    assert_equals_the_loop(model, inputs(17, 4, 4))


def test_a_parameter_used_by_hand_outside_its_layer():
    model = Written(
        lambda m, x: F.linear(m.embedding(x).tanh(), m.embedding.weight), embedding=nn.Embedding(6, 4)
    )
    assert_equals_the_loop(model, tokens(5, 6))


def test_a_parameter_used_by_hand_only():
    model = Written(
        lambda m, x: m.body(x) @ m.head.weight.T, body=nn.Linear(4, 3), head=nn.Linear(3, 2, bias=False)
    )
    assert_equals_the_loop(model, inputs(4))


def test_frozen_layers():
    model = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 5), nn.Tanh(), nn.Linear(5, 3))
    model[0].requires_grad_(False)
    model[4].requires_grad_(False)
    assert_equals_the_loop(model, inputs(4))


@pytest.mark.parametrize("frozen", ["weight", "bias"])
@pytest.mark.parametrize(
    ("layer", "shape"), [(nn.Linear(4, 3), (4,)), (nn.Conv1d(4, 3, 2), (4, 5)), (nn.GroupNorm(2, 4), (4, 3))]
)
def test_partly_frozen_layers(layer, shape, frozen):
    layer.requires_grad_(True)
    getattr(layer, frozen).requires_grad_(False)
    assert_equals_the_loop(nn.Sequential(layer, nn.Tanh()), inputs(*shape))


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
    assert_equals_the_loop(Written(forward, other=nn.Linear(4, 3), used=nn.Linear(4, 3)), inputs(4))


def test_a_layer_called_without_gradient():
    def forward(m: nn.Module, x: Tensor) -> Tensor:
        with torch.no_grad():
            features = m.body(x)
        return m.head(features)

    assert_equals_the_loop(Written(forward, body=nn.Linear(4, 4), head=nn.Linear(4, 3)), inputs(4))


def test_mixed_dtypes_in_one_model():
    model = Written(
        lambda m, x: m.head(m.body(x).double()), body=nn.Linear(4, 5), head=nn.Linear(5, 3).double()
    )
    assert_equals_the_loop(model, inputs(4))


def test_an_in_place_activation_after_a_layer():
    model = nn.Sequential(nn.Linear(4, 5), nn.ReLU(inplace=True), nn.Linear(5, 3), nn.ELU(inplace=True))
    assert_equals_the_loop(model, inputs(4))


def test_an_in_place_activation_after_a_layer_on_sequences_stays_on_the_fast_path():
    model = nn.Sequential(nn.Linear(4, 5), nn.ReLU(inplace=True), nn.Linear(5, 3), nn.ELU(inplace=True))
    assert_equals_the_loop(model, inputs(3, 4))
    engine = BookKeepingEngine(model, loss)
    query = ClippedSumQuery(Support.full(engine.layout.dimension), FlatClip(1.0))
    engine.clipped_sum([MicroBatch((inputs(3, 4), torch.ones(SAMPLES)))], query)
    assert engine.notes == ()


def test_an_in_place_activation_on_a_turned_sequence_is_right():
    def forward(m: nn.Module, x: Tensor) -> Tensor:
        turned = m.body(x).transpose(0, 1)
        turned.relu_()
        return m.head(turned).transpose(0, 1)

    assert_equals_the_loop(Written(forward, body=nn.Linear(4, 5), head=nn.Linear(5, 3)), inputs(3, 4))


def test_an_in_place_write_to_a_part_of_an_output():
    def forward(m: nn.Module, x: Tensor) -> Tensor:
        hidden = m.body(x)
        hidden[:, :2] *= 3
        return m.head(hidden)

    assert_equals_the_loop(Written(forward, body=nn.Linear(4, 5), head=nn.Linear(5, 3)), inputs(4))


def test_an_input_overwritten_after_use_is_refused():
    def forward(m: nn.Module, x: Tensor) -> Tensor:
        hidden = torch.tanh(x)
        first = m.first(hidden)
        hidden.mul_(2)
        return first + m.second(hidden)

    model = Written(forward, first=nn.Linear(4, 3), second=nn.Linear(4, 3))
    engine = BookKeepingEngine(model, loss)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        engine.clipped_sum(
            [MicroBatch((inputs(4), torch.ones(SAMPLES)))], ClippedSumQuery(Support.full(30), FlatClip(1.0))
        )


@pytest.mark.parametrize("length", [3, SAMPLES])
def test_a_model_that_flattens_batch_and_sequence(length):
    model = Written(lambda m, x: m.layer(x.reshape(-1, 4)).reshape(len(x), -1), layer=nn.Linear(4, 3))
    assert_equals_the_loop(model, inputs(length, 4))


@pytest.mark.parametrize(("length", "samples"), [(3, SAMPLES), (SAMPLES, SAMPLES), (2, 2), (3, 3), (1, 1)])
def test_a_model_that_puts_the_sequence_first(length, samples):
    def forward(m: nn.Module, x: Tensor) -> Tensor:
        return m.layer(x.transpose(0, 1).contiguous()).transpose(0, 1)

    assert_equals_the_loop(Written(forward, layer=nn.Linear(4, 3)), inputs(length, 4)[:samples])


def test_a_layer_called_by_keyword():
    assert_equals_the_loop(Written(lambda m, x: m.layer(input=x), layer=nn.Linear(4, 3)), inputs(4))


def test_activation_checkpointing():
    model = Written(
        lambda m, x: checkpoint(m.body, x, use_reentrant=False),
        body=nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3)),
    )
    assert_equals_the_loop(model, inputs(4))


def test_a_layer_with_a_forward_hook_of_the_users_own():
    model = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3))
    model[0].register_forward_hook(lambda module, args, output: output * 3)
    assert_equals_the_loop(model, inputs(4))


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
    assert_equals_the_loop(
        nn.Sequential(nn.Linear(4, 5), nn.Dropout(0.0), nn.Tanh(), nn.Linear(5, 3)), inputs(4)
    )


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

    assert_equals_the_loop(nn.Linear(4, 3), inputs(4), loss=column)


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


# Recurrent layers: the sum of a plain loop, whatever runs through them, and nothing left behind.


CELLS = {
    "lstm": (nn.LSTM, {}),
    "gru": (nn.GRU, {}),
    "rnn": (nn.RNN, {}),
    "relu": (nn.RNN, {"nonlinearity": "relu"}),
}


def cell(kind: str, **kwargs) -> nn.RNNBase:
    torch.manual_seed(0)
    layer, more = CELLS[kind]
    return layer(3, 4, num_layers=2, bidirectional=True, batch_first=True, **more, **kwargs).double()


def rows(*shape: int) -> tuple[Tensor, Tensor]:
    torch.manual_seed(1)
    return torch.randn(5, *shape, dtype=torch.float64), torch.linspace(0.2, 2.0, 5).double()


def assert_sum_is_right(model: nn.Module, batch: tuple[Tensor, Tensor], loss=loss) -> BookKeepingEngine:
    gradients = plain_loop(model, loss, batch)
    engine = BookKeepingEngine(model, loss)
    query = ClippedSumQuery(Support.full(engine.layout.dimension), FlatClip(median_norm(gradients)))
    found = engine.clipped_sum([MicroBatch(batch)], query)
    np.testing.assert_allclose(found.numpy(), clipped_sum(gradients, query.clip.norm), atol=1e-9)
    return engine


def test_a_packed_layer_inside_a_subclass_is_right():
    class Sorting(nn.GRU):
        def forward(self, x: Tensor) -> Tensor:
            lengths = 1 + (x[:, 0, 0] > 0).long() + (x[:, 1, 1] > 0)
            packed = pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)
            return super().forward(packed)[1].transpose(0, 1)

    torch.manual_seed(0)
    assert_sum_is_right(Sorting(3, 4).double(), rows(3, 3))


@pytest.mark.parametrize("kind", CELLS)
def test_a_gradient_inside_the_loss_gives_the_sum_of_a_plain_loop(kind):

    def steep(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        x = batch[0].clone().requires_grad_()
        with torch.enable_grad():
            losses = loss(model, (x, batch[1]))
            (slope,) = torch.autograd.grad(losses.sum(), x, create_graph=True)
        return losses + 10 * slope.flatten(1).square().sum(1)

    torch.manual_seed(0)
    layer, more = CELLS[kind]
    model = Written(lambda m, x: m.cell(x)[0][:, -1], cell=layer(3, 4, batch_first=True, **more).double())
    assert_sum_is_right(model, rows(2, 3), steep)


def test_frozen_weights_and_a_frozen_layer_pass_gradients_on():
    def forward(m: nn.Module, x: Tensor) -> Tensor:
        return m.cell(m.body(x))[0] + m.other(m.body(x))[0]

    model = Written(forward, body=nn.Linear(3, 3), cell=cell("lstm"), other=cell("gru")).double()
    model.other.requires_grad_(False)
    model.cell.weight_hh_l0.requires_grad_(False)
    assert assert_sum_is_right(model, rows(3, 3)).notes == ()


def test_half_precision_by_autocast_is_left_to_pytorch():
    def forward(m: nn.Module, x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return m.cell(x)[0].float()

    torch.manual_seed(0)
    model = Written(forward, cell=nn.GRU(3, 4, batch_first=True))
    batch = tuple(part.float() for part in rows(3, 3))
    gradients = plain_loop(model, loss, batch)
    engine = BookKeepingEngine(model, loss)
    query = ClippedSumQuery(Support.full(engine.layout.dimension), FlatClip(median_norm(gradients)))
    found = engine.clipped_sum([MicroBatch(batch)], query).numpy()
    assert np.linalg.norm(found - clipped_sum(gradients, query.clip.norm)) <= 0.03 * query.clip.norm * 5


def test_nothing_of_a_chunk_outlives_it():
    """A node that held what it gave out would keep itself alive, and all of its sequence with it."""
    model = cell("lstm")
    batch = rows(3, 3)
    engine = BookKeepingEngine(Written(lambda m, x: m.cell(x)[0], cell=model), loss)
    query = ClippedSumQuery(Support.full(engine.layout.dimension), FlatClip(1.0))

    def tensors_after_a_sum() -> int:
        engine.clipped_sum([MicroBatch(batch)], query)
        return sum(issubclass(type(held), Tensor) for held in gc.get_objects())

    gc.collect()
    gc.disable()
    try:
        first, *others = [tensors_after_a_sum() for _ in range(4)][1:]
    finally:
        gc.enable()
    assert others == [first, first]
