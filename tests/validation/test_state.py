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
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._C import _functorch
from torch.utils.data import TensorDataset

from runs import CLASSES, FEATURES, a_trainer, advance, network
from sparsedp.batch import LossFunction, PerExampleLoss, from_criterion
from sparsedp.errors import PrivacyError
from sparsedp.validation.state import StateGuard, tensor_digest

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


def writing_in(step: int, write: Write, steps: int, *, around: bool = True) -> None:
    """So many steps of a run, in one of which (counted from 1) the model writes to itself."""
    model = Remembering(write, around=around)
    trainer = a_trainer("dp-sgd", model=model)
    advance(trainer, step - 1)
    model.armed = True
    advance(trainer, steps - step + 1)


def replaced_twice(model: Remembering, mean: Tensor) -> None:
    for _ in range(2):
        model.seen = model.seen + mean


def through_numpy(model: Remembering, mean: Tensor) -> None:
    model.frozen.bias.detach().numpy()[:] = mean.numpy()


OPEN: dict[str, tuple[str, Write]] = {
    "frozen weight": ("frozen.weight", lambda model, mean: model.frozen.weight.add_(mean)),
    "frozen bias": ("frozen.bias", lambda model, mean: model.frozen.bias.copy_(mean)),
    "trained weight": ("layer.weight", lambda model, mean: model.layer.weight.add_(mean)),
    "buffer": ("seen", lambda model, mean: model.seen.add_(mean)),
    "another buffer": ("seen", replaced_twice),
}
HIDDEN: dict[str, tuple[str, Write]] = {
    "frozen by data": ("frozen.weight", lambda model, mean: model.frozen.weight.data.add_(mean)),
    "frozen by numpy": ("frozen.bias", through_numpy),
    "buffer by data": ("seen", lambda model, mean: model.seen.data.add_(mean)),
}


@pytest.mark.parametrize("case", OPEN)
def test_a_write_is_refused_in_the_step_it_happens(case):
    name, write = OPEN[case]
    with pytest.raises(PrivacyError, match=name):
        writing_in(2, write, steps=2)


@pytest.mark.parametrize("case", OPEN | HIDDEN)
def test_an_example_written_to_the_model_is_an_error_under_vmap(case):
    with pytest.raises((RuntimeError, PrivacyError), match=r"vmap|output with shape|changed|have storage"):
        writing_in(2, (OPEN | HIDDEN)[case][1], steps=2, around=False)


@pytest.mark.parametrize("step", [1, 2, 3, 4, 15])
@pytest.mark.parametrize("case", HIDDEN)
def test_a_hidden_write_to_frozen_state_is_found_by_the_end_of_its_epoch(case, step):
    """Three steps to an epoch."""
    name, write = HIDDEN[case]
    with pytest.raises(PrivacyError, match=name):
        writing_in(step, write, steps=-(-step // 3) * 3)


@pytest.mark.parametrize("step", [1, 3, 15])
def test_a_hidden_write_to_trained_weights_is_found_in_the_steps_that_compare_values(step):
    with pytest.raises(PrivacyError, match=r"layer\.weight"):
        writing_in(step, lambda model, mean: model.layer.weight.data.add_(mean), steps=step)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.bool])
def test_a_digest_tells_values_apart_and_not_copies(dtype):
    one = torch.tensor([[0, 1, 0], [1, 1, 0]]).to(dtype)
    assert tensor_digest(one) == tensor_digest(one.clone()) == tensor_digest(one.T.contiguous().T)
    assert tensor_digest(one) != tensor_digest(one.flip(0))
    assert tensor_digest(torch.zeros(0)) == tensor_digest(torch.ones(0))
    assert tensor_digest(torch.tensor(1.0)) != tensor_digest(torch.tensor(2.0))


# Attributes of modules.


class Box:
    """A plain object."""

    def __init__(self) -> None:
        self.value: object = None


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
    """A network that keeps something while it computes, with many places to keep it."""

    def __init__(self, keep: Callable[[Any, Tensor], object]) -> None:
        super().__init__()
        self.inner, self.keep = network(), keep
        self.box, self.slotted, self.seen, self.kept, self.first = Box(), Slotted(), [], {}, None
        self.last: deque[Tensor] = deque(maxlen=2)
        self.array, self.hidden = np.zeros(FEATURES), torch.zeros(FEATURES)
        self.recorder, self.helpers = Recorder(), [Buffer()]
        self.numbers, self.bytes, self.text = array("f", [0.0]), bytearray(), io.StringIO()
        self.table = pd.DataFrame()

    def forward(self, x: Tensor) -> Tensor:
        self.keep(self, x)
        return self.inner(x)


