"""What the losses' graph hides from the layers' formulas: found, and then right or refused, never just wrong."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from gradient_cases import loss
from gradient_oracle import clipped_sum, median_norm, plain_loop
from torch import Tensor, nn
from torch.nn.modules import module as torch_module
from torch.nn.utils.rnn import pack_padded_sequence
from torch.utils.checkpoint import checkpoint

from sparsedp.batch import MicroBatch
from sparsedp.core.clip import FlatClip
from sparsedp.errors import ModelError
from sparsedp.grad_sample import ENGINES, BookkeepingEngine, Query
from sparsedp.parameters import Support

SAMPLES = 7


def inputs(*shape: int, samples: int = SAMPLES) -> Tensor:
    return torch.randn(samples, *shape, generator=torch.Generator().manual_seed(1))


def assert_right(model: nn.Module, x: Tensor, loss=loss, kinds=tuple(ENGINES)) -> None:
    """Every engine agrees with a plain loop of `backward` over single rows."""
    rows = (x, torch.linspace(0.2, 2.0, len(x)).to(x) if x.is_floating_point() else torch.ones(len(x)))
    gradients = plain_loop(model, loss, rows)
    clip_norm = median_norm(gradients)
    expected = clipped_sum(gradients, clip_norm)
    for kind in kinds:
        engine = ENGINES[kind](model, loss)
        found = engine.clipped_sum(
            [MicroBatch(rows)], Query(Support.full(engine.layout.dimension), FlatClip(clip_norm))
        )
        assert np.linalg.norm(found.numpy() - expected) <= 3e-5 * clip_norm * len(x), kind


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3))


class By(nn.Module):
    """A model out of named layers and a forward function."""

    def __init__(self, forward, **layers: nn.Module) -> None:
        super().__init__()
        for name, layer in layers.items():
            self.add_module(name, layer)
        self._forward = forward

    def forward(self, x: Tensor) -> Tensor:
        return self._forward(self, x)


@pytest.mark.parametrize("when", ["before", "after the first step"])
def test_a_forward_of_an_instances_own(when):
    model = network()
    query, rows = Query(Support.full(43), FlatClip(0.1)), (inputs(4), torch.ones(SAMPLES))
    engine = BookkeepingEngine(model, loss)
    if when != "before":
        engine.clipped_sum([MicroBatch(rows)], query)
    layer = model[0]
    layer.forward = lambda x: nn.functional.linear(x, layer.weight, layer.bias) * layer.weight.sum()
    assert_right(model, inputs(4))
    expected = clipped_sum(plain_loop(model, loss, rows), 0.1)
    np.testing.assert_allclose(engine.clipped_sum([MicroBatch(rows)], query), expected, atol=1e-5)


def test_a_forward_replaced_on_the_class(monkeypatch):
    original = nn.Linear.forward
    monkeypatch.setattr(nn.Linear, "forward", lambda self, x: original(self, x) * self.weight.sum())
    assert_right(network(), inputs(4))


def test_a_gradient_inside_the_loss():
    def penalised(model: nn.Module, rows: tuple[Tensor, Tensor]) -> Tensor:
        x = rows[0].detach().requires_grad_()
        out = loss(model, (x, rows[1]))
        slope = torch.autograd.grad(out.sum(), x, create_graph=True)[0]
        return out + slope.square().flatten(1).sum(1)

    assert_right(network(), inputs(4), penalised)


class KeepsATensor(nn.Module):
    """An unknown module whose hidden activations enter the loss by a side door."""

    def __init__(self) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.linspace(0.5, 2.0, 4))
        self.inner = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        self.kept = torch.sin(self.gain * x)
        return self.inner(self.kept)


def test_a_tensor_kept_for_an_auxiliary_loss():
    model = nn.Sequential(nn.Linear(4, 4), KeepsATensor())

    def auxiliary(model: nn.Module, rows: tuple[Tensor, Tensor]) -> Tensor:
        found = loss(model, rows)
        return found + body.kept.square().sum(1)

    body = model[1]
    assert_right(model, inputs(4), auxiliary, kinds=["bookkeeping"])


class TwoOutputs(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.linspace(0.5, 2.0, 4))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        first = torch.sin(self.gain * x)
        return first, first * self.gain


def test_an_output_computed_from_another_output():
    def forward(m: nn.Module, x: Tensor) -> Tensor:
        first, second = m.two(x)
        return m.head(first * 2 + second.tanh())

    assert_right(By(forward, two=TwoOutputs(), head=nn.Linear(4, 3)), inputs(4))


class Borrows(nn.Module):
    """An unknown module that uses a parameter, and an activation, which are not its own."""

    def __init__(self, other: nn.Linear) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.ones(4))
        self.borrowed = [other]

    def forward(self, x: Tensor) -> Tensor:
        return self.gain * (x @ self.borrowed[0].weight)


def test_a_parameter_borrowed_by_another_layer():
    first = nn.Linear(4, 4)
    assert_right(nn.Sequential(first, nn.Tanh(), Borrows(first)), inputs(4))


def test_an_activation_passed_on_behind_the_layers_back():
    class Remembers(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gain = nn.Parameter(torch.linspace(0.5, 1.5, 4))

        def forward(self, x: Tensor) -> Tensor:
            return torch.sin(self.gain * x) * self.seen

    def forward(m: nn.Module, x: Tensor) -> Tensor:
        m.user.seen = m.first(x)
        return m.user(x)

    assert_right(By(forward, first=nn.Linear(4, 4), user=Remembers()), inputs(4))


def test_a_module_that_overwrites_its_input():
    class Doubles(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gain = nn.Parameter(torch.ones(4))

        def forward(self, x: Tensor) -> Tensor:
            return self.gain * x.mul_(2)

    assert_right(nn.Sequential(nn.Linear(4, 4), Doubles()), inputs(4), kinds=["bookkeeping"])


@pytest.mark.filterwarnings("ignore:None of the inputs")
@pytest.mark.parametrize("kind", ENGINES)
@pytest.mark.parametrize("where", ["at the input", "deeper"])
def test_reentrant_checkpointing_is_refused(kind, where):
    def forward(m: nn.Module, x: Tensor) -> Tensor:
        x = m.first(x) if where == "deeper" else x
        return m.head(checkpoint(m.body, x, use_reentrant=True))

    model = By(forward, first=nn.Linear(4, 4), body=network(), head=nn.Linear(3, 2))
    engine = ENGINES[kind](model, loss)
    query = Query(Support.full(engine.layout.dimension), FlatClip(1.0))
    with pytest.raises(ModelError, match="use_reentrant=False"):
        engine.clipped_sum([MicroBatch((inputs(4), torch.ones(SAMPLES)))], query)


HOOKS = {
    "parameter": lambda m: m[0].weight.register_hook(lambda g: g / g.norm() * 3),
    "full backward": lambda m: m[0].register_full_backward_hook(lambda mod, i, o: tuple(g - 3 for g in i)),
    "full backward pre": lambda m: m[2].register_full_backward_pre_hook(
        lambda mod, o: (o[0] - o[0].mean(0) / 2,)
    ),
    "forward": lambda m: m[0].register_forward_hook(lambda mod, args, out: out * 3),
    "forward pre": lambda m: m[2].register_forward_pre_hook(lambda mod, args: (args[0] * 3,)),
}


@pytest.mark.parametrize("hook", HOOKS)
def test_hooks_on_modules_and_parameters(hook):
    model = nn.Sequential(nn.Linear(4, 4), *network())
    HOOKS[hook](model[1:])
    assert_right(model, inputs(4))


def test_a_forward_pre_hook_on_an_unknown_module_runs_once():
    model = nn.Sequential(nn.Linear(4, 4), KeepsATensor())
    model[1].register_forward_pre_hook(lambda mod, args: (args[0] * 3,))
    assert_right(model, inputs(4))


GLOBAL_HOOKS = {
    "forward": lambda: torch_module.register_module_forward_hook(
        lambda mod, args, out: out * 2 if isinstance(mod, nn.Linear) else None
    ),
    "forward pre": lambda: torch_module.register_module_forward_pre_hook(
        lambda mod, args: (args[0] * 2,) if isinstance(mod, nn.Linear) else None
    ),
    "backward": lambda: torch_module.register_module_full_backward_hook(
        lambda mod, i, o: tuple(None if g is None else g * 2 for g in i)
    ),
}


@pytest.mark.filterwarnings("ignore:Full backward hook")
@pytest.mark.parametrize("hook", GLOBAL_HOOKS)
def test_hooks_on_all_modules(hook):
    handle = GLOBAL_HOOKS[hook]()
    try:
        assert_right(network(), inputs(4))
    finally:
        handle.remove()


class MeanInBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx, g: Tensor) -> Tensor:
        return g + 5 * g.mean(0)


class MeanWithAVmapRule(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def setup_context(ctx, inputs, output) -> None:
        pass

    @staticmethod
    def backward(ctx, g: Tensor) -> Tensor:
        return g + 5 * g.mean(0)


def with_tensor_hook(h: Tensor) -> Tensor:
    h.register_hook(lambda g: g / g.norm() * 3)
    return h


def with_node_hook(h: Tensor) -> Tensor:
    h.grad_fn.register_hook(lambda into, out: tuple(None if g is None else g * 2 for g in into))
    return h


def with_node_prehook(h: Tensor) -> Tensor:
    h.grad_fn.register_prehook(lambda out: tuple(g - g.mean(0) / 2 for g in out))
    return h


BETWEEN = [
    MeanInBackward.apply,
    MeanWithAVmapRule.apply,
    with_tensor_hook,
    with_node_hook,
    with_node_prehook,
]


@pytest.mark.parametrize("between", BETWEEN)
def test_a_backward_of_the_users_own_between_layers(between):
    assert_right(
        By(lambda m, x: m.head(between(m.body(x).tanh())), body=nn.Linear(4, 5), head=nn.Linear(5, 3)),
        inputs(4),
    )


@pytest.mark.parametrize("kind", ENGINES)
def test_a_hook_after_accumulation_is_refused(kind):
    model = network()
    model[0].weight.register_post_accumulate_grad_hook(lambda p: None)
    engine = ENGINES[kind](model, loss)
    with pytest.raises(ModelError, match=r"'0.weight' has a hook"):
        engine.clipped_sum(
            [MicroBatch((inputs(4), torch.ones(SAMPLES)))], Query(Support.full(43), FlatClip(1.0))
        )


def packed(m: nn.Module, x: Tensor) -> Tensor:
    lengths = torch.full((len(x),), 3)
    return m.cell(pack_padded_sequence(x, lengths, batch_first=True))[1][0].transpose(0, 1)


HARD_FOR_VMAP = {
    "non-reentrant checkpointing": (
        By(lambda m, x: checkpoint(m.body, x, use_reentrant=False), body=network()),
        inputs(4),
    ),
    "a sparse embedding": (
        nn.Sequential(nn.Embedding(5, 4, sparse=True), nn.Linear(4, 2)),
        torch.randint(0, 5, (SAMPLES, 3), generator=torch.Generator().manual_seed(0)),
    ),
    "a packed sequence": (By(packed, cell=nn.LSTM(4, 3, batch_first=True)), inputs(3, 4)),
    "a branch on the data": (
        By(lambda m, x: m.body(x) * (2 if float(x.sum()) > 0 else 1), body=network()),
        inputs(4),
    ),
}


@pytest.mark.parametrize("case", HARD_FOR_VMAP)
def test_the_reference_engine_takes_any_model(case):
    model, x = HARD_FOR_VMAP[case]
    assert_right(model, x, kinds=["reference"])


def test_the_fast_engine_takes_checkpointing_sparse_embeddings_and_packed_sequences():
    for case in ["non-reentrant checkpointing", "a sparse embedding", "a packed sequence"]:
        model, x = HARD_FOR_VMAP[case]
        assert_right(model, x, kinds=["bookkeeping"])


class Masked(nn.Module):
    """A causal mask [L, L]: no row per sample, though a chunk may have L rows."""

    def __init__(self, length: int, by_keyword: bool) -> None:
        super().__init__()
        self.layer = nn.TransformerEncoderLayer(4, 2, 8, dropout=0.0, batch_first=True)
        self.attention = nn.MultiheadAttention(4, 2, batch_first=True)
        self.register_buffer("mask", torch.ones(length, length).triu(1).bool())
        self.by_keyword = by_keyword

    def forward(self, x: Tensor) -> Tensor:
        x = self.layer(x, src_mask=self.mask) if self.by_keyword else self.layer(x, self.mask)
        return self.attention(x, x, x, attn_mask=self.mask, need_weights=False)[0]


@pytest.mark.parametrize("samples", [2, 3, 5, 6])
@pytest.mark.parametrize("by_keyword", [True, False])
@pytest.mark.parametrize("length", [2, 3, 5])
def test_an_argument_as_long_as_the_chunk_is_not_taken_for_rows(length, by_keyword, samples):
    torch.manual_seed(0)
    assert_right(Masked(length, by_keyword), inputs(length, 4, samples=samples), kinds=["bookkeeping"])
