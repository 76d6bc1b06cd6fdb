"""Only the support moves, whatever the optimizer; an average of the weights; the rate of tables."""

from __future__ import annotations

import copy
import functools
import math
from collections.abc import Callable, Iterable

import pytest
import torch
from torch import Tensor, nn, optim
from torch.optim import Optimizer

from sparsedp.errors import ModelError, SparseDPError
from sparsedp.methods import build_plan
from sparsedp.optimizers.ema import WeightAverage
from sparsedp.optimizers.factory import table_rate
from sparsedp.optimizers.sparse import ELEMENTWISE, SupportOptimizer
from sparsedp.parameters import ParameterLayout, Support
from sparsedp.privacy.mechanism import Release
from sparsedp.testing import made_up_release

OPTIMIZERS: dict[str, Callable[[Iterable[nn.Parameter]], Optimizer]] = {
    "sgd": lambda p: optim.SGD(p, lr=0.1),
    "sgd-groups": lambda p: optim.SGD([{"params": [one], "lr": 0.1 * n} for n, one in enumerate(p, 1)]),
    "sgd-decay": lambda p: optim.SGD(p, lr=0.1, weight_decay=0.3),
    "momentum": lambda p: optim.SGD(p, lr=0.1, momentum=0.9),
    "momentum-decay": lambda p: optim.SGD(p, lr=0.1, momentum=0.9, dampening=0.1, weight_decay=0.3),
    "nesterov": lambda p: optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.3),
    "maximize": lambda p: optim.SGD(p, lr=0.1, momentum=0.9, maximize=True, weight_decay=0.3),
    "adam": lambda p: optim.Adam(p, lr=0.1),
    "adam-decay": lambda p: optim.Adam(p, lr=0.1, weight_decay=0.3, amsgrad=True),
    "adam-loop": lambda p: optim.Adam(p, lr=0.1, weight_decay=0.3, foreach=False),
    "adam-fused": lambda p: optim.Adam(p, lr=0.1, weight_decay=0.3, fused=True),
    "adamw": lambda p: optim.AdamW(p, lr=0.1, weight_decay=0.3),
    "nadam": lambda p: optim.NAdam(p, lr=0.1, weight_decay=0.3),
    "radam": lambda p: optim.RAdam(p, lr=0.1, weight_decay=0.3, decoupled_weight_decay=True),
    "rmsprop": lambda p: optim.RMSprop(p, lr=0.1, momentum=0.9, centered=True, weight_decay=0.3),
    "adagrad": lambda p: optim.Adagrad(p, lr=0.1, initial_accumulator_value=0.5, weight_decay=0.3),
    "adadelta": lambda p: optim.Adadelta(p, lr=0.1, weight_decay=0.3),
    "adamax": lambda p: optim.Adamax(p, lr=0.1, weight_decay=0.3),
    "adafactor": lambda p: optim.Adafactor(p, lr=0.1, weight_decay=0.3),
    "rprop": lambda p: optim.Rprop(p, lr=0.1),
}
INDEPENDENT = [name for name in OPTIMIZERS if name != "adafactor"]
"""Adafactor's rows, columns and norms are shared between coordinates: there is no update of one alone."""

DROPPING = {**OPTIMIZERS, "asgd": lambda p: optim.ASGD(p, lr=0.1, lambd=0.1, weight_decay=0.3)}