def in_an_array(model, x):
    model.array += x.detach().double().sum(0).numpy()


def behind_the_counter(model, x):
    model.hidden.data += x.detach().sum(0)


def a_sum_in_place(model, x):
    model.hidden += x.detach().sum(0)


def in_an_array_of_pythons(model, x):
    model.numbers[:] = array("f", x[-1].tolist())


def in_bytes(model, x):
    model.bytes[:] = x.numpy().tobytes()


def setting(name: str, value: Callable[[Any, Tensor], object]) -> Callable[[Any, Tensor], None]:
    return lambda model, x: setattr(model, name, value(model, x))


LEAKS: dict[str, tuple[Callable[[Any, Tensor], object], str]] = {
    "last input": (setting("last_input", lambda m, x: x), "last_input"),
    "first input": (setting("first", lambda m, x: x if m.first is None else m.first), "first"),
    "in an object": (
        lambda m, x: setattr(m.box, "value", [{"rows": x.detach()}]),
        r"box.value\[0\]\['rows'\]",
    ),
    "in slots": (lambda m, x: setattr(m.slotted, "value", x.mean().detach()), "slotted.value"),
    "in a list": (lambda m, x: m.seen.append(x.detach().sum()), r"seen\[0\]"),
    "in a queue": (lambda m, x: m.last.append(x.detach()), r"last\[0\]"),
    "in an array": (in_an_array, "array"),
    "behind the counter": (behind_the_counter, "hidden"),
    "as a number": (setting("largest", lambda m, x: float(x.max())), "largest"),
    "the number of rows": (setting("rows", lambda m, x: len(x)), "rows"),
}
OUT_OF_SIGHT: dict[str, tuple[Callable[[Any, Tensor], object], str]] = {
    "in a callable object": (lambda m, x: m.recorder(x), r"recorder\.last"),
    "in a module of a list": (lambda m, x: m.helpers[0](x), r"\['helpers\[0\]\.last'\]"),
    "as keys": (lambda m, x: m.kept.update({tuple(x[0].tolist()): True}), r"kept\[key 0\]\[0\]"),
    "in an array of Python's": (in_an_array_of_pythons, "numbers"),
    "in bytes": (in_bytes, "bytes"),
    "in a text": (lambda m, x: m.text.write(str(x[-1].tolist())), "text"),
    "in a table": (setting("table", lambda m, x: pd.DataFrame(x.numpy())), r"table\._mgr"),
    "on a parameter": (lambda m, x: setattr(m.inner[0].weight, "last", x), r"inner\.0\.weight\.last"),
    "a count of forwards": (setting("calls", lambda m, x: getattr(m, "calls", 0) + 1), "calls"),
    "a sum in place": (a_sum_in_place, "hidden"),
}


@pytest.mark.parametrize("case", LEAKS)
def test_what_is_kept_of_the_rows_is_refused_by_name_before_a_release(case):
    keep, name = LEAKS[case]
    released: list[object] = []
    with pytest.raises(PrivacyError, match=f"(^|, ){name}(,| of the model)"):
        advance(a_trainer(model=Keeping(keep), callbacks=[released.append]))
    assert released == []


@pytest.mark.parametrize("case", OUT_OF_SIGHT)
def test_what_hides_rows_is_looked_into(case):
    keep, name = OUT_OF_SIGHT[case]
    with pytest.raises(PrivacyError, match=f"(^|, ){name}(,| of the model)"):
        take_steps(Keeping(keep))


def a_mask_by_shape(model, x):
    if x.shape[1] not in model.kept:
        model.kept[x.shape[1]] = torch.ones(x.shape[1], x.shape[1]).tril()


PUBLIC = {
    "a mask by shape": a_mask_by_shape,
    "positions made once": lambda m, x: m.first is not None or setattr(m, "first", torch.arange(x.shape[1])),
    "something of the weights": setting("norm", lambda m, x: m.inner[0].weight.detach().norm()),
}


@pytest.mark.parametrize("case", PUBLIC)
def test_public_things_may_be_kept_and_anything_set_between_steps(case):
    model = Keeping(PUBLIC[case])
    trainer = a_trainer(model=model)
    for batch in trainer:
        trainer.step(batch)
        model.steps, model.box.value = batch.step, torch.ones(batch.step)
        model.helpers[0].last.fill_(batch.step)
    assert trainer.position == 15


