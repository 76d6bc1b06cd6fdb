"""Models as people write them: the right sum on the fast path or a clear error, never a silent wrong one."""

from __future__ import annotations

import gc
import logging
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from gradient_cases import (
    GEOMETRIES,
    STRUCTURES,
    By,
    Case,
    assert_equals_a_plain_loop,
    autocast,
    bare,
    by,
    cosine,
    linear,
    loss,
    written,
)
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence
from torch.utils.checkpoint import checkpoint

from sparsedp.batch import MicroBatch, slice_batch
from sparsedp.clipping import FlatClip
from sparsedp.errors import ModelError, SparseDPError
from sparsedp.grad_sample import ENGINES, BookKeepingEngine, ClippedSumQuery
from sparsedp.grad_sample.isolation import same_draws
from sparsedp.grad_sample.rules import RULES, Rule
from sparsedp.parameters import Support
from sparsedp.randomness import SeededRandomness

UNITS = [0, 0, 1, 2, 2, 2, 3]
SAMPLES = 7
LEAST = 1e-6
"""A key's bias has no gradient but rounding."""

pytestmark = pytest.mark.filterwarnings(
    "ignore:.*(nested_tensor|lr_scheduler|weight_norm).*", "ignore:.*enable_nested_tensor"
)

NOT_VECTORISED = ("packed", "bilinear", "checkpointed")
WITHOUT_A_FORMULA = {"token-written-in-place"}


def checked(case: Case, geometry: str = "identity", units=None, loss=loss) -> BookKeepingEngine:
    model, rows = case.make(torch.float64, len(UNITS))
    engine = BookKeepingEngine(model, loss)
    assert_equals_a_plain_loop(engine, model, rows, loss=loss, geometry=geometry, units=units, least=LEAST)
    return engine


def total_of(engine, rows) -> Tensor:
    return engine.clipped_sum(
        [MicroBatch(rows)], ClippedSumQuery(Support.full(engine.layout.dimension), FlatClip(1.0))
    )


@pytest.mark.parametrize(
    "units", [pytest.param(None, id="rows"), pytest.param(UNITS, id="units", marks=pytest.mark.nightly)]
)
@pytest.mark.parametrize("geometry", GEOMETRIES)
@pytest.mark.parametrize("case", STRUCTURES)
def test_the_fast_path_equals_a_plain_loop(case, geometry, units, caplog):
    with caplog.at_level(logging.INFO, logger="sparsedp"):
        engine = checked(STRUCTURES[case], geometry, units)
    assert engine.falls_back == case.startswith(NOT_VECTORISED)
    assert len(caplog.records) == (engine.falls_back or case in WITHOUT_A_FORMULA)


def tied(build: Callable[[], nn.Sequential], to: int, source: int = 0) -> Callable[[], nn.Module]:
    def make() -> nn.Module:
        model = build()
        model[to].weight = model[source].weight
        return model

    return make


def frozen(build: Callable[[], nn.Module], *names: str) -> Callable[[], nn.Module]:
    def make() -> nn.Module:
        model = build()
        for name in names:
            model.get_parameter(name).requires_grad_(False)
        return model

    return make


def twice(layer: nn.Module) -> nn.Module:
    return nn.Sequential(layer, nn.Tanh(), layer)


