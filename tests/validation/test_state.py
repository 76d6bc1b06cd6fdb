"""What a model or a loss keeps of the rows it looked at is found, by name, wherever it is; public things may be kept.

Under vmap an ordinary write of what an example says is PyTorch's error. The guard must find what goes around vmap,
and what happens where examples are computed one after the other.
"""

from __future__ import annotations

import io
import logging
import random
import threading
from array import array
from collections import deque
from collections.abc import Callable
from functools import lru_cache
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._C import _functorch

from runs import CLASSES, FEATURES, a_trainer, advance, network
from sparsedp.batch import LossFunction, from_criterion
from sparsedp.errors import PrivacyError
from sparsedp.validation.state import StateGuard

Batch = tuple[Tensor, Tensor]


def batch_of(step: int, count: int = 7) -> Batch:
    generator = torch.Generator().manual_seed(step)
    return torch.randn(count, FEATURES, generator=generator), torch.arange(count) % CLASSES


def cross_entropy(model: Callable[..., Any], rows: Batch) -> Tensor:
    return F.cross_entropy(model(rows[0]), rows[1], reduction="none")


def take_steps(
    model: nn.Module | None = None,
    loss: LossFunction = cross_entropy,
    *,
    steps: int = 4,
    between: Callable[[int], object] = lambda step: None,
) -> None:
    """The guard without a run: the trial on one row, then steps on other rows each, two to an epoch."""
    model = network() if model is None else model
    state = StateGuard(model, loss, lambda: batch_of(0, 1))
    state.check()
    for step in range(1, steps + 1):
        with state.untouched(last_of_epoch=step % 2 == 0):
            for count in (7, 3):
                loss(model, batch_of(step, count)).sum().backward()
        between(step)


# Writes to parameters and buffers.


class Remembering(nn.Module):
    """Runs a statement in the next forward pass with gradients once it is armed, after the check at the start.

    `mean` is that of all examples, taken out of vmap's wrappers.
    """

    def __init__(self, statement: str) -> None:
        super().__init__()
        self.frozen = nn.Linear(FEATURES, FEATURES).requires_grad_(False)
        self.layer = nn.Linear(FEATURES, CLASSES)
        self.register_buffer("seen", torch.zeros(FEATURES))
        self.statement, self.armed = statement, False

    def forward(self, inputs: Tensor) -> Tensor:
        if self.armed and torch.is_grad_enabled():
            self.armed, seen = False, inputs.detach()
            while _functorch.is_functorch_wrapped_tensor(seen):
                seen = _functorch.get_unwrapped(seen)
            with torch.no_grad():
                exec(self.statement, {"m": self, "mean": seen.reshape(-1, FEATURES).mean(dim=0)})
        return self.layer(self.frozen(inputs))


def writing_in(step: int, statement: str, steps: int) -> None:
    """So many steps of a run, in one of which (counted from 1) the model writes to itself."""
    model = Remembering(statement)
    trainer = a_trainer("dp-sgd", model=model)
    advance(trainer, step - 1)
    model.armed = True
    advance(trainer, steps - step + 1)


OPEN = {
    "m.frozen.weight.add_(mean)": "frozen.weight",
    "m.layer.weight.add_(mean)": "layer.weight",
    "m.seen.add_(mean)": "seen",
    "m.seen = m.seen + mean; m.seen = m.seen + mean": "seen",
}
HIDDEN = {
    "m.frozen.weight.data.add_(mean)": "frozen.weight",
    "m.frozen.bias.detach().numpy()[:] = mean.numpy()": "frozen.bias",
    "m.seen.data.add_(mean)": "seen",
}


@pytest.mark.parametrize("statement", OPEN)
def test_a_write_is_refused_in_the_step_it_happens(statement):
    with pytest.raises(PrivacyError, match=OPEN[statement]):
        writing_in(2, statement, steps=2)


TRAINED = "m.layer.weight.data.add_(mean)"