class Net(nn.Module):
    """Matrices, a convolution kept channels-last, a bias and a single number."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.weight = nn.Parameter(torch.randn(4, 6, generator=generator))
        kernel = torch.randn(2, 3, 2, 2, generator=generator)
        self.kernel = nn.Parameter(kernel.to(memory_format=torch.channels_last))
        self.bias = nn.Parameter(torch.randn(5, generator=generator))
        self.gain = nn.Parameter(torch.randn((), generator=generator))


LAYOUT = ParameterLayout.of(Net())
D = LAYOUT.dimension


def gradients(steps: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    return list(torch.randn(steps, D, generator=generator, dtype=torch.float64))


def random_support(size: int, seed: int) -> Support:
    return Support(torch.randperm(D, generator=torch.Generator().manual_seed(seed))[:size], D)


def release(support: Support, gradient: Tensor, step: int = 0) -> Release:
    """A release of exactly `gradient` on the support."""
    mean = support.gather(gradient.to(torch.float64))
    return made_up_release(support, mean, torch.zeros_like(mean), step)


def applier_of(
    name: str, model: nn.Module, coasts: bool = False, compact: bool | None = None
) -> SupportOptimizer:
    return SupportOptimizer(model, LAYOUT, DROPPING[name](model.parameters()), coasts=coasts, compact=compact)


def set_gradients(model: nn.Module, value: Tensor) -> None:
    for slot, p in zip(LAYOUT, model.parameters(), strict=True):
        p.grad = torch.empty_like(p).copy_(value[slot.span].reshape(slot.shape))


def states(optimizer: Optimizer, model: nn.Module) -> dict[tuple[str, str], Tensor]:
    """Every per-coordinate state tensor, flat."""
    return {
        (slot.name, name): value.reshape(-1)
        for slot, p in zip(LAYOUT, LAYOUT.parameters(model), strict=True)
        for name, value in optimizer.state.get(p, {}).items()
        if isinstance(value, Tensor)
        and value.shape == p.shape
        and name not in ("step", "mu_product", "eta", "mu")
    }


def fresh_state(name: str, state: str) -> float:
    """What a new optimizer has there."""
    return {("adagrad", "sum"): 0.5, ("rprop", "step_size"): torch.tensor(0.1).item()}.get((name, state), 0.0)


@pytest.mark.parametrize("name", DROPPING)
def test_support_optimizer_moves_no_frozen_coordinate_by_one_bit_and_keeps_no_state_of_it(name: str) -> None:
    model = Net()
    optimizer = DROPPING[name](model.parameters())
    applier = SupportOptimizer(model, LAYOUT, optimizer, coasts=False)
    values = gradients(9)
    for step in range(3):
        applier.apply(release(Support.full(D), values[step], step))
    support = random_support(20, seed=2)
    off = ~support.mask()
    frozen = LAYOUT.flatten(model)[off]
    for step in range(3, 9):
        before = LAYOUT.flatten(model)
        applier.apply(release(support, values[step], step))
        after = LAYOUT.flatten(model)
        assert torch.equal(after[off].view(torch.int32), frozen.view(torch.int32))
        assert not torch.equal(after[~off], before[~off])
        assert all(p.grad is None for p in model.parameters())
        applier.hand_back()
        for (parameter, state), value in states(optimizer, model).items():
            assert (value[off[LAYOUT.slot(parameter).span]] == fresh_state(name, state)).all()


@pytest.mark.parametrize("name", INDEPENDENT)
def test_support_optimizer_moves_the_support_as_if_the_rest_were_not_there(name: str) -> None:
    """On the support, the update is the plain optimizer's on the same gradient."""
    model, plain = Net(), Net()
    support = random_support(24, seed=3)
    mask = support.mask()
    applier = applier_of(name, model)
    reference = DROPPING[name](plain.parameters())
    for step, value in enumerate(gradients(5)):
        applier.apply(release(support, value, step))
        set_gradients(plain, value)
        reference.step()
    torch.testing.assert_close(LAYOUT.flatten(model)[mask], LAYOUT.flatten(plain)[mask], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("name", "coasts"), [(name, False) for name in OPTIMIZERS] + [(name, True) for name in INDEPENDENT]
)
def test_support_optimizer_on_a_full_support_is_the_plain_optimizer_to_the_bit(
    name: str, coasts: bool
) -> None:
    model, plain = Net(), Net()
    applier = applier_of(name, model, coasts)
    reference = OPTIMIZERS[name](plain.parameters())
    for step, value in enumerate(gradients(4)):
        applier.apply(release(Support.full(D), value, step))
        set_gradients(plain, value)
        reference.step()
    assert torch.equal(LAYOUT.flatten(model), LAYOUT.flatten(plain))


