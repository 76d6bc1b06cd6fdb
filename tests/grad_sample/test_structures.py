"""Models as people write them: the right sum on the fast path or a clear error, never a silent wrong one."""

from __future__ import annotations

import gc
import logging

import pytest
import torch
import torch.nn.functional as F
from gradient_cases import GEOMETRIES, Case, assert_equals_a_plain_loop, bare, by, linear, loss, written
from structure_cases import SHARING, STRUCTURES, autocast, cosine, perceptron
from torch import Tensor, nn

from sparsedp.batch import MicroBatch, from_criterion, slice_batch
from sparsedp.clipping import ROUNDING_MARGIN, FlatClip
from sparsedp.errors import ModelError
from sparsedp.grad_sample import ENGINES, BookKeepingEngine, ClippedSumQuery
from sparsedp.grad_sample.isolation import same_draws
from sparsedp.grad_sample.rules import RULES, Rule
from sparsedp.parameters import Support
from sparsedp.randomness import SeededRandomness
from sparsedp_experiments.models import dp_cnn, mnist_cnn

UNITS = [0, 0, 1, 2, 2, 2, 3]
SAMPLES = 7
LEAST = 1e-6
"""A key's bias has no gradient but rounding."""

pytestmark = pytest.mark.filterwarnings(
    "ignore:.*(nested_tensor|lr_scheduler|weight_norm).*", "ignore:.*enable_nested_tensor"
)

NOT_VECTORISED = ("packed", "bilinear", "checkpointed")


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
    assert len(caplog.records) == (engine.falls_back or case == "divided")


@pytest.mark.parametrize("case", SHARING)
def test_what_models_share_freeze_and_overwrite_is_followed(case):
    model, rows = SHARING[case].make(torch.float64, SAMPLES)
    names = [name for name, _ in model.named_parameters()]
    for kind, make in ENGINES.items():
        engine = make(model, loss)
        assert_equals_a_plain_loop(engine, model, rows)
        if kind == "bookkeeping" and case != "in place, turned":
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


# An outside check: the dense clipped sums of the papers' CNNs are those of Opacus's hooks.


PAPERS = {"mnist-cnn": (mnist_cnn, (1, 28, 28), 24), "dp-cnn": (dp_cnn, (3, 32, 32), 6)}
OPACUS_CLIP = 0.5


def opacus_clipped_sum(model: nn.Module, rows: tuple[Tensor, Tensor], clip_norm: float) -> Tensor:
    """The sum Opacus's DPOptimizer forms before it adds noise."""
    opacus = pytest.importorskip("opacus")
    from opacus.optimizers import DPOptimizer

    wrapped = opacus.GradSampleModule(model)
    optimizer = DPOptimizer(
        torch.optim.SGD(model.parameters(), lr=1.0),
        noise_multiplier=0.0,
        max_grad_norm=clip_norm,
        expected_batch_size=len(rows[0]),
    )
    F.cross_entropy(wrapped(rows[0]), rows[1]).backward()
    norms = torch.stack([p.grad_sample.flatten(1).norm(dim=1) for p in model.parameters()]).norm(dim=0)
    assert float(norms.min()) > max(1.0, 1.5 * OPACUS_CLIP)
    optimizer.clip_and_accumulate()
    return torch.cat([p.summed_grad.reshape(-1) for p in model.parameters()]).double()


@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")
@pytest.mark.parametrize("name", PAPERS)
def test_dense_clipped_sums_are_those_of_opacus(name):
    build, shape, samples = PAPERS[name]
    torch.manual_seed(0)
    model = build(shape, 10)
    rows = (4 * torch.randn(samples, *shape), torch.randint(0, 10, (samples,)))
    loss = from_criterion(nn.CrossEntropyLoss(reduction="none"))
    engine = ENGINES["bookkeeping"](model, loss)
    query = ClippedSumQuery(Support.full(engine.layout.dimension), FlatClip(OPACUS_CLIP))
    ours = engine.clipped_sum([MicroBatch(rows)], query)
    theirs = opacus_clipped_sum(model, rows, OPACUS_CLIP / (1 + ROUNDING_MARGIN))
    assert float((ours - theirs).norm() / theirs.norm()) < 1e-5
