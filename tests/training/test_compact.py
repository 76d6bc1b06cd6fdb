"""The optimizer over the active entries alone gives, to the bit, what one over all coordinates with a mask gives."""

from __future__ import annotations

import copy
import functools

import pytest
import torch
from torch import Tensor, nn

from optimizer_cases import DROPPING, Net, gradients, random_support, release
from sparsedp.optimizers.places import Places
from sparsedp.optimizers.sparse import ELEMENTWISE, SupportOptimizer
from sparsedp.parameters import ParameterLayout, Support

pytestmark = pytest.mark.usefixtures("checked_once")

ONE_BY_ONE = [name for name in DROPPING if type(DROPPING[name]([nn.Parameter(torch.ones(2))])) in ELEMENTWISE]


def supports(layout: ParameterLayout) -> list[Support]:
    """Everything, scattered, whole rows, overlapping, one parameter alone, nothing, and back."""
    d = layout.dimension
    weight, kernel, bias = (layout.slot(name).offset for name in ("weight", "kernel", "bias"))
    rows = Support([*range(weight + 6, weight + 18), *range(kernel, kernel + 12), bias], d)
    return [
        Support.full(d),
        random_support(d, 20, seed=1),
        rows,
        random_support(d, 30, seed=2),
        Support([bias, bias + 3], d),
        Support.empty(d),
        random_support(d, 25, seed=3),
        Support.full(d),
    ]


def bits(model: nn.Module) -> list[Tensor]:
    return [p.detach().view(torch.int32) for p in model.parameters()]


@pytest.mark.parametrize("name", ONE_BY_ONE)
def test_compact_and_masked_agree_to_the_bit_across_support_changes(name: str) -> None:
    compact_model, masked_model = Net(), Net()
    layout = ParameterLayout.of(compact_model)
    compact = SupportOptimizer(
        compact_model, layout, DROPPING[name](compact_model.parameters()), coasts=False
    )
    masked = SupportOptimizer(
        masked_model, layout, DROPPING[name](masked_model.parameters()), coasts=False, compact=False
    )
    every = supports(layout)
    for step, value in enumerate(gradients(layout.dimension, 3 * len(every))):
        for applier in (compact, masked):
            applier.apply(release(layout, every[step // 3], value, step))
        assert all(map(torch.equal, bits(compact_model), bits(masked_model))), f"step {step}"


@pytest.mark.parametrize("name", ONE_BY_ONE)
@pytest.mark.parametrize("stop", [5, 7, 13])
def test_a_resumed_optimizer_goes_on_to_the_same_bits(name: str, stop: int) -> None:
    model = Net()
    layout = ParameterLayout.of(model)
    applier = SupportOptimizer(model, layout, DROPPING[name](model.parameters()), coasts=False)
    every = supports(layout)
    for step, value in enumerate(gradients(layout.dimension, 3 * len(every))):
        if step == stop:
            saved, copied = copy.deepcopy(applier.state()), copy.deepcopy(model)
            resumed = SupportOptimizer(copied, layout, DROPPING[name](copied.parameters()), coasts=False)
            resumed.restore(saved, every[(step - 1) // 3])
        applier.apply(release(layout, every[step // 3], value, step))
        if step >= stop:
            resumed.apply(release(layout, every[step // 3], value, step))
            assert all(map(torch.equal, bits(model), bits(copied)))


@pytest.mark.parametrize("compact", [True, False])
@pytest.mark.parametrize("resumed", [False, True])
@pytest.mark.parametrize(
    ("make", "kept", "start"),
    [
        (functools.partial(torch.optim.Adagrad, lr=0.1, initial_accumulator_value=0.5), "sum", 0.5),
        (functools.partial(torch.optim.Rprop, lr=0.1), "step_size", 0.1),
    ],
)
def test_a_row_that_enters_later_begins_as_in_an_optimizer_of_its_own(
    compact, make, kept, start, resumed
) -> None:
    """Adagrad's `sum` and Rprop's `step_size` do not begin at zero."""
    model = Net()
    layout = ParameterLayout.of(model)
    first, then = random_support(layout.dimension, 20, seed=1), random_support(layout.dimension, 24, seed=2)
    entering = then.without(first)
    alone = nn.Parameter(entering.gather(layout.flatten(model)))
    plain, optimizer = make([alone]), make(model.parameters())
    applier = SupportOptimizer(model, layout, optimizer, coasts=False, compact=compact)
    values = gradients(layout.dimension, 6)
    for step in range(3):
        applier.apply(release(layout, first, values[step], step))
    if resumed:
        saved, optimizer = copy.deepcopy(applier.state()), make.func(model.parameters())
        applier.hand_back()
        applier = SupportOptimizer(model, layout, optimizer, coasts=False, compact=compact)
        applier.restore(saved, first)
    for step in range(3, 6):
        applier.apply(release(layout, then, values[step], step))
        alone.grad = entering.gather(values[step]).float()
        plain.step()
        assert torch.equal(entering.gather(layout.flatten(model)), alone.detach()), f"step {step}"
    applier.hand_back()
    state = torch.cat([optimizer.state[p][kept].reshape(-1) for p in layout.parameters(model)])
    assert torch.equal(entering.gather(state), plain.state[alone][kept])
    assert (state[~then.mask()] == start).all()


@pytest.mark.parametrize("name", ["momentum", "adam", "adagrad"])
def test_a_checkpoint_with_state_for_every_coordinate_can_be_gone_on_from(name: str) -> None:
    """That is what version 0.1 wrote."""
    model = Net()
    layout = ParameterLayout.of(model)
    masked = SupportOptimizer(model, layout, DROPPING[name](model.parameters()), coasts=False, compact=False)
    support = random_support(layout.dimension, 20, seed=1)
    values = gradients(layout.dimension, 6)
    for step in range(3):
        masked.apply(release(layout, support, values[step], step))
    copied = copy.deepcopy(model)
    compact = SupportOptimizer(copied, layout, DROPPING[name](copied.parameters()), coasts=False)
    compact.restore(copy.deepcopy(masked.state()), support)
    for step in range(3, 6):
        for applier in (masked, compact):
            applier.apply(release(layout, support, values[step], step))
    assert all(map(torch.equal, bits(model), bits(copied)))


def test_adam_keeps_two_numbers_for_each_active_coordinate_and_none_for_the_rest() -> None:
    model = Net()
    layout = ParameterLayout.of(model)
    optimizer = torch.optim.Adam(model.parameters())
    applier = SupportOptimizer(model, layout, optimizer, coasts=False)
    support = random_support(layout.dimension, 11, seed=1)
    applier.apply(release(layout, Support.full(layout.dimension), gradients(layout.dimension, 1)[0]))
    applier.apply(release(layout, support, gradients(layout.dimension, 1)[0], 1))
    kept = [v for state in optimizer.state.values() for name, v in state.items() if name != "step"]
    assert sum(value.numel() for value in kept) == 2 * support.size


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_rows_written_back_count_as_a_change_and_leave_the_others_alone(dtype):
    parameter = torch.nn.Parameter(torch.arange(12.0, dtype=dtype).view(6, 2))
    before, seen = parameter._version, parameter.detach().clone()
    Places((6, 2), torch.tensor([1, 4]), by_row=True).write(
        parameter.detach(), torch.full((2, 2), -7.0, dtype=dtype)
    )
    seen[[1, 4]] = -7.0
    assert torch.equal(parameter, seen)
    assert parameter._version > before