@pytest.mark.parametrize("name", INDEPENDENT)
def test_coasting_coordinate_moves_as_with_zero_gradient_and_no_weight_decay(name: str) -> None:
    """Off the support: the optimizer without weight decay, fed zeros. On it: the optimizer as it is."""
    model = Net()
    optimizer = OPTIMIZERS[name](model.parameters())
    applier = SupportOptimizer(model, LAYOUT, optimizer, coasts=True)
    values = gradients(6)
    for step in range(3):
        applier.apply(release(Support.full(D), values[step], step))
    support = random_support(18, seed=4)
    mask = support.mask()
    on, off = copy.deepcopy((model, optimizer)), copy.deepcopy((model, optimizer))
    for group in off[1].param_groups:
        group["weight_decay"] = 0.0
    for step in range(3, 6):
        applier.apply(release(support, values[step], step))
        for other, its_optimizer in (on, off):
            set_gradients(other, values[step] * mask)
            its_optimizer.step()
    got = LAYOUT.flatten(model)
    torch.testing.assert_close(got[mask], LAYOUT.flatten(on[0])[mask], rtol=1e-5, atol=1e-6)
    assert torch.equal(got[~mask], LAYOUT.flatten(off[0])[~mask])
    assert [group.get("weight_decay") for group in optimizer.param_groups] == [
        group.get("weight_decay") for group in on[1].param_groups
    ]


@pytest.mark.parametrize(
    ("make", "coasts", "error", "words"),
    [
        (lambda m: optim.LBFGS(m.parameters()), False, SparseDPError, "closure"),
        (lambda m: optim.SparseAdam(m.parameters()), False, SparseDPError, "sparse gradient"),
        (lambda m: optim.ASGD(m.parameters()), True, SparseDPError, "coast"),
        (lambda m: optim.SGD([*m.parameters(), *nn.Linear(2, 2).parameters()], lr=1), False, ModelError, "not the"),
        (lambda m: optim.SGD([m.weight], lr=1), False, ModelError, r"'kernel', 'bias', 'gain'"),
    ],
)  # fmt: skip
def test_support_optimizer_refuses_an_optimizer_that_cannot_honour_a_support(
    make, coasts, error, words
) -> None:
    model = Net()
    with pytest.raises(error, match=words):
        SupportOptimizer(model, LAYOUT, make(model), coasts=coasts)


# Compact: over the active entries alone, to the bit what one over all coordinates with a mask gives.


ONE_BY_ONE = [name for name in DROPPING if type(DROPPING[name]([nn.Parameter(torch.ones(2))])) in ELEMENTWISE]


WEIGHT, KERNEL, BIAS = (LAYOUT.slot(name).offset for name in ("weight", "kernel", "bias"))
SUPPORTS = [
    Support.full(D),
    random_support(20, seed=1),
    Support([*range(WEIGHT + 6, WEIGHT + 18), *range(KERNEL, KERNEL + 12), BIAS], D),
    random_support(30, seed=2),
    Support([BIAS, BIAS + 3], D),
    Support.empty(D),
    random_support(25, seed=3),
    Support.full(D),
]
"""Everything, scattered, whole rows, overlapping, one parameter alone, nothing, and back."""
STEPS = list(enumerate(gradients(3 * len(SUPPORTS))))


def bits(model: nn.Module) -> list[Tensor]:
    return [p.detach().view(torch.int32) for p in model.parameters()]


