"""Only the support moves, whatever the optimizer."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn, optim
from torch.optim import Optimizer

from optimizer_cases import DROPPING, INDEPENDENT, OPTIMIZERS, Net, gradients, random_support, release
from sparsedp.errors import ModelError, SparseDPError
from sparsedp.optimizers.sparse import set_to_zero, support_optimizer
from sparsedp.parameters import ParameterLayout, Support


def set_gradients(model: nn.Module, layout: ParameterLayout, value: Tensor) -> None:
    for slot, p in zip(layout, model.parameters(), strict=True):
        p.grad = torch.empty_like(p).copy_(value[slot.span].reshape(slot.shape))


def states(optimizer: Optimizer, layout: ParameterLayout, model: nn.Module) -> dict[tuple[str, str], Tensor]:
    """Every per-coordinate state tensor, flat."""
    return {
        (slot.name, name): value.reshape(-1)
        for slot, p in zip(layout, layout.parameters(model), strict=True)
        for name, value in optimizer.state.get(p, {}).items()
        if isinstance(value, Tensor)
        and value.shape == p.shape
        and name not in ("step", "mu_product", "eta", "mu")
    }


def fresh_state(name: str, state: str) -> float:
    """What a new optimizer has there."""
    return {("adagrad", "sum"): 0.5, ("rprop", "step_size"): torch.tensor(0.1).item()}.get((name, state), 0.0)


@pytest.mark.parametrize("name", DROPPING)
def test_frozen_coordinates_do_not_move_by_one_bit_and_keep_no_state(name: str) -> None:
    model = Net()
    layout = ParameterLayout.of(model)
    d = layout.dimension
    optimizer = DROPPING[name](model.parameters())
    applier = support_optimizer(model, layout, optimizer, coasts=False)
    values = gradients(d, 9)
    for step in range(3):
        applier.apply(release(layout, Support.full(d), values[step], step))
    support = random_support(d, 20, seed=2)
    off = ~support.mask()
    frozen = layout.flatten(model)[off]
    for step in range(3, 9):
        before = layout.flatten(model)
        applier.apply(release(layout, support, values[step], step))
        after = layout.flatten(model)
        assert torch.equal(after[off].view(torch.int32), frozen.view(torch.int32))
        assert not torch.equal(after[~off], before[~off])
        applier.hand_back()
        for (parameter, state), value in states(optimizer, layout, model).items():
            span = layout.slot(parameter).span
            assert (value[off[span]] == fresh_state(name, state)).all()


@pytest.mark.parametrize("name", INDEPENDENT)
def test_the_support_moves_as_if_the_frozen_coordinates_were_not_there(name: str) -> None:
    """On the support, the update is the plain optimizer's on the same gradient ."""
    model, plain = Net(), Net()
    layout = ParameterLayout.of(model)
    d = layout.dimension
    support = random_support(d, 24, seed=3)
    mask = support.mask()
    applier = support_optimizer(model, layout, DROPPING[name](model.parameters()), coasts=False)
    reference = DROPPING[name](plain.parameters())
    for step, value in enumerate(gradients(d, 5)):
        applier.apply(release(layout, support, value, step))
        set_gradients(plain, layout, value)
        reference.step()
    torch.testing.assert_close(layout.flatten(model)[mask], layout.flatten(plain)[mask], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("coasts", [False, True])
def test_a_full_support_is_the_plain_optimizer_to_the_bit(name: str, coasts: bool) -> None:
    model, plain = Net(), Net()
    layout = ParameterLayout.of(model)
    applier = support_optimizer(model, layout, OPTIMIZERS[name](model.parameters()), coasts=coasts)
    reference = OPTIMIZERS[name](plain.parameters())
    support = Support.full(layout.dimension)
    for step, value in enumerate(gradients(layout.dimension, 4)):
        applier.apply(release(layout, support, value, step))
        set_gradients(plain, layout, value)
        reference.step()
    assert torch.equal(layout.flatten(model), layout.flatten(plain))


@pytest.mark.parametrize("name", INDEPENDENT)
def test_a_coasting_coordinate_moves_as_with_zero_gradient_and_no_weight_decay(name: str) -> None:
    """Off the support: the optimizer without weight decay, fed zeros. On it: the optimizer as it is."""
    model = Net()
    layout = ParameterLayout.of(model)
    d = layout.dimension
    optimizer = OPTIMIZERS[name](model.parameters())
    applier = support_optimizer(model, layout, optimizer, coasts=True)
    values = gradients(d, 6)
    for step in range(3):
        applier.apply(release(layout, Support.full(d), values[step], step))
    support = random_support(d, 18, seed=4)
    mask = support.mask()
    on, off = copy.deepcopy((model, optimizer)), copy.deepcopy((model, optimizer))
    for group in off[1].param_groups:
        group["weight_decay"] = 0.0
    for step in range(3, 6):
        applier.apply(release(layout, support, values[step], step))
        for twin, its_optimizer in (on, off):
            set_gradients(twin, layout, values[step] * mask)
            its_optimizer.step()
    got = layout.flatten(model)
    torch.testing.assert_close(got[mask], layout.flatten(on[0])[mask], rtol=1e-5, atol=1e-6)
    assert torch.equal(got[~mask], layout.flatten(off[0])[~mask])
    assert [group.get("weight_decay") for group in optimizer.param_groups] == [
        group.get("weight_decay") for group in on[1].param_groups
    ]


def test_without_velocity_a_coasting_coordinate_stays() -> None:
    model = Net()
    layout = ParameterLayout.of(model)
    support = random_support(layout.dimension, 10, seed=5)
    applier = support_optimizer(
        model, layout, optim.SGD(model.parameters(), lr=0.5, weight_decay=1.0), coasts=True
    )
    before = layout.flatten(model)
    applier.apply(release(layout, support, gradients(layout.dimension, 1)[0]))
    moved = layout.flatten(model) != before
    assert torch.equal(moved, support.mask())


@pytest.mark.parametrize("name", ["momentum", "adam", "adagrad", "rmsprop"])
def test_a_coordinate_that_returns_starts_from_fresh_state(name: str) -> None:
    model = Net()
    layout = ParameterLayout.of(model)
    d = layout.dimension
    optimizer = OPTIMIZERS[name](model.parameters())
    applier = support_optimizer(model, layout, optimizer, coasts=False)
    values = gradients(d, 3)
    applier.apply(release(layout, Support.full(d), values[0]))
    applier.apply(release(layout, Support([0], d), values[1], 1))
    applier.hand_back()
    away = states(optimizer, layout, model)
    assert away
    assert all(
        (value[1 if parameter == "weight" else 0 :] == fresh_state(name, state)).all()
        for (parameter, state), value in away.items()
    )
    before = layout.flatten(model)
    applier.apply(release(layout, Support.full(d), values[2], 2))
    assert (layout.flatten(model) != before).all()


def test_parameter_groups_keep_their_own_learning_rates() -> None:
    model = Net()
    layout = ParameterLayout.of(model)
    groups = [
        {"params": [model.bias], "lr": 1.0},
        {"params": [model.weight, model.kernel, model.gain], "lr": 0.25},
    ]
    applier = support_optimizer(model, layout, optim.SGD(groups), coasts=False)
    support = random_support(layout.dimension, 30, seed=6)
    before = layout.flatten(model)
    applier.apply(release(layout, support, torch.ones(layout.dimension)))
    rate = torch.full((layout.dimension,), 0.25)
    rate[layout.slot("bias").span] = 1.0
    torch.testing.assert_close(layout.flatten(model), before - rate * support.mask())


def test_half_precision_parameters_are_moved_in_their_own_type() -> None:
    model = Net().to(torch.bfloat16)
    layout = ParameterLayout.of(model)
    support = random_support(layout.dimension, 30, seed=6)
    frozen = layout.flatten(model)[~support.mask()]
    applier = support_optimizer(model, layout, optim.AdamW(model.parameters(), lr=0.1), coasts=False)
    applier.apply(release(layout, support, gradients(layout.dimension, 1)[0]))
    assert model.weight.dtype == torch.bfloat16
    assert torch.equal(layout.flatten(model)[~support.mask()], frozen)


def test_gradients_are_gone_after_a_step() -> None:
    model = Net()
    layout = ParameterLayout.of(model)
    applier = support_optimizer(model, layout, optim.SGD(model.parameters(), lr=0.1), coasts=False)
    applier.apply(release(layout, Support.full(layout.dimension), torch.ones(layout.dimension)))
    assert all(p.grad is None for p in model.parameters())


def test_pruning_zeroes_exactly_the_named_coordinates() -> None:
    model = Net()
    layout = ParameterLayout.of(model)
    support = random_support(layout.dimension, 12, seed=7)
    before = layout.flatten(model)
    set_to_zero(model, layout, support)
    assert torch.equal(layout.flatten(model), before * ~support.mask())


def test_an_optimizer_that_cannot_honour_a_support_is_refused_with_the_reason() -> None:
    model = Net()
    layout = ParameterLayout.of(model)
    other = nn.Linear(2, 2)
    refused: list[tuple[Optimizer, bool, type[SparseDPError], str]] = [
        (optim.LBFGS(model.parameters()), False, SparseDPError, "closure"),
        (optim.SparseAdam(model.parameters()), False, SparseDPError, "sparse gradient"),
        (optim.SGD([*model.parameters(), *other.parameters()], lr=1), False, ModelError, "not the model's"),
        (optim.SGD([model.weight], lr=1), False, ModelError, r"'kernel', 'bias', 'gain'"),
        (optim.ASGD(model.parameters()), True, SparseDPError, "coast"),
    ]
    for optimizer, coasts, error, words in refused:
        with pytest.raises(error, match=words):
            support_optimizer(model, layout, optimizer, coasts=coasts)


def test_a_release_of_another_dimension_is_refused() -> None:
    model = Net()
    layout = ParameterLayout.of(model)
    applier = support_optimizer(model, layout, optim.SGD(model.parameters(), lr=0.1), coasts=False)
    other = ParameterLayout.of(nn.Linear(2, 2))
    with pytest.raises(SparseDPError, match="d=6"):
        applier.apply(release(other, Support.full(6), torch.ones(6)))