@pytest.mark.parametrize(
    ("statement", "step"),
    [
        *((each, step) for each in HIDDEN for step in (1, 2, 3, 4, 15)),
        *((TRAINED, step) for step in (1, 3, 15)),
    ],
)
def test_a_hidden_write_is_found_by_the_end_of_its_epoch(statement, step):
    """Three steps to an epoch. Of trained weights only the first step and the last of an epoch compare values."""
    with pytest.raises(PrivacyError, match=HIDDEN.get(statement, r"layer\.weight")):
        writing_in(step, statement, steps=step if statement == TRAINED else -(-step // 3) * 3)


# Attributes of modules.


class Slotted:
    __slots__ = ("value",)


class Recorder:
    """A callable object, as augmentations are."""

    def __call__(self, x: Tensor) -> Tensor:
        self.last = x.detach().clone()
        return x


class Buffer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("last", torch.zeros(FEATURES))

    def forward(self, x: Tensor) -> Tensor:
        self.last.copy_(x.detach()[-1])
        return x


class Keeping(nn.Module):
    """A network that runs a statement while it computes, with many places to keep something in."""

    def __init__(self, statement: str) -> None:
        super().__init__()
        self.inner, self.statement, self.first = network(), statement, None
        self.slotted, self.recorder, self.helpers = Slotted(), Recorder(), [Buffer()]
        self.seen, self.kept, self.queue = [], {}, deque(maxlen=2)
        self.array, self.hidden, self.numbers = np.zeros(FEATURES), torch.zeros(FEATURES), array("f", [0.0])
        self.bytes, self.text, self.table = bytearray(), io.StringIO(), pd.DataFrame()

    def forward(self, x: Tensor) -> Tensor:
        exec(self.statement, {**globals(), "m": self, "x": x})
        return self.inner(x)


KEPT = {
    "m.last_input = x": "last_input",
    "m.first = x if m.first is None else m.first": "first",
    "m.recorder.value = [{'rows': x.detach()}]": r"recorder.value\[0\]\['rows'\]",
    "m.slotted.value = x.mean().detach()": "slotted.value",
    "m.seen.append(x.detach().sum())": r"seen\[0\]",
    "m.queue.append(x.detach())": r"queue\[0\]",
    "m.array += x.detach().double().sum(0).numpy()": "array",
    "m.hidden += x.detach().sum(0)": "hidden",
    "m.hidden.data += x.detach().sum(0)": "hidden",
    "m.largest = float(x.max())": "largest",
    "m.rows = len(x)": "rows",
    "m.recorder(x)": r"recorder\.last",
    "m.helpers[0](x)": r"\['helpers\[0\]\.last'\]",
    "m.kept[tuple(x[0].tolist())] = True": r"kept\[key 0\]\[0\]",
    "m.numbers[:] = array('f', x[-1].tolist())": "numbers",
    "m.bytes[:] = x.numpy().tobytes()": "bytes",
    "m.text.write(str(x[-1].tolist()))": "text",
    "m.table = pd.DataFrame(x.numpy())": r"table\._mgr",
    "m.inner[0].weight.last = x": r"inner\.0\.weight\.last",
}


@pytest.mark.parametrize("statement", KEPT)
def test_what_is_kept_of_the_rows_is_refused_by_name_before_a_release(statement):
    released: list[object] = []
    with pytest.raises(PrivacyError, match=f"(^|, ){KEPT[statement]}(,| of the model)"):
        advance(a_trainer(model=Keeping(statement), callbacks=[released.append]))
    assert released == []


OF_WEIGHTS = "m.norm = m.inner[0].weight.detach().norm()"
PUBLIC = [
    OF_WEIGHTS,
    "m.kept.setdefault(x.shape[1], torch.ones(x.shape[1], x.shape[1]).tril())",
    "m.first = torch.arange(x.shape[1]) if m.first is None else m.first",
]


@pytest.mark.parametrize("statement", PUBLIC)
def test_public_things_may_be_kept_and_anything_set_between_steps(statement):
    model = Keeping(statement)
    trainer = a_trainer(model=model)
    for batch in trainer:
        trainer.step(batch)
        model.steps, model.slotted.value = batch.step, torch.ones(batch.step)
        model.helpers[0].last.fill_(batch.step)
    assert trainer.position == 15


class Usual(nn.Module):
    """What models of the hubs hold, and do in a forward pass."""

    masks: dict[int, Tensor] = {}  # noqa: RUF012

    def __init__(self) -> None:
        super().__init__()
        self.inner = network()
        self.logger, self.lock, self.file = logging.getLogger("a.model"), threading.Lock(), io.BytesIO()
        self.numbers, self.chance = None, random.Random(0)
        self.generators = [torch.Generator().manual_seed(0), np.random.default_rng(0)]
        self.library, self.act, self.frozen = np, torch.tanh, [nn.Linear(2, 2)]
        self.positions = lru_cache(lambda count: torch.arange(count))
        self.inner[0].weight.tag = "public"
        self.device = None

    def forward(self, x: Tensor) -> Tensor:
        with self.lock:
            self.logger.debug("forward")
        self.made = threading.Lock()
        self.device = x.device
        if x.shape[1] not in self.masks:
            self.masks[x.shape[1]] = torch.ones(x.shape[1])
        if self.numbers is not None:
            next(self.numbers)
        return self.inner(self.act(x) * self.masks[x.shape[1]] + 0 * self.positions(x.shape[1]))


def test_what_models_usually_hold_is_no_alarm():
    model = Usual()
    try:
        take_steps(model)
        model.numbers = (number for number in range(10**6))
        take_steps(model)
    finally:
        Usual.masks.clear()


@pytest.mark.parametrize("kept", ["x", "[x.detach() * 0]", "m.first or x.sum()"])
def test_an_activation_in_a_dead_wrapper_is_data_whatever_its_value(kept):
    model = Keeping(f"m.first = {kept}")
    state = StateGuard(model, cross_entropy, lambda: batch_of(0, 1))

    def one_example(x: Tensor, y: Tensor) -> Tensor:
        return cross_entropy(model, (x[None], y[None])).sum()

    with pytest.raises(PrivacyError, match="first"), state.untouched(last_of_epoch=False), torch.no_grad():
        torch.func.vmap(one_example)(*batch_of(1))


GENERATORS: dict[str, tuple[Callable[[], Any], Callable[[Any], Any]]] = {
    "torch": (lambda: torch.Generator().manual_seed(0), lambda own: torch.rand((), generator=own)),
    "NumPy": (lambda: np.random.default_rng(0), lambda own: own.random()),
    "old NumPy": (lambda: np.random.RandomState(0), lambda own: own.random_sample()),
    "Python": (lambda: random.Random(0), lambda own: own.random()),
}


@pytest.mark.parametrize("where", ["model", "loss"])
@pytest.mark.parametrize("kind", GENERATORS)
def test_a_generator_of_its_own_is_refused(kind, where):
    """Its seed is known and its numbers go by place, so one example more gives all others other numbers."""
    make, draw = GENERATORS[kind]
    model, own = Keeping("m.draw(m.own)" if where == "model" else ""), make()
    model.own, model.draw = make(), draw
    loss = cross_entropy if where == "model" else lambda m, rows: cross_entropy(m, rows) * draw(own)
    with pytest.raises(PrivacyError, match="own"):
        take_steps(model, loss)


# Losses: what one keeps of a record changes everybody's gradient.


class Buffered(nn.Module):
    """A criterion that runs a statement on the mean of the outputs, once it is armed."""

    def __init__(self, statement: str, *, armed: bool = True) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(()))
        self.weight = nn.Parameter(torch.ones(CLASSES))
        self.statement, self.armed = statement, armed

    def forward(self, output: Tensor, target: Tensor) -> Tensor:
        with torch.no_grad():
            exec(self.statement if self.armed else "", {"m": self, "mean": output.mean()})
        return F.cross_entropy(output, target, weight=self.weight.detach(), reduction="none")


def with_a_nonlocal() -> LossFunction:
    largest = 0.0

    def loss(model, batch):
        nonlocal largest
        largest = max(largest, float(batch[0].max()))
        return cross_entropy(model, batch) / largest

    return loss


def keeping(keep: Callable[[Any, Tensor], object], memory: Any) -> LossFunction:
    """A loss with a variable of its own, which it gives every batch."""

    def loss(model, batch):
        keep(memory, batch[0])
        return cross_entropy(model, batch)

    return loss


def with_a_default(model, batch, kept={}):  # noqa: B006
    kept["last"] = batch[0]
    return cross_entropy(model, batch)


MEMORIES: dict[str, tuple[Callable[[], LossFunction], str]] = {
    "a buffer": (lambda: from_criterion(Buffered("m.mean.add_(mean)")), "mean"),
    "a buffer's data": (lambda: from_criterion(Buffered("m.mean.data.add_(mean)")), "mean"),
    "a parameter": (lambda: from_criterion(Buffered("m.weight.add_(mean)")), "weight"),
    "nonlocal": (with_a_nonlocal, "largest"),
    "the first batch": (lambda: keeping(lambda first, x: first or first.append(x), []), r"memory\[0\]"),
    "a default": (lambda: with_a_default, r"__defaults__\[0\]\['last'\]"),
}


@pytest.mark.parametrize("case", MEMORIES)
def test_a_memory_of_a_loss_is_refused_by_name(case):
    make, name = MEMORIES[case]
    with pytest.raises(PrivacyError, match=rf"{name}\b|{name} "):
        take_steps(loss=make())


def test_a_hidden_write_to_a_criterions_buffer_is_found_by_the_end_of_its_epoch():
    criterion = Buffered("m.mean.data.add_(mean)", armed=False)

    def between(step: int) -> None:
        criterion.armed = step == 2  # the third step is neither the first nor the last of its epoch

    with pytest.raises(PrivacyError, match="mean"):
        take_steps(loss=from_criterion(criterion), between=between)


def test_a_loss_may_be_changed_between_steps_and_is_left_as_made_up_examples_found_it():
    temperature, criterion, cache = [1.0], Buffered(""), {}
    same = cache

    def loss(model, batch):
        cache.setdefault(batch[0].shape[1], torch.ones(1))
        return from_criterion(criterion)(model, batch) / temperature[0]

    def warmer(step: int) -> None:
        temperature[0] *= 2
        criterion.mean.fill_(step)

    take_steps(loss=loss, between=warmer)
    assert cache is same
    assert list(cache) == [FEATURES]