@pytest.mark.parametrize("name", ONE_BY_ONE)
def test_compact_and_masked_agree_to_the_bit_across_support_changes(name: str) -> None:
    compact, masked = Net(), Net()
    appliers = applier_of(name, compact), applier_of(name, masked, compact=False)
    for step, value in STEPS:
        for applier in appliers:
            applier.apply(release(SUPPORTS[step // 3], value, step))
        assert all(map(torch.equal, bits(compact), bits(masked))), f"step {step}"


@pytest.mark.parametrize("name", ONE_BY_ONE)
@pytest.mark.parametrize("stop", [5, 7, 13])
def test_a_resumed_optimizer_goes_on_to_the_same_bits(name: str, stop: int) -> None:
    model = Net()
    applier = applier_of(name, model)
    for step, value in STEPS:
        if step == stop:
            saved, copied = copy.deepcopy(applier.state()), copy.deepcopy(model)
            resumed = applier_of(name, copied)
            resumed.restore(saved, SUPPORTS[(step - 1) // 3])
        applier.apply(release(SUPPORTS[step // 3], value, step))
        if step >= stop:
            resumed.apply(release(SUPPORTS[step // 3], value, step))
            assert all(map(torch.equal, bits(model), bits(copied)))


@pytest.mark.parametrize("compact", [True, False])
@pytest.mark.parametrize(
    ("make", "kept", "start"),
    [
        (functools.partial(torch.optim.Adagrad, lr=0.1, initial_accumulator_value=0.5), "sum", 0.5),
        (functools.partial(torch.optim.Rprop, lr=0.1), "step_size", 0.1),
    ],
)
def test_a_row_that_enters_later_begins_as_in_an_optimizer_of_its_own(compact, make, kept, start) -> None:
    """Adagrad's `sum` and Rprop's `step_size` do not begin at zero."""
    model = Net()
    first, then = random_support(20, seed=1), random_support(24, seed=2)
    entering = then.without(first)
    alone = nn.Parameter(entering.gather(LAYOUT.flatten(model)))
    plain, optimizer = make([alone]), make(model.parameters())
    applier = SupportOptimizer(model, LAYOUT, optimizer, coasts=False, compact=compact)
    values = gradients(6)
    for step in range(3):
        applier.apply(release(first, values[step], step))
    for step in range(3, 6):
        applier.apply(release(then, values[step], step))
        alone.grad = entering.gather(values[step]).float()
        plain.step()
        assert torch.equal(entering.gather(LAYOUT.flatten(model)), alone.detach()), f"step {step}"
    applier.hand_back()
    state = torch.cat([optimizer.state[p][kept].reshape(-1) for p in LAYOUT.parameters(model)])
    assert torch.equal(entering.gather(state), plain.state[alone][kept])
    assert (state[~then.mask()] == start).all()


@pytest.mark.parametrize("name", ["momentum", "adam", "adagrad"])
def test_a_checkpoint_with_state_for_every_coordinate_can_be_gone_on_from(name: str) -> None:
    """That is what version 0.1 wrote."""
    model = Net()
    masked = applier_of(name, model, compact=False)
    support = random_support(20, seed=1)
    values = gradients(6)
    for step in range(3):
        masked.apply(release(support, values[step], step))
    copied = copy.deepcopy(model)
    compact = applier_of(name, copied)
    compact.restore(copy.deepcopy(masked.state()), support)
    for step in range(3, 6):
        for applier in (masked, compact):
            applier.apply(release(support, values[step], step))
    assert all(map(torch.equal, bits(model), bits(copied)))


def test_weight_average_on_growing_supports_equals_the_dense_one_to_the_bit() -> None:
    torch.manual_seed(0)
    model, other = nn.Embedding(6, 2), nn.Embedding(6, 2)
    other.load_state_dict(model.state_dict())
    sparse, dense = (WeightAverage(m, ParameterLayout.of(m), decay=0.9) for m in (model, other))
    dense.follow(Support.full(12))
    for support in (Support([2, 3], 12), Support([2, 3], 12), Support([3, 4, 5, 10], 12), Support([0], 12)):
        sparse.follow(support)
        with torch.no_grad():
            for m in (model, other):
                m.weight.view(-1)[support.indices] += 0.3
        sparse.update()
        dense.update()
    resumed = WeightAverage(model, ParameterLayout.of(model), decay=0.9)
    resumed.restore(sparse.state())
    for average, m in ((sparse, model), (resumed, model), (dense, other)):
        with average.in_place():
            assert m.weight.shape == (6, 2)
            found = m.weight.detach().clone()
        assert torch.equal(found, dense.state()["weights"]["weight"])


@pytest.mark.parametrize("method", ["dp-sgd", "tp-coherent"])
@pytest.mark.parametrize(("length", "clip", "coordinates"), [(1.0, 1.0, 112), (4.0, 0.3, 519), (9.0, 2.0, 6)])
def test_table_rate_is_the_formula_of_the_plans_public_numbers(
    method: str, length: float, clip: float, coordinates: int
) -> None:
    """The docstring's formula, in other steps: logarithms."""
    plan = build_plan(
        method, units=20_000, batch_size=512, epochs=10, epsilon=1.0, delta=1e-7, max_grad_norm=clip,
        accountant="rdp",
    )  # fmt: skip
    passes = sum(phase.steps for phase in plan.phases) * 512 / 20_000
    s = math.log(plan.phases[-1].noise_multiplier) + 0.5 * math.log(coordinates * passes / 512)
    squared = 1 + length * length
    rate = math.exp(math.log(0.0047) + math.log(512) - s / 2 - 0.375 * math.log(squared))
    assert table_rate(plan, coordinates, length) == pytest.approx(min(rate, 30 / squared) / clip, rel=1e-9)
