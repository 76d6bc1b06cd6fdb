"""What `make_private` gives is handled like any model: copied, saved, nested, changed, wrapped again."""

from __future__ import annotations

import copy
import io
import pickle

import pytest
import torch
import torch.nn.functional as F
from test_make_private import ASKED, a_loop, train
from torch import nn
from torch.optim.swa_utils import AveragedModel
from torch.utils.data import DataLoader

from runs import FEATURES, loss_fn, network, rows, weights
from sparsedp import ModelError, SparseDPError, fit, make_private
from sparsedp.own_loop.deferred import MODEL, Deferred, describe


def after_steps(count: int = 2, **more):
    """A loop after some steps, and the batches that are left of its first epoch."""
    model, optimizer, loader = a_loop(method="dp-sgd", **more)
    batches = iter(loader)
    for _ in range(count):
        one_step(model, optimizer, next(batches))
    return model, optimizer, loader, batches


def one_step(model, optimizer, batch) -> None:
    x, y = batch
    loss_fn(model(x), y).mean().backward()
    optimizer.step()


def by_torch(model: nn.Module) -> nn.Module:
    held = io.BytesIO()
    torch.save(model, held)
    held.seek(0)
    return torch.load(held, weights_only=False)


COPIES = {
    "deepcopy": copy.deepcopy,
    "pickle": lambda model: pickle.loads(pickle.dumps(model)),
    "torch": by_torch,
}


@pytest.mark.parametrize("way", COPIES)
@pytest.mark.parametrize("out", [True, False])
def test_a_copy_is_the_plain_model_and_none_of_the_run(way, out, tmp_path):
    model, _, _, batches = after_steps(out=tmp_path / "run" if out else None)
    batch = next(batches)
    model(batch[0])
    copied = COPIES[way](model)
    assert type(copied) is nn.Sequential
    assert torch.equal(weights(copied), weights(model.module))
    copied(torch.zeros(2, FEATURES)).sum().backward()
    assert all(p.grad is None for p in model.parameters())
    loss_fn(model.module(batch[0]), batch[1])
    with torch.no_grad():
        copied[0].weight.zero_()
    assert bool(model.module[0].weight.any())


def test_an_average_of_the_weights_follows_the_loop():
    model, optimizer, _, batches = after_steps()
    average = AveragedModel(model, avg_fn=lambda old, new, count: new)
    one_step(model, optimizer, next(batches))
    average.update_parameters(model)
    average.update_parameters(model)
    assert torch.equal(weights(average.module), weights(model.module))


def test_a_module_around_the_model_loads_what_it_has_saved():
    model, *_ = after_steps()
    around = nn.ModuleDict({"first": model, "other": nn.Linear(2, 2)})
    saved = {name: value.clone() for name, value in around.state_dict().items()}
    assert set(saved) == {f"first.{name}" for name in network().state_dict()} | {"other.weight", "other.bias"}
    with torch.no_grad():
        for p in around.parameters():
            p.zero_()
    around.load_state_dict(saved)
    assert all(torch.equal(value, saved[name]) for name, value in around.state_dict().items())
    del saved["first.0.weight"]
    with pytest.raises(RuntimeError, match="Missing key"):
        around.load_state_dict(saved)


def assigned(model: nn.Module) -> None:
    state = {name: value.clone() for name, value in model.state_dict().items()}
    model.load_state_dict(state, assign=True)


def replaced(model: nn.Module) -> None:
    model[0].weight = nn.Parameter(model[0].weight.detach().clone())


def widened(model: nn.Module) -> None:
    model.double()


@pytest.mark.parametrize("change", [assigned, replaced, widened])
def test_parameters_that_are_not_those_of_the_run_stop_it_before_a_step_is_spent(change):
    model, optimizer, loader, batches = after_steps()
    change(model.module)
    x, y = next(batches)
    loss_fn(model(x), y).mean().backward()
    position = loader.trainer.position
    with pytest.raises(ModelError, match=r"parameters .*0\.weight.* are not the ones .*assign=True"):
        optimizer.step()
    assert loader.trainer.position == position


def test_values_written_into_the_parameters_are_gone_on_with():
    model, optimizer, _, batches = after_steps()
    model.load_state_dict({name: torch.zeros_like(value) for name, value in model.state_dict().items()})
    one_step(model, optimizer, next(batches))
    assert bool(model.module[3].bias.any())


def test_what_is_wrapped_is_not_wrapped_again():
    model, optimizer, loader, _ = after_steps()
    plain, loss = DataLoader(rows(1), batch_size=20), loss_fn
    inner = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(SparseDPError, match=r"model: got .*make_private.*model\.module"):
        make_private(model, inner, plain, loss, **ASKED)
    with pytest.raises(SparseDPError, match=r"optimizer: got .*make_private.*new torch\.optim"):
        make_private(model.module, optimizer, plain, loss, **ASKED)
    with pytest.raises(SparseDPError, match="data_loader"):
        make_private(model.module, inner, loader, loss, **ASKED)
    with pytest.raises(SparseDPError, match=r"fit.*model\.module"):
        fit(model, rows(1), loss, progress=False, **ASKED)


def test_a_second_backward_is_not_thrown_away_in_silence():
    model, optimizer, loader, batches = after_steps()
    x, y = next(batches)
    loss_fn(model(x), y).mean().backward()
    sum(p.square().sum() for p in model.module[0].parameters()).backward()
    before, position = weights(model.module), loader.trainer.position
    with pytest.raises(SparseDPError, match=r"'0\.weight', '0\.bias'.*backward.*weight_decay"):
        optimizer.step()
    assert loader.trainer.position == position
    model.zero_grad()
    optimizer.step()
    assert not torch.equal(weights(model.module), before)


def test_zero_grad_forgets_what_was_left_from_before():
    network_, (x, y) = network(), rows(3).tensors
    loss_fn(network_(x), y).mean().backward()
    model, optimizer, loader = a_loop(network_)
    train(model, optimizer, loader)
    assert loader.finish().complete


@pytest.mark.parametrize("size", [17, 39])
def test_a_refusal_does_not_tell_how_many_rows_were_drawn(size):
    x = torch.zeros(size, 3)
    out = Deferred(MODEL, (x,), {}, lambda loss: None)
    said = [
        describe(out.sum() / size),
        describe(out[:size] * float(size)),
        describe(Deferred(MODEL, (x.T, [x] * size), {"size": torch.Size([size])}, lambda loss: None)),
        describe(torch.stack([out] * size)),
        repr(F.nll_loss(out, x[:, 0].long(), reduction="none").view(size, -1)),
    ]
    assert not any(str(size) in one for one in said)
    assert "reduction=none" in said[-1]


def test_a_loop_that_divides_by_the_rows_is_refused_without_their_number():
    model, _, _, batches = after_steps()
    x, y = next(batches)
    with pytest.raises(SparseDPError, match="got truediv") as refused:
        (loss_fn(model(x), y).sum() / len(x)).backward()
    assert not any(sign.isdigit() for sign in str(refused.value))
