"""A forward pass that writes to the model is refused, however the write is hidden.

Under vmap an ordinary write of what an example says is PyTorch's error. The guard must find what goes around vmap:
here a model takes the values out of vmap's wrappers first.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch._C import _functorch

from runs import CLASSES, FEATURES, a_trainer, advance
from sparsedp.errors import PrivacyError
from sparsedp.training.trainer import Trainer
from sparsedp.validation.state import tensor_digest

Write = Callable[["Remembering", Tensor], None]


class Remembering(nn.Module):
    """Writes to itself in the next forward pass with gradients once it is armed, after the check at the start.

    With `around`, what it writes is the mean of all examples, taken out of vmap's wrappers.
    """

    def __init__(self, write: Write, *, around: bool = True) -> None:
        super().__init__()
        self.around = around
        self.frozen = nn.Linear(FEATURES, FEATURES).requires_grad_(False)
        self.layer = nn.Linear(FEATURES, CLASSES)
        self.register_buffer("seen", torch.zeros(FEATURES))
        self.write, self.armed = write, False

    def forward(self, inputs: Tensor) -> Tensor:
        if self.armed and torch.is_grad_enabled():
            self.armed = False
            seen = inputs.detach()
            while self.around and _functorch.is_functorch_wrapped_tensor(seen):
                seen = _functorch.get_unwrapped(seen)
            with torch.no_grad():
                self.write(self, seen.reshape(-1, FEATURES).mean(dim=0))
        return self.layer(self.frozen(inputs))


def writing_in(step: int, write: Write, steps: int, *, around: bool = True) -> Trainer:
    """A trainer after that many steps, in one of which (counted from 1) the model writes to itself."""
    model = Remembering(write, around=around)
    trainer = a_trainer("dp-sgd", model=model)
    advance(trainer, step - 1)
    model.armed = True
    return advance(trainer, steps - step + 1)


OPEN: dict[str, Write] = {
    "frozen.weight": lambda model, mean: model.frozen.weight.add_(mean),
    "frozen.bias": lambda model, mean: model.frozen.bias.copy_(mean),
    "layer.weight": lambda model, mean: model.layer.weight.add_(mean),
    "seen": lambda model, mean: model.seen.add_(mean),
}


def replaced_twice(model: Remembering, mean: Tensor) -> None:
    for _ in range(2):
        model.seen = model.seen + mean


def through_numpy(model: Remembering, mean: Tensor) -> None:
    model.frozen.bias.detach().numpy()[:] = mean.numpy()


HIDDEN: dict[str, tuple[str, Write]] = {
    "frozen by data": ("frozen.weight", lambda model, mean: model.frozen.weight.data.add_(mean)),
    "frozen by numpy": ("frozen.bias", through_numpy),
    "buffer by data": ("seen", lambda model, mean: model.seen.data.add_(mean)),
}


@pytest.mark.parametrize("name", OPEN)
def test_a_write_is_refused_in_the_step_it_happens(name: str) -> None:
    with pytest.raises(PrivacyError, match=name):
        writing_in(2, OPEN[name], steps=2)


@pytest.mark.parametrize("write", [*OPEN.values(), HIDDEN["frozen by data"][1], HIDDEN["buffer by data"][1]])
def test_an_example_written_to_the_model_is_an_error_under_vmap(write: Write) -> None:
    with pytest.raises((RuntimeError, PrivacyError), match=r"vmap|output with shape|changed"):
        writing_in(2, write, steps=2, around=False)


def test_a_buffer_replaced_by_another_is_refused() -> None:
    with pytest.raises(PrivacyError, match="seen"):
        writing_in(2, replaced_twice, steps=2)


@pytest.mark.parametrize("step", [1, 2, 3, 4, 15])
@pytest.mark.parametrize("case", HIDDEN)
def test_a_hidden_write_to_frozen_state_is_found_by_the_end_of_its_epoch(case: str, step: int) -> None:
    """Three steps to an epoch."""
    name, write = HIDDEN[case]
    with pytest.raises(PrivacyError, match=name):
        writing_in(step, write, steps=-(-step // 3) * 3)


@pytest.mark.parametrize("step", [1, 3, 15])
def test_a_hidden_write_to_trained_weights_is_found_in_the_steps_that_compare_values(step: int) -> None:
    with pytest.raises(PrivacyError, match=r"layer\.weight"):
        writing_in(step, lambda model, mean: model.layer.weight.data.add_(mean), steps=step)


def test_frozen_state_may_be_changed_between_steps() -> None:
    model = Remembering(lambda model, mean: None)
    trainer = a_trainer("dp-sgd", model=model)
    for batch in trainer:
        trainer.step(batch)
        model.seen.fill_(batch.step)
    assert trainer.position == 15


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.bool])
def test_a_digest_tells_values_apart_and_not_copies(dtype: torch.dtype) -> None:
    one = torch.tensor([[0, 1, 0], [1, 1, 0]]).to(dtype)
    assert tensor_digest(one) == tensor_digest(one.clone()) == tensor_digest(one.T.contiguous().T)
    assert tensor_digest(one) != tensor_digest(one.flip(0))
    assert tensor_digest(torch.zeros(4)) != tensor_digest(torch.ones(4))
    assert tensor_digest(torch.zeros(0)) == tensor_digest(torch.ones(0))
    assert tensor_digest(torch.tensor(1.0)) != tensor_digest(torch.tensor(2.0))
