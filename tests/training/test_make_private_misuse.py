"""Loops that would not be private, or not be training: each is told, and no step is spent on it."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from test_make_private import ASKED, a_loop
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, WeightedRandomSampler

from runs import loss_fn, network, rows, weights
from sparsedp import DataError, PrivacyError, SparseDPError, make_private


def stepped(model, optimizer, loader):
    """A batch that is out, after a first whole step."""
    batches = iter(loader)
    x, y = next(batches)
    loss_fn(model(x), y).mean().backward()
    optimizer.step()
    x, y = next(batches)
    return batches, x, y


def skip_a_step(model, optimizer, batches, x, y):
    loss_fn(model(x), y).mean().backward()
    next(batches)


def skip_backward(model, optimizer, batches, x, y):
    model(x)
    optimizer.step()


def skip_forward(model, optimizer, batches, x, y):
    optimizer.step()


def skip_a_batch(model, optimizer, batches, x, y):
    next(batches)


def step_twice(model, optimizer, batches, x, y):
    loss_fn(model(x), y).mean().backward()
    optimizer.step()
    optimizer.step()


def backward_twice(model, optimizer, batches, x, y):
    loss = loss_fn(model(x), y).mean()
    loss.backward()
    loss.backward()


def forward_twice(model, optimizer, batches, x, y):
    model(x)
    model(x)


def change_the_batch(model, optimizer, batches, x, y):
    loss_fn(model(x - x.mean(0)), y).mean().backward()


def change_it_in_place(model, optimizer, batches, x, y):
    x -= x.mean(0)
    model(x)


def change_it_after_backward(model, optimizer, batches, x, y):
    loss_fn(model(x), y).mean().backward()
    y.zero_()
    optimizer.step()


def change_the_targets(model, optimizer, batches, x, y):
    loss_fn(model(x), 2 - y).mean().backward()


def take_part_of_the_batch(model, optimizer, batches, x, y):
    loss_fn(model(x[:2]), y[:2]).mean().backward()


def another_batch(model, optimizer, batches, x, y):
    held, targets = rows(7, 30).tensors
    loss_fn(model(held), targets).mean().backward()


def another_loss(model, optimizer, batches, x, y):
    F.multi_margin_loss(model(x), y, reduction="none").mean().backward()


def a_mean_inside(model, optimizer, batches, x, y):
    F.cross_entropy(model(x), y).backward()


def a_scaled_loss(model, optimizer, batches, x, y):
    (3 * loss_fn(model(x), y).mean()).backward()


def an_added_penalty(model, optimizer, batches, x, y):
    (loss_fn(model(x), y).mean() + sum(p.square().sum() for p in model.parameters())).backward()


def read_the_loss(model, optimizer, batches, x, y):
    loss_fn(model(x), y).mean().item()


def format_the_loss(model, optimizer, batches, x, y):
    format(loss_fn(model(x), y).mean(), ".3f")


def compare_the_loss(model, optimizer, batches, x, y):
    if loss_fn(model(x), y).mean() > 1:
        pass


def count_hits(model, optimizer, batches, x, y):
    int((model(x).argmax(1) == y).sum())


def read_gradients_of_the_loss(model, optimizer, batches, x, y):
    torch.autograd.grad(loss_fn(model(x), y).mean(), list(model.parameters()))


def hook_the_output(model, optimizer, batches, x, y):
    model(x).register_hook(print)


def second_derivatives(model, optimizer, batches, x, y):
    loss_fn(model(x), y).mean().backward(create_graph=True)


def look_without_gradients(model, optimizer, batches, x, y):
    with torch.no_grad():
        model(x[1:])


def a_closure(model, optimizer, batches, x, y):
    optimizer.step(lambda: loss_fn(model(x), y).mean())


def forget_before_the_step(model, optimizer, batches, x, y):
    loss_fn(model(x), y).mean().backward()
    optimizer.zero_grad()


def a_second_pass_meanwhile(model, optimizer, batches, x, y):
    for _ in a_second_pass_meanwhile.loader:
        pass


def accumulate_untold(model, optimizer, batches, x, y):
    (loss_fn(model(x), y).mean() / 2).backward()


def other_parameters(model, optimizer, batches, x, y):
    optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(1))]})


def other_state(model, optimizer, batches, x, y):
    optimizer.load_state_dict(optimizer.state_dict())


def autocast_outside(model, optimizer, batches, x, y):
    with torch.autocast("cpu"):
        loss_fn(model(x), y).mean().backward()


MISUSES = {
    skip_a_step: "before the step",
    skip_backward: "before the backward",
    skip_forward: "before the forward",
    skip_a_batch: "before the forward",
    step_twice: "no batch is out",
    backward_twice: "twice",
    forward_twice: "called 2 times",
    change_the_batch: "not loss_fn on the batch",
    change_it_in_place: "changed in place",
    change_it_after_backward: "changed in place",
    change_the_targets: "not loss_fn on the batch",
    take_part_of_the_batch: "not loss_fn on the batch",
    another_batch: "not loss_fn on the batch",
    another_loss: "not loss_fn",
    a_mean_inside: "reduction=mean",
    a_scaled_loss: "not loss_fn",
    an_added_penalty: "not loss_fn",
    read_the_loss: "held-out",
    format_the_loss: "held-out",
    compare_the_loss: "held-out",
    count_hits: "held-out",
    read_gradients_of_the_loss: "before it is released",
    hook_the_output: "before it is released",
    second_derivatives: "create_graph",
    look_without_gradients: "no_grad",
    a_closure: "closure",
    forget_before_the_step: "zero_grad",
    a_second_pass_meanwhile: "another batch was asked for",
    accumulate_untold: "not loss_fn",
    other_parameters: "add_param_group",
    other_state: "resume",
    autocast_outside: "autocast",
}


@pytest.mark.parametrize("misuse", MISUSES, ids=lambda misuse: misuse.__name__)
def test_the_misuse_is_told_and_nothing_is_released(misuse):
    model, optimizer, loader = a_loop(method="dp-sgd")
    batches, x, y = stepped(model, optimizer, loader)
    a_second_pass_meanwhile.loader = loader
    before, position = weights(model.module), loader.trainer.position
    spent = position + (misuse is step_twice)  # its first step is an honest one
    with pytest.raises(SparseDPError, match=MISUSES[misuse]):
        misuse(model, optimizer, batches, x, y)
    assert loader.trainer.position == spent
    assert all(p.grad is None for p in model.parameters())
    if spent == position:
        assert torch.equal(weights(model.module), before)


def test_the_model_takes_no_rows_when_no_batch_is_out():
    model, _, _ = a_loop()
    with pytest.raises(SparseDPError, match="no batch is out"):
        model(rows(1).tensors[0])


def test_the_plan_is_not_exceeded():
    model, optimizer, loader = a_loop(epochs=1)
    for x, y in loader:
        loss_fn(model(x), y).mean().backward()
        optimizer.step()
    with pytest.raises(SparseDPError, match="all 3 steps"):
        next(iter(loader))
    with pytest.raises(SparseDPError, match="no batch is out"):
        optimizer.step()


def test_parts_are_gone_through_before_the_step():
    model, optimizer, loader = a_loop(batch_size=10, accumulation=2)
    batches = iter(loader)
    x, y = next(batches)
    loss_fn(model(x), y).mean().backward()
    with pytest.raises(SparseDPError, match="1 of the 2 parts"):
        optimizer.step()
    x, y = next(batches)
    with pytest.raises(SparseDPError, match="zero_grad"):
        optimizer.zero_grad()
    loss_fn(model(x), y).mean().backward()
    with pytest.raises(SparseDPError, match="before the step"):
        next(batches)


def test_a_loop_that_stops_with_a_batch_out_does_not_go_on_without_it():
    model, _, loader = a_loop()
    for x, _ in loader:
        model(x)
        break
    with pytest.raises(SparseDPError, match="before the backward"):
        next(iter(loader))


class Endless(IterableDataset):
    """Rows without end."""

    def __iter__(self):
        return iter(rows(1))


def asked(loader=None, loss=loss_fn, optimizer=None, **more):
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1) if optimizer is None else optimizer
    loader = DataLoader(rows(1), batch_size=20) if loader is None else loader
    return make_private(model, optimizer, loader, loss, **ASKED, **more)


def test_what_cannot_be_made_private_is_refused_at_once():
    with pytest.raises(DataError, match="DataLoader"):
        asked(rows(1))
    with pytest.raises(DataError, match="map-style"):
        asked(DataLoader(Endless(), batch_size=20))
    with pytest.raises(DataError, match="WeightedRandomSampler"):
        asked(DataLoader(rows(1), batch_size=20, sampler=WeightedRandomSampler([1.0] * 60, 60)))
    with pytest.raises(DataError, match="batch_size"):
        asked(DataLoader(rows(1), batch_size=None))
    with pytest.raises(SparseDPError, match="optimizer"):
        asked(optimizer="adam")
    with pytest.raises(SparseDPError, match="accumulation"):
        asked(accumulation=0)
    with pytest.raises(PrivacyError, match="give units="):
        asked(unit="patient")


@pytest.mark.parametrize("name", ["batch_size", "normalise", "lr"])
def test_what_the_loader_says_or_no_plan_has_is_refused_by_name(name):
    with pytest.raises(TypeError, match=rf"make_private\(\) got .*'{name}'.*epsilon, delta, epochs"):
        asked(**{name: None})


def test_a_loss_that_cannot_be_followed_is_told():
    def branching(output, target):
        return F.cross_entropy(output, target, reduction="none") * (2 if len(output) == 1000 else 1)

    model, _, loader = a_loop(loss=branching)
    x, _ = next(iter(loader))
    with pytest.raises(PrivacyError, match="a number"):
        model(x)