@dataclass
class Config:
    width: int = FEATURES
    names: tuple[str, ...] = ("a", "b")
    dtype: torch.dtype = torch.float32


class Usual(nn.Module):
    """What models of the hubs hold, and do in a forward pass."""

    masks: dict[int, Tensor] = {}  # noqa: RUF012

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.config = network(), Config()
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


def under_vmap(model: nn.Module, steps: int) -> None:
    """Steps in which the model runs one example at a time, and its weights move between."""
    state = StateGuard(model, cross_entropy, lambda: batch_of(0, 1))

    def one_example(x: Tensor, y: Tensor) -> Tensor:
        return cross_entropy(model, (x[None], y[None])).sum()

    for step in range(steps):
        with state.untouched(last_of_epoch=False), torch.no_grad():
            torch.func.vmap(one_example)(*batch_of(step))
        with torch.no_grad():
            model.inner[0].weight.add_(1.0)


@pytest.mark.parametrize(
    "kept", [lambda m, x: x, lambda m, x: [x.detach() * 0], lambda m, x: m.first or x.sum()]
)
def test_an_activation_in_a_dead_wrapper_is_data_whatever_its_value(kept):
    with pytest.raises(PrivacyError, match="first"):
        under_vmap(Keeping(setting("first", kept)), steps=1)


def test_what_is_made_of_weights_inside_vmap_may_be_kept():
    under_vmap(Keeping(PUBLIC["something of the weights"]), steps=2)


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
    model, own = Keeping(lambda m, x: draw(m.own) if where == "model" else None), make()
    model.own = make()
    loss = cross_entropy if where == "model" else lambda m, rows: cross_entropy(m, rows) * draw(own)
    with pytest.raises(PrivacyError, match="own"):
        take_steps(model, loss)


# Losses: what one keeps of a record changes everybody's gradient.


