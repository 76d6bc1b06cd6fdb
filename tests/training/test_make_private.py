"""A loop of the user's own is the trainer's run, to the bit; and a loop that would not be private is told so."""

from __future__ import annotations

import copy
import pickle
from itertools import pairwise

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import sparsedp
from runs import FEATURES, a_trainer, advance, loss_fn, network, rows, weights
from sparsedp import ModelError, PerExampleLoss, PrivacyError, SparseDPError, fit, make_private

pytestmark = pytest.mark.usefixtures("checked_once")

ASKED = {"epsilon": 8.0, "delta": 1e-3, "epochs": 5, "accountant": "rdp"}


def a_loop(model: nn.Module | None = None, criterion=loss_fn, batch_size: int = 20, **more):
    """The run of `a_trainer`, by another door."""
    model = network() if model is None else model
    more = {"method": "tp-topk", "seed": 0, **ASKED, **more}
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9)
    loader = DataLoader(rows(1), batch_size=batch_size, shuffle=True)
    return make_private(model, optimizer, loader, criterion, **more)


def train(private, epochs: int = 5):
    model, optimizer, loader, criterion = private
    for _ in range(epochs):
        for x, y in loader:
            optimizer.zero_grad()
            criterion(model(x), y).backward()
            optimizer.step()
    return private


def one_step(private, batch):
    x, y = batch
    private.criterion(private.model(x), y).backward()
    return private.optimizer.step()


def after_steps(count: int = 2, **more):
    """A loop after some steps, and the batches that are left of its first epoch."""
    private = a_loop(method="dp-sgd", **more)
    batches = iter(private.loader)
    for _ in range(count):
        one_step(private, next(batches))
    return private, batches


CRITERIA = {
    "mean": nn.CrossEntropyLoss(),
    "sum": nn.CrossEntropyLoss(reduction="sum"),
    "function": F.cross_entropy,
    "per example": PerExampleLoss(lambda model, batch: loss_fn(model(batch[0]), batch[1])),
}


@pytest.mark.parametrize("form", CRITERIA)
def test_a_criterion_of_any_reduction_is_the_loss_of_each_example(form):
    criterion = CRITERIA[form]
    private = a_loop(criterion=criterion)
    for _ in range(5):
        for batch in private.loader:
            if form == "per example":
                private.criterion(private.model, batch).backward()
                private.optimizer.step()
            else:
                one_step(private, batch)
    assert torch.equal(weights(private.model.module), weights(train(a_loop()).model.module))


