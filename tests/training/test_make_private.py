"""A loop of the user's own is the trainer's run, to the bit."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, Dataset, TensorDataset

import sparsedp
from runs import a_plan, a_trainer, advance, loss_fn, network, rows, weights
from sparsedp import PerExampleLoss, make_private
from sparsedp.methods import get_method
from sparsedp.own_loop.loop import Loop
from sparsedp.own_loop.private_loop import PrivateLoader, PrivateModel, PrivateOptimizer

pytestmark = pytest.mark.usefixtures("checked_once")

ASKED = {"epsilon": 8.0, "delta": 1e-3, "epochs": 5, "accountant": "rdp"}
Triple = tuple[PrivateModel, PrivateOptimizer, PrivateLoader]


def a_loop(model: nn.Module | None = None, loss=loss_fn, batch_size: int = 20, **more) -> Triple:
    """The run of `a_trainer`, by another door."""
    model = network() if model is None else model
    more = {"method": "tp-topk", "seed": 0, **ASKED, **more}
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9)
    return make_private(
        model, optimizer, DataLoader(rows(1), batch_size=batch_size, shuffle=True), loss, **more
    )


def train(model, optimizer, loader, epochs: int = 5, loss=loss_fn) -> None:
    for _ in range(epochs):
        for x, y in loader:
            optimizer.zero_grad()
            loss(model(x), y).mean().backward()
            optimizer.step()


@pytest.mark.parametrize("method", ["tp-topk", "dp-sgd", "on-rand", "adadpigu"])
def test_the_loop_gives_the_weights_of_the_trainer(method):
    model, optimizer, loader = a_loop(method=method)
    train(model, optimizer, loader)
    theirs = a_trainer(method, plan=a_plan(get_method(method)))
    advance(theirs)
    assert torch.equal(weights(model.module), weights(theirs.finish().model))
    assert loader.finish().epsilon == theirs.finish().epsilon <= 8
    assert loader.finish().complete


def test_gradients_are_never_left_on_the_parameters():
    model, optimizer, loader = a_loop()
    for x, y in loader:
        loss_fn(model(x), y).sum().backward()
        assert all(p.grad is None for p in model.parameters())
        released = optimizer.step().released
        assert released.private
        assert all(p.grad is None for p in model.parameters())


def test_the_loop_accumulates_as_usual():
    model, optimizer, loader = a_loop(batch_size=5, accumulation=4)
    assert len(loader) == 12
    for i in range(5):
        for place, (x, y) in enumerate(loader, start=1):
            (loss_fn(model(x), y).mean() / 4).backward()
            if place % 4 == 0:
                optimizer.step()
                optimizer.zero_grad()
        assert loader.epoch == i + 1
    whole = a_loop()
    train(*whole)
    assert torch.equal(weights(model.module), weights(whole[0].module))


def test_a_scheduler_works_as_usual():
    model, optimizer, loader = a_loop()
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5)
    rates = []
    for _ in range(5):
        for x, y in loader:
            loss_fn(model(x), y).backward()
            rates.append(optimizer.step().learning_rates[0])
        scheduler.step()
    assert rates == [0.2 * 0.5**epoch for epoch in range(5) for _ in range(3)]
    theirs = a_trainer(
        scheduler=lambda o, _: torch.optim.lr_scheduler.LambdaLR(o, lambda step: 0.5 ** (step // 3))
    )
    assert torch.equal(weights(model.module), weights(advance(theirs).finish().model))


def test_a_run_is_written_and_resumed(tmp_path):
    whole = a_loop()
    train(*whole)
    model, optimizer, loader = a_loop(out=tmp_path / "run")
    train(model, optimizer, loader, epochs=2)
    loader.pause()
    model, optimizer, loader = a_loop(out=tmp_path / "run", resume=True)
    assert loader.epoch == 2
    train(model, optimizer, loader, epochs=3)
    assert torch.equal(weights(model.module), weights(whole[0].module))
    assert sparsedp.verify(tmp_path / "run").passed
    assert loader.finish().report().exists()


def test_evaluation_under_no_grad_is_the_plain_model():
    model, optimizer, loader = a_loop(eval_dataset=rows(7, 30))
    held = rows(7, 30).tensors[0]
    for x, y in loader:
        with torch.no_grad():
            assert torch.equal(model(held), model.module(held))
        loss_fn(model(x), y).mean().backward()
        optimizer.step()
    train(model, optimizer, loader, epochs=4)
    assert "accuracy" in loader.finish().metrics
    assert model(held).requires_grad  # the run is over: a model like any other


def test_modes_stay_as_they_were_set():
    model, optimizer, loader = a_loop(network(dropout=0.5))
    model.train()
    train(model, optimizer, loader)
    assert model.training
    assert all(module.training for module in model.module.modules())
    model, optimizer, loader = a_loop(network(dropout=0.5).eval())
    assert not model.training
    train(model, optimizer, loader)
    assert not any(module.training for module in model.module.modules())


def test_the_model_inside_shows_through():
    model, _, loader = a_loop()
    assert model.state_dict().keys() == network().state_dict().keys()
    model.load_state_dict(network(3).state_dict())
    assert torch.equal(weights(model.module), weights(network(3)))
    assert model.append == model.module.append
    assert len(loader.dataset) == 60


def test_an_empty_batch_is_a_batch():
    model, optimizer, loader = a_loop(batch_size=1, epochs=1, method="dp-sgd")
    sizes = []
    for x, y in loader:
        sizes.append(len(x))
        loss_fn(model(x), y).mean().backward()
        optimizer.step()
    assert 0 in sizes
    assert len(sizes) == 60


class Named(Dataset):
    """Rows by name."""

    def __len__(self) -> int:
        return 60

    def __getitem__(self, i):
        x, y = rows(1)[i]
        return {"x": x, "y": y}


def test_a_loss_of_its_own_form_calls_the_model_itself():
    loss = PerExampleLoss(
        lambda model, batch: F.cross_entropy(model(batch["x"]), batch["y"], reduction="none")
    )
    inner = network()
    optimizer = torch.optim.SGD(inner.parameters(), lr=0.2, momentum=0.9)
    model, optimizer, loader = make_private(
        inner, optimizer, DataLoader(Named(), batch_size=20), loss, method="tp-topk", seed=0, **ASKED
    )
    for _ in range(5):
        for batch in loader:
            loss.loss(model, batch).mean().backward()
            optimizer.step()
    whole = a_loop()
    train(*whole)
    assert torch.equal(weights(inner), weights(whole[0].module))


def squared(output, target):
    return 0.5 * (output - F.one_hot(target, 3)).square().mean(dim=1) + output[:, 0].abs() / 100


def test_a_loss_of_operators_is_followed():
    train(*a_loop(loss=squared), loss=squared)


def test_memory_is_bounded_behind_the_loop():
    small, whole = a_loop(max_physical_batch=4), a_loop()
    train(*small)
    train(*whole)
    assert torch.allclose(weights(small[0].module), weights(whole[0].module), atol=1e-6)


def test_units_with_several_rows():
    data = rows(1)
    patients = torch.arange(60) // 3
    model = network()
    loader = DataLoader(TensorDataset(*data.tensors), batch_size=5)
    model, optimizer, loader = make_private(
        model, torch.optim.Adam(model.parameters()), loader, loss_fn, units=patients, unit="patient",
        rows_per_unit=2, method="dp-sgd", **{**ASKED, "epochs": 1},
    )  # fmt: skip
    train(model, optimizer, loader, epochs=1)
    assert loader.finish().unit == "patient"
    assert loader.finish().for_release


def test_what_the_loop_sees_does_not_depend_on_the_weights():
    one, other = a_loop(), a_loop(network(5))
    for (x, y), (x2, y2) in zip(one[2], other[2], strict=True):
        assert torch.equal(x, x2)
        first, second = loss_fn(one[0](x), y).mean(), loss_fn(other[0](x2), y2).mean()
        assert repr(first) == repr(second)
        for loss, (_, optimizer, _) in ((first, one), (second, other)):
            loss.backward()
            optimizer.step()


def test_the_loop_is_final():
    for kind in (Loop, PrivateModel, PrivateOptimizer, PrivateLoader):
        assert getattr(kind, "__final__", False)