class Scaled(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.scale, self.inner = nn.Parameter(torch.full((1,), 1.5)), inner

    def forward(self, x: Tensor) -> Tensor:
        return self.scale * self.inner(x)


class InsideAndOutside(nn.Module):
    """A layer used by itself and in a module that the engine does not know."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(5, 5)
        self.custom = Scaled(self.body)

    def forward(self, x: Tensor) -> Tensor:
        return self.custom(torch.tanh(self.body(x)))


def without_gradient(m: nn.Module, x: Tensor) -> Tensor:
    with torch.no_grad():
        features = m.body(x)
    return m.head(features)


def turned_in_place(m: nn.Module, x: Tensor) -> Tensor:
    turned = m.body(x).transpose(0, 1)
    turned.relu_()
    return m.head(turned).transpose(0, 1)


def part_in_place(m: nn.Module, x: Tensor) -> Tensor:
    hidden = m.body(x)
    hidden[:, :2] *= 3
    return m.head(hidden)


def tripled_by_a_hook() -> nn.Module:
    model = perceptron()
    model[0].register_forward_hook(lambda module, args, output: output * 3)
    return model


def perceptron() -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3))


def in_place() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 5), nn.ReLU(inplace=True), nn.Linear(5, 3), nn.ELU(inplace=True))


class Sorting(nn.GRU):
    """Packs its rows by their content."""

    def forward(self, x: Tensor) -> Tensor:
        lengths = 1 + (x[:, 0, 0] > 0).long() + (x[:, 1, 1] > 0)
        packed = pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)
        return super().forward(packed)[1].transpose(0, 1)


BODIES = {"body": linear(4, 5), "head": linear(5, 3)}
TWO = {"other": linear(4, 3), "used": linear(4, 3)}
SHARING = {
    "two layers with one weight": Case(
        tied(lambda: nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4)), 2), (4,)
    ),
    "two convolutions with one weight": Case(
        tied(
            lambda: nn.Sequential(nn.Conv2d(2, 2, 3, padding=1), nn.Tanh(), nn.Conv2d(2, 2, 3, stride=2)), 2
        ),
        (2, 5, 5),
    ),
    "an embedding tied to the output": Case(
        tied(lambda: nn.Sequential(nn.Embedding(6, 4), nn.Tanh(), nn.Linear(4, 6, bias=False)), 2),
        (5,),
        tokens=6,
    ),
    "a layer called twice": written((4,), lambda m, x: m.layer(m.layer(x).tanh()), layer=linear(4, 4)),
    "a module under two names": Case(lambda: twice(nn.Linear(4, 4)), (4,)),
    "a layer inside and outside another": Case(InsideAndOutside, (5,)),
    "a convolution on two sizes": written(
        (17, 4, 4),
        lambda m, x: m.conv(x).flatten(1).sum(1, keepdim=True) + m.conv(x[:, :, ::2, ::2]).flatten(1),
        conv=lambda: nn.Conv2d(17, 3, 2),
    ),
    "a weight used by hand too": written(
        (3,), lambda m, x: m.layer(x) + F.linear(x.sin(), m.layer.weight), layer=linear(3, 4)
    ),
    "a weight used by hand only": written(
        (4,), lambda m, x: m.body(x) @ m.head.weight.T, body=linear(4, 3), head=linear(3, 2, bias=False)
    ),
    "frozen layers": Case(frozen(perceptron, "0.weight", "0.bias"), (4,)),
    "a frozen bias": Case(frozen(lambda: nn.Sequential(nn.Conv1d(4, 3, 2), nn.Tanh()), "0.bias"), (4, 5)),
    "a frozen weight": Case(frozen(lambda: nn.Sequential(nn.GroupNorm(2, 4), nn.Tanh()), "0.weight"), (4, 3)),
    "never called": written((4,), lambda m, x: m.used(x), **TWO),
    "detached": written((4,), lambda m, x: m.used(x) + 0 * m.other(x).detach(), **TWO),
    "output ignored": written((4,), lambda m, x: (m.other(x), m.used(x))[1], **TWO),
    "called without gradient": written((4,), without_gradient, **BODIES),
    "in place on sequences": Case(in_place, (3, 4)),
    "in place": Case(in_place, (4,)),
    "in place, turned": written((3, 4), turned_in_place, **BODIES),
    "a part in place": written((4,), part_in_place, **BODIES),
    "called by keyword": written((4,), lambda m, x: m.layer(input=x), layer=linear(4, 3)),
    "a forward hook": Case(tripled_by_a_hook, (4,)),
    "dropout of nothing": Case(
        lambda: nn.Sequential(nn.Linear(4, 5), nn.Dropout(0.0), nn.Linear(5, 3)), (4,)
    ),
    "packed in a subclass": Case(lambda: Sorting(3, 4), (3, 3)),
}
OFF_THE_FAST_PATH = {"in place, turned", "packed in a subclass"}


@pytest.mark.parametrize("case", SHARING)
def test_what_models_share_freeze_and_overwrite_is_followed(case):
    model, rows = SHARING[case].make(torch.float64, SAMPLES)
    names = [name for name, _ in model.named_parameters()]
    for kind, make in ENGINES.items():
        engine = make(model, loss)
        assert_equals_a_plain_loop(engine, model, rows)
        if kind == "bookkeeping" and case not in OFF_THE_FAST_PATH:
            assert engine.notes == ()
    assert [name for name, _ in model.named_parameters()] == names
    loss(model, rows).sum().backward()  # parameters are still those that the model uses


@pytest.mark.parametrize(("length", "samples"), [(3, SAMPLES), (SAMPLES, SAMPLES), (2, 2), (3, 3), (1, 1)])
@pytest.mark.parametrize(
    "forward",
    [
        lambda m, x: m.layer(x.reshape(-1, 4)).reshape(len(x), -1),
        lambda m, x: m.layer(x.transpose(0, 1).contiguous()).transpose(0, 1),
    ],
    ids=["flattened", "sequence first"],
)
def test_an_axis_as_long_as_the_batch_is_not_taken_for_it(forward, length, samples):
    model, rows = written((length, 4), forward, layer=linear(4, 3)).make(torch.float64, samples)
    assert_equals_a_plain_loop(BookKeepingEngine(model, loss), model, rows)


SLOW = {
    "CdistBackward0": written(
        (2, 3), lambda m, x: torch.cdist(m.body(x), m.centres), body=linear(3, 2), centres=bare(4, 2)
    ),
    "LogaddexpBackward0": written(
        (3,), lambda m, x: torch.logaddexp(m.body(x), m.floor), body=linear(3, 2), floor=bare(2)
    ),
    "LerpBackward0": written((4,), lambda m, x: torch.lerp(x, m.target, 0.3), target=bare(4)),
}


@pytest.mark.parametrize("operation", SLOW)
def test_an_operation_without_a_formula_is_named_and_costs_only_itself(operation, caplog):
    with caplog.at_level(logging.WARNING, logger="sparsedp"):
        engine = checked(SLOW[operation])
    assert not engine.falls_back
    assert [f"{operation} has no formula" in record.message for record in caplog.records] == [True]


def test_a_formula_that_does_not_hold_is_found_out(monkeypatch, caplog):
    """As after a change in PyTorch: the model goes to the reference engine, and the sum stays right."""
    wrong = Rule((), RULES["ExpandBackward0"].contribution)
    monkeypatch.setitem(RULES, "MulBackward0", wrong)
    with caplog.at_level(logging.WARNING, logger="sparsedp"):
        engine = checked(written((3,), lambda m, x: m.body(x) * m.gain, body=linear(3, 4), gain=bare(4)))
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
    assert_equals_a_plain_loop(BookKeepingEngine(model, loss), model, rows)


def test_a_compiled_model_runs_as_written():
    build = by(cosine, body=linear(3, 4), prototypes=bare(5, 4), temperature=bare())
    assert not checked(Case(lambda: torch.compile(build(), backend="eager"), (3,))).falls_back


def gru_under_autocast(m: nn.Module, x: Tensor) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        return m.cell(x)[0].float()


@pytest.mark.parametrize(
    "build",
    [
        by(autocast, body=linear(3, 8), norm=lambda: nn.LayerNorm(8), gain=bare(8), head=linear(8, 2)),
        by(gru_under_autocast, cell=lambda: nn.GRU(3, 4, batch_first=True)),
    ],
    ids=["layers", "recurrent"],
)
def test_half_precision_activations_are_measured_in_full(build):
    """Under autocast the engine's sums are the plain loop's, but for what eight bits of a product can say."""
    model, rows = Case(build, (4, 3)).make(torch.float32, len(UNITS))
    engine = BookKeepingEngine(model, loss)
    assert_equals_a_plain_loop(engine, model, rows, tolerance=0.03)
    assert not engine.falls_back


def test_mixed_dtypes_in_one_model():
    torch.manual_seed(0)
    model = By(lambda m, x: m.head(m.body(x).double()), body=nn.Linear(4, 5), head=nn.Linear(5, 3).double())
    rows = (torch.randn(SAMPLES, 4), torch.linspace(0.2, 2.0, SAMPLES))
    for make in ENGINES.values():
        assert_equals_a_plain_loop(make(model, loss), model, rows, tolerance=3e-5)


def test_a_column_of_losses_is_accepted():
    def column(model: nn.Module, rows: tuple[Tensor, Tensor]) -> Tensor:
        return loss(model, rows).unsqueeze(1)

    checked(Case(linear(4, 3), (4,)), loss=column)


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
def test_a_gradient_inside_the_loss_gives_the_sum_of_a_plain_loop(kind):
    def steep(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        x = batch[0].clone().requires_grad_()
        with torch.enable_grad():
            losses = loss(model, (x, batch[1]))
            (slope,) = torch.autograd.grad(losses.sum(), x, create_graph=True)
        return losses + 10 * slope.flatten(1).square().sum(1)

    last = written((2, 3), lambda m, x: m.cell(x)[0][:, -1], cell=lambda: kind(3, 4, batch_first=True))
    checked(last, loss=steep)


def test_an_input_overwritten_after_use_is_refused():
    def forward(m: nn.Module, x: Tensor) -> Tensor:
        hidden = torch.tanh(x)
        first = m.first(hidden)
        hidden.mul_(2)
        return first + m.second(hidden)

    model, rows = written((4,), forward, first=linear(4, 3), second=linear(4, 3)).make(torch.float32)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        total_of(BookKeepingEngine(model, loss), rows)


@pytest.mark.parametrize("kind", ENGINES)
def test_the_engine_leaves_no_trace_and_works_where_gradients_are_switched_off(kind):
    model, rows = Case(perceptron, (4,)).make(torch.float32)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    expected = total_of(ENGINES[kind](model, loss), rows)
    with torch.no_grad():
        assert torch.equal(total_of(ENGINES[kind](model, loss), rows), expected)
    assert not expected.requires_grad
    assert all(not module._forward_hooks for module in model.modules())
    assert all(p.grad is None and torch.equal(p, before[name]) for name, p in model.named_parameters())


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


@pytest.mark.parametrize("kind", ENGINES)
@pytest.mark.parametrize("reduce", [torch.mean, torch.sum])
def test_a_scalar_loss_is_refused_with_the_remedy(kind, reduce):
    engine = ENGINES[kind](nn.Linear(4, 3), lambda model, rows: reduce(model(rows)))
    with pytest.raises(SparseDPError, match='reduction="none"'):
        total_of(engine, torch.ones(SAMPLES, 4))


@pytest.mark.parametrize("option", ["scale_grad_by_freq", "max_norm"])
def test_embeddings_that_mix_or_rewrite_are_refused_with_the_remedy(option):
    with pytest.raises(ModelError, match=option):
        BookKeepingEngine(nn.Sequential(nn.Embedding(5, 3, **{option: True})), loss)


def test_changed_weights_are_seen_and_a_changed_model_is_refused():
    model, rows = Case(perceptron, (4,)).make(torch.float32)
    engine = BookKeepingEngine(model, loss)
    total_of(engine, rows)
    with torch.no_grad():
        model[2].weight.mul_(-2)
    assert torch.equal(total_of(engine, rows), total_of(BookKeepingEngine(model, loss), rows))
    model[0].requires_grad_(False)
    with pytest.raises(ModelError, match="changed since"):
        total_of(engine, rows)


def test_activation_checkpointing_inside_a_plain_module_is_right():
    body = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3))
    checked(written((4,), lambda m, x: checkpoint(m.body, x, use_reentrant=False), body=lambda: body))


def test_nothing_of_a_chunk_outlives_it():
    """A node that held what it gave out would keep itself alive, and all of its sequence with it."""
    deep = nn.LSTM(3, 4, num_layers=2, bidirectional=True, batch_first=True)
    model, rows = written((3, 3), lambda m, x: m.cell(x)[0], cell=lambda: deep).make(torch.float64)
    engine = BookKeepingEngine(model, loss)

    def tensors_after_a_sum() -> int:
        total_of(engine, rows)
        return sum(issubclass(type(held), Tensor) for held in gc.get_objects())

    gc.collect()
    gc.disable()
    try:
        first, *others = [tensors_after_a_sum() for _ in range(4)][1:]
    finally:
        gc.enable()
    assert others == [first, first]