def test_a_scheduler_works_as_usual():
    private = a_loop()
    scheduler = torch.optim.lr_scheduler.StepLR(private.optimizer, step_size=1, gamma=0.5)
    rates = []
    for _ in range(5):
        rates += [one_step(private, batch).learning_rates[0] for batch in private.loader]
        scheduler.step()
    assert rates == [0.2 * 0.5**epoch for epoch in range(5) for _ in range(3)]
    theirs = a_trainer(
        lr_scheduler=lambda o, _: torch.optim.lr_scheduler.LambdaLR(o, lambda step: 0.5 ** (step // 3))
    )
    assert torch.equal(weights(private.model.module), weights(advance(theirs).finish().model))


def test_a_run_is_written_and_resumed(tmp_path):
    whole = train(a_loop())
    train(a_loop(run_dir=tmp_path / "run"), epochs=2).pause()
    private = a_loop(run_dir=tmp_path / "run", resume=True)
    assert private.loader.epoch == 2
    train(private, epochs=3)
    assert torch.equal(weights(private.model.module), weights(whole.model.module))
    assert sparsedp.verify(tmp_path / "run").passed


def test_epsilon_so_far_is_the_accountants_at_every_step_and_delta():
    private = a_loop()
    assert private.epsilon() == 0
    spent = []
    for _ in range(5):
        for batch in private.loader:
            one_step(private, batch)
            spent.append(private.epsilon())
    assert len(spent) == private.step == 15
    assert all(one < other for one, other in pairwise(spent))
    assert spent[-1] == private.planned_epsilon == private.result.epsilon <= 8
    assert spent[2::3] == [epoch.epsilon for epoch in private.history]
    assert private.epsilon(1e-6) > private.epsilon(1e-3) == private.epsilon()


def test_evaluation_under_no_grad_is_the_plain_model():
    private = a_loop(eval_dataset=rows(7, 30))
    held, targets = rows(7, 30).tensors
    for x, y in private.loader:
        with torch.no_grad():
            assert torch.equal(private.model(held), private.model.module(held))
            assert private.criterion(private.model(held), targets).shape == (30,)
        one_step(private, (x, y))
    found = private.evaluate(rows(7, 30), metrics={"hits": lambda o, t: (o.argmax(1) == t).sum()})
    assert found["hits"] == round(30 * found["accuracy"])
    assert {name: found[name] for name in found if name != "hits"} == private.history[0].metrics
    with pytest.raises(PrivacyError, match="outside the guarantee"):
        private.evaluate(private.loader.dataset)
    train(private, epochs=4)
    assert private.model(held).requires_grad  # the run is over: a model like any other


@pytest.mark.parametrize("mode", [True, False])
def test_modes_stay_as_they_were_set(mode):
    private = train(a_loop(network(dropout=0.5).train(mode)))
    assert {module.training for module in [private.model, *private.model.module.modules()]} == {mode}


def test_what_the_loop_sees_does_not_depend_on_the_weights():
    one, other = a_loop(), a_loop(network(5))
    for (x, y), (x2, y2) in zip(one.loader, other.loader, strict=True):
        assert torch.equal(x, x2)
        first, second = one.model(x), other.model(x2)
        assert repr(first) == repr(second)
        assert {name: value for name, value in vars(first).items() if name != "_batch"} == {}
        one_step(one, (x, y))
        one_step(other, (x2, y2))


@pytest.mark.parametrize("method", ["dp-sgd", "tp-topk", "on-rand"])
def test_the_optimizers_state_is_saved_and_loaded_without_a_folder(method):
    left, right = a_loop(method=method), a_loop(method=method)
    train(left, epochs=3)
    train(right, epochs=3)
    state = copy.deepcopy(left.optimizer.state_dict())
    assert {tuple(one["momentum_buffer"].shape) for one in state["state"].values()} == {
        tuple(p.shape) for p in left.model.module.parameters()
    }
    for entries in right.optimizer.state.values():
        entries["momentum_buffer"].zero_()
    right.optimizer.load_state_dict(state)
    train(left, epochs=2)
    train(right, epochs=2)
    assert torch.equal(weights(left.model.module), weights(right.model.module))
    left.optimizer.load_state_dict(left.optimizer.state_dict())  # also after the last step


@pytest.mark.parametrize("way", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
def test_a_copy_is_the_plain_model_and_none_of_the_run(way):
    private, batches = after_steps()
    private.model(next(batches)[0])
    copied = way(private.model)
    assert type(copied) is nn.Sequential
    assert torch.equal(weights(copied), weights(private.model.module))
    copied(torch.zeros(2, FEATURES)).sum().backward()
    assert all(p.grad is None for p in private.model.parameters())


@pytest.mark.parametrize(
    "change",
    [
        lambda model: model.load_state_dict(copy.deepcopy(model.state_dict()), assign=True),
        lambda model: setattr(model[0], "weight", nn.Parameter(model[0].weight.detach().clone())),
        nn.Module.double,
    ],
    ids=["assigned", "replaced", "widened"],
)
def test_parameters_that_are_not_those_of_the_run_stop_it_before_a_step_is_spent(change):
    private, batches = after_steps()
    batch, position = next(batches), private.step
    change(private.model.module)
    with pytest.raises(ModelError, match=r"parameters .*0\.weight.* are not the ones .*assign=True"):
        one_step(private, batch)
    assert private.step == position


LOSS = "criterion(model(x), y)"
MISUSES = {
    f"{LOSS}.backward(); next(batches)": "before the step",
    "model(x); optimizer.step()": "before the forward",
    f"{LOSS}; optimizer.step()": "before the backward",
    "optimizer.step()": "before the forward",
    "next(iter(loader))": "before the forward",
    f"{LOSS}.backward(); optimizer.step(); optimizer.step()": "no batch is out",
    f"loss = {LOSS}; loss.backward(); loss.backward()": "twice",
    f"old = model(x); {LOSS}.backward(); optimizer.step(); criterion(old, next(batches)[1])": (
        r"expected the output of private\.model"
    ),
    "model(x - x.mean(0))": "batch that the private loader has just given",
    "x -= x.mean(0); model(x)": "changed in place",
    f"{LOSS}.backward(); y.zero_(); optimizer.step()": "changed in place",
    "criterion(model(x), 2 - y).backward()": "other targets",
    "model.eval(); model(held_out)": r"torch\.no_grad\(\).*model\.eval\(\) leaves gradients on",
    "F.multi_margin_loss(model(x), y, reduction='none')": r"private\.criterion",
    f"(3 * {LOSS}).backward()": "backward.. and nothing else",
    f"{LOSS} + sum(p.square().sum() for p in model.parameters())": "PerExampleLoss",
    f"{LOSS}.item()": r"private\.evaluate",
    f"{LOSS} > 1": r"private\.evaluate",
    "output, hidden = model(x)": "PerExampleLoss",
    f"torch.autograd.grad({LOSS}, list(model.parameters()))": "nothing else",
    f"{LOSS}.backward(create_graph=True)": "create_graph",
    "with torch.no_grad(): model(x[1:])": "no_grad",
    "optimizer.step(lambda: None)": "closure",
    f"{LOSS}.backward(); optimizer.zero_grad()": "zero_grad",
    f"{LOSS}.backward(); nn.utils.clip_grad_norm_(model.parameters(), 1.0)": "max_grad_norm.*clip_grad_norm_",
    f"{LOSS}.backward(); [p.grad.clone() for p in model.parameters()]": "no raw gradient exists",
    f"{LOSS}.backward(); sum(p.square().sum() for p in model.parameters()).backward()": "penalty",
    "optimizer.max_grad_norm = 0.1": r"optimizer\.max_grad_norm.*make_private",
    "copy.deepcopy(optimizer)": "not copied.*state_dict",
    "optimizer.add_param_group({'params': [nn.Parameter(torch.zeros(1))]})": "add_param_group",
    "with torch.autocast('cpu'): model(x)": "autocast",
}
"""What a loop does with a batch, and what it is told."""
HONEST_FIRST = ("optimizer.step(); optimizer.step()", "old = model(x)")


def misuse_batch(private, batches, batch, what: str) -> None:
    model, optimizer, loader, criterion = private
    names = {**globals(), "model": model, "optimizer": optimizer, "loader": loader, "criterion": criterion}
    exec(what, names | {"batches": batches, "x": batch[0], "y": batch[1], "held_out": rows(7, 30).tensors[0]})


@pytest.mark.parametrize("misuse", MISUSES)
def test_the_misuse_is_told_and_nothing_is_released(misuse):
    private, batches = after_steps(count=1)
    batch = next(batches)
    before, position = weights(private.model.module), private.step
    honest = any(first in misuse for first in HONEST_FIRST)  # its first step is
    with pytest.raises(SparseDPError, match=MISUSES[misuse]) as told:
        misuse_batch(private, batches, batch, misuse)
    assert private.step == position + honest
    assert str(len(batch[0])) not in str(told.value)
    private.model.zero_grad()
    if not honest:
        assert torch.equal(weights(private.model.module), before)


def test_no_batch_means_no_forward_and_no_plan_means_no_batch():
    private = a_loop(epochs=1)
    with pytest.raises(SparseDPError, match=r"take batches from private\.loader"):
        private.model(rows(1).tensors[0])
    train(private, epochs=1)
    with pytest.raises(SparseDPError, match="all 3 steps"):
        next(iter(private.loader))
    with pytest.raises(SparseDPError, match="no batch is out"):
        private.optimizer.step()


def test_what_is_wrapped_is_not_wrapped_again():
    private, _ = after_steps()
    inner = torch.optim.SGD(private.model.parameters(), lr=0.1)
    given = [private.model.module, inner, DataLoader(rows(1), batch_size=20), loss_fn]
    for place, name in enumerate(("model", "optimizer", "loader", "criterion")):
        wrapped = [*given[:place], getattr(private, name), *given[place + 1 :]]
        with pytest.raises(SparseDPError, match=rf"{name}: got .*make_private"):
            make_private(*wrapped, **ASKED)
    with pytest.raises(SparseDPError, match=r"no_grad|private\.loader"):
        fit(private.model, rows(1), loss_fn, progress=False, **ASKED)


@pytest.mark.parametrize(
    ("name", "words"),
    [("module", "expected model"), ("poisson_sampling", "always Poisson"), ("normalise", "none")],
)
def test_the_names_of_opacus_are_translated(name, words):
    with pytest.raises(TypeError, match=rf"'{name}'.*{words}|{words}.*'{name}'"):
        a_loop(**{name: None})


class Squeezing(nn.Linear):
    """One output an example, without its axis; without any axis for a batch of one."""

    def forward(self, x):
        return super().forward(x).squeeze()


def test_a_squeeze_that_drops_a_batch_of_one_is_told():
    x, y = rows(1).tensors
    model = Squeezing(FEATURES, 1)
    loader = DataLoader(TensorDataset(x, (y > 0).float()), batch_size=20)
    with pytest.raises(SparseDPError, match=r"\.squeeze\(1\)"):
        make_private(
            model, torch.optim.SGD(model.parameters(), lr=0.1), loader, nn.BCEWithLogitsLoss(),
            method="dp-sgd", **ASKED,
        )  # fmt: skip