class LossScale(nn.Module):
    """Dynamic loss scaling, as mixed precision has it: after an overflow it backs off."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = 1.0

    def forward(self, output: Tensor, target: Tensor) -> Tensor:
        losses = (output.squeeze(1) - target).square() * self.scale
        if not bool(losses.isfinite().all()):
            self.scale *= 0.5
        return losses


def test_a_loss_scale_that_one_record_halves_for_all_is_refused():
    criterion, bad = LossScale(), [False]

    def loss(model, batch):
        targets = batch[1].float()
        if bad[0]:
            targets[1] = float("nan")
        return criterion(model(batch[0]), targets)

    def spoil(step: int) -> None:
        bad[0] = step == 2

    take_steps(nn.Linear(FEATURES, 1), loss)
    with pytest.raises(PrivacyError, match=r"loss_fn\.criterion\.scale changed.*everybody's gradient"):
        take_steps(nn.Linear(FEATURES, 1), loss, between=spoil)


class Buffered(nn.Module):
    def __init__(self, write: Callable[[Buffered, Tensor], object]) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(()))
        self.weight = nn.Parameter(torch.ones(CLASSES))
        self.write = write

    def forward(self, output: Tensor, target: Tensor) -> Tensor:
        with torch.no_grad():
            self.write(self, output.mean())
        return F.cross_entropy(output, target, weight=self.weight.detach(), reduction="none")


def buffered(write: Callable[[Any, Tensor], object]) -> LossFunction:
    return from_criterion(Buffered(write))


class RememberingLoss:
    def __init__(self) -> None:
        self.seen: list[float] = []

    def method(self, model, batch):
        self.seen.append(float(batch[0].max()))
        return cross_entropy(model, batch)


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


def with_the_first_batch() -> LossFunction:
    return keeping(lambda first, x: first or first.append(x), [])


def with_a_default(model, batch, kept={}):  # noqa: B006
    kept["last"] = batch[0]
    return cross_entropy(model, batch)


def with_an_attribute(model, batch):
    with_an_attribute.last = batch[0]
    return cross_entropy(model, batch)


def with_an_argument(kept, model, batch):
    kept.append(batch[0].mean())
    return cross_entropy(model, batch)


MEMORIES: dict[str, tuple[Callable[[], LossFunction], str]] = {
    "a buffer": (lambda: buffered(lambda module, mean: module.mean.add_(mean)), "mean"),
    "a buffer's data": (lambda: buffered(lambda module, mean: module.mean.data.add_(mean)), "mean"),
    "a parameter": (lambda: buffered(lambda module, mean: module.weight.add_(mean)), "weight"),
    "nonlocal": (with_a_nonlocal, "largest"),
    "the first batch": (with_the_first_batch, r"memory\[0\]"),
    "an array": (
        lambda: keeping(lambda sums, x: sums.__iadd__(x.sum(0).double().numpy()), np.zeros(FEATURES)),
        "memory",
    ),
    "a default": (lambda: with_a_default, r"__defaults__\[0\]\['last'\]"),
    "an attribute of a function": (lambda: with_an_attribute, r"loss_fn\.last"),
    "an argument of a partial": (lambda: partial(with_an_argument, []), r"args\[0\]\[0\]"),
    "a method's object": (lambda: RememberingLoss().method, r"__self__\.seen\[0\]"),
}


@pytest.mark.parametrize("case", MEMORIES)
def test_a_memory_of_a_loss_is_refused_by_name(case):
    make, name = MEMORIES[case]
    with pytest.raises(PrivacyError, match=rf"{name}\b|{name} "):
        take_steps(loss=make())


def test_a_hidden_write_to_a_criterions_buffer_is_found_by_the_end_of_its_epoch():
    armed = [False]

    def write(module: Buffered, mean: Tensor) -> None:
        if armed[0]:
            module.mean.data.add_(mean)

    def between(step: int) -> None:
        armed[0] = step == 2  # the third step is neither the first nor the last of its epoch

    with pytest.raises(PrivacyError, match="mean"):
        take_steps(loss=buffered(write), between=between)


def with_things_of_the_process() -> LossFunction:
    logger, lock = logging.getLogger("a.loss"), threading.Lock()
    numbers = (0.0 * number for number in range(10**6))
    data = TensorDataset(torch.ones(3))

    @lru_cache
    def scale(width: int) -> float:
        return 1.0 + 0 * width

    def loss(model, batch):
        with lock:
            logger.debug("a step on %s", data)
        return cross_entropy(model, batch) * scale(batch[0].shape[1]) + next(numbers)

    return loss


def with_a_teacher() -> LossFunction:
    teacher = network(seed=3).requires_grad_(False)
    return lambda model, batch: (model(batch[0]) - teacher(batch[0])).square().sum(1)


class Experiment:
    """An object of the user's that leads from its loss to the model, the data and what changes between steps."""

    def __init__(self) -> None:
        self.model, self.data, self.history = network(), TensorDataset(torch.ones(3)), [0.0]

    def loss(self, model, batch):
        return cross_entropy(model, batch) * len(self.data)


HARMLESS: dict[str, Callable[[], LossFunction]] = {
    "weighted": lambda: from_criterion(nn.CrossEntropyLoss(weight=torch.ones(CLASSES), reduction="none")),
    "things of the process": with_things_of_the_process,
    "a teacher": with_a_teacher,
    "autocast": lambda: torch.autocast("cpu", dtype=torch.bfloat16)(cross_entropy),
    "a method": lambda: Experiment().loss,
}


@pytest.mark.parametrize("case", HARMLESS)
def test_what_does_not_depend_on_rows_may_be_kept_by_a_loss(case):
    take_steps(loss=HARMLESS[case]())


def test_a_loss_may_be_changed_between_steps():
    temperature, criterion = [1.0], Buffered(lambda module, mean: None)

    def warmer(step: int) -> None:
        temperature[0] *= 2
        criterion.mean.fill_(step)

    take_steps(
        loss=lambda model, batch: from_criterion(criterion)(model, batch) / temperature[0], between=warmer
    )


def test_made_up_examples_leave_variables_as_the_loss_left_them():
    cache: dict[int, Tensor] = {}

    def loss(model, batch):
        cache.setdefault(batch[0].shape[1], torch.ones(1))
        return cross_entropy(model, batch)

    same = cache
    take_steps(loss=loss)
    assert cache is same
    assert list(cache) == [FEATURES]


def test_a_run_refuses_a_loss_with_a_memory(monkeypatch):
    monkeypatch.setattr("sparsedp.validation.model.validate_model", lambda *anything: ())
    monkeypatch.setattr("runs.loss_fn", PerExampleLoss(with_the_first_batch()))
    with pytest.raises(PrivacyError, match=r"loss_fn\.memory\[0\] changed"):
        a_trainer(evaluate=None)
