"""What a model keeps of the rows it looked at is found in its attributes, by name; public things may be kept."""

from __future__ import annotations

import io
import logging
import random
import threading
from array import array
from collections import deque
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from guarded import batch_of, cross_entropy, take_steps
from torch import Tensor, nn

from runs import FEATURES, a_trainer, advance, network
from sparsedp.errors import PrivacyError
from sparsedp.validation.state import StateGuard


class Box:
    """A plain object."""

    def __init__(self) -> None:
        self.value: object = None


class Slotted:
    __slots__ = ("value",)


class Keeping(nn.Module):
    """A network that keeps something while it computes."""

    def __init__(self, keep: object) -> None:
        super().__init__()
        self.inner = network()
        self.keep = keep
        self.box, self.slotted, self.seen, self.kept, self.first = Box(), Slotted(), [], {}, None
        self.last: deque[Tensor] = deque(maxlen=2)
        self.array = np.zeros(FEATURES)
        self.hidden = torch.zeros(FEATURES)

    def forward(self, x: Tensor) -> Tensor:
        self.keep(self, x)
        return self.inner(x)


def last_input(model, x):
    model.last_input = x


def first_input(model, x):
    model.first = x if model.first is None else model.first


def in_an_object(model, x):
    model.box.value = [{"rows": x.detach()}]


def in_slots(model, x):
    model.slotted.value = x.mean().detach()


def in_a_list(model, x):
    model.seen.append(x.detach().sum())


def in_a_queue(model, x):
    model.last.append(x.detach())


def in_an_array(model, x):
    model.array += x.detach().double().sum(0).numpy()


def behind_the_counter(model, x):
    model.hidden.data += x.detach().sum(0)


def as_a_number(model, x):
    model.largest = float(x.max())


def the_number_of_rows(model, x):
    model.rows = len(x)


LEAKS = {
    last_input: "last_input",
    first_input: "first",
    in_an_object: r"box.value\[0\]\['rows'\]",
    in_slots: "slotted.value",
    in_a_list: r"seen\[0\]",
    in_a_queue: r"last\[0\]",
    in_an_array: "array",
    behind_the_counter: "hidden",
    as_a_number: "largest",
    the_number_of_rows: "rows",
}


@pytest.mark.parametrize("keep", LEAKS, ids=lambda keep: keep.__name__)
def test_what_is_kept_of_the_rows_is_refused_by_name_before_a_release(keep):
    released: list[object] = []
    with pytest.raises(PrivacyError, match=f"(^|, ){LEAKS[keep]}(,| of the model)"):
        advance(a_trainer(model=Keeping(keep), callbacks=[released.append]))
    assert released == []


def a_mask_by_shape(model, x):
    if x.shape[1] not in model.kept:
        model.kept[x.shape[1]] = torch.ones(x.shape[1], x.shape[1]).tril()


def positions_made_once(model, x):
    if model.first is None:
        model.first = torch.arange(x.shape[1])


def something_of_the_weights(model, x):
    model.norm = model.inner[0].weight.detach().norm()


@pytest.mark.parametrize("keep", [a_mask_by_shape, positions_made_once, something_of_the_weights])
def test_public_things_may_be_kept(keep):
    assert advance(a_trainer(model=Keeping(keep))).position == 15


def test_attributes_may_be_set_between_steps():
    model = Keeping(lambda model, x: None)
    trainer = a_trainer(model=model)
    for batch in trainer:
        trainer.step(batch)
        model.steps, model.box.value = batch.step, torch.ones(batch.step)
    assert trainer.position == 15


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


class Hiding(Keeping):
    """Holds things that can be written to, and hide what they hold."""

    def __init__(self, keep: object) -> None:
        super().__init__(keep)
        self.recorder, self.helpers = Recorder(), [Buffer()]
        self.numbers, self.bytes, self.text = array("f", [0.0]), bytearray(), io.StringIO()
        self.table = pd.DataFrame()


def in_a_callable_object(model, x):
    model.recorder(x)


def in_a_module_of_a_list(model, x):
    model.helpers[0](x)


def as_keys(model, x):
    model.kept[tuple(x[0].tolist())] = True


def in_an_array_of_pythons(model, x):
    model.numbers[:] = array("f", x[-1].tolist())


def in_bytes(model, x):
    model.bytes[:] = x.numpy().tobytes()


def in_a_text(model, x):
    model.text.write(str(x[-1].tolist()))


def in_a_table(model, x):
    model.table = pd.DataFrame(x.numpy())


def on_a_parameter(model, x):
    model.inner[0].weight.last = x


HIDDEN = {
    in_a_callable_object: r"recorder\.last",
    in_a_module_of_a_list: r"\['helpers\[0\]\.last'\]",
    as_keys: r"kept\[key 0\]\[0\]",
    in_an_array_of_pythons: "numbers",
    in_bytes: "bytes",
    in_a_text: "text",
    in_a_table: r"table\._mgr",
    on_a_parameter: r"inner\.0\.weight\.last",
}


@pytest.mark.parametrize("keep", HIDDEN, ids=lambda keep: keep.__name__)
def test_what_hides_rows_is_looked_into(keep):
    with pytest.raises(PrivacyError, match=f"(^|, ){HIDDEN[keep]}(,| of the model)"):
        take_steps(Hiding(keep))


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
        if self.numbers is not None:  # a generator cannot be copied, and without a twin no mask may be new
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


class InsideVmap(nn.Module):
    """Keeps what it computes, while it runs under vmap one example at a time."""

    def __init__(self, keep: object) -> None:
        super().__init__()
        self.inner, self.keep, self.kept = network(), keep, None

    def forward(self, x: Tensor) -> Tensor:
        self.keep(self, x)
        return self.inner(x)


@pytest.mark.parametrize(
    "keep",
    [
        lambda model, x: setattr(model, "kept", x),
        lambda model, x: setattr(model, "kept", [x.detach() * 0]),
        lambda model, x: setattr(model, "kept", model.kept or x.sum()),
    ],
)
def test_an_activation_in_a_dead_wrapper_is_data_whatever_its_value(keep):
    model = InsideVmap(keep)
    state = StateGuard(model, cross_entropy, lambda: batch_of(0, 1))
    rows = batch_of(1)

    def one_example(x: Tensor, y: Tensor) -> Tensor:
        return cross_entropy(model, (x[None], y[None])).sum()

    with pytest.raises(PrivacyError, match="kept"), state.untouched(last_of_epoch=False):
        torch.func.vmap(one_example)(*rows)


def test_what_is_made_of_weights_inside_vmap_may_be_kept():
    model = InsideVmap(lambda model, x: setattr(model, "kept", model.inner[0].weight.detach().norm()))
    state = StateGuard(model, cross_entropy, lambda: batch_of(0, 1))

    def one_example(x: Tensor, y: Tensor) -> Tensor:
        return cross_entropy(model, (x[None], y[None])).sum()

    for step in (1, 2):
        with state.untouched(last_of_epoch=False), torch.no_grad():
            torch.func.vmap(one_example)(*batch_of(step))
        with torch.no_grad():
            model.inner[0].weight.add_(1.0)


def a_count_of_forwards(model, x):
    model.calls = getattr(model, "calls", 0) + 1


def a_sum_in_place(model, x):
    model.hidden += x.detach().sum(0)


@pytest.mark.parametrize("keep", [a_count_of_forwards, a_sum_in_place])
def test_what_a_run_on_zeros_would_repeat_is_refused(keep):
    with pytest.raises(PrivacyError, match=r"calls|hidden"):
        take_steps(Keeping(keep))


class Draws(nn.Module):
    """Multiplies by what a generator of its own gives."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.inner, self.kind = network(), kind
        self.own = {
            "torch": lambda: torch.Generator().manual_seed(0),
            "NumPy": lambda: np.random.default_rng(0),
            "old NumPy": lambda: np.random.RandomState(0),
            "Python": lambda: random.Random(0),
        }[kind]()

    def forward(self, x: Tensor) -> Tensor:
        own: Any = self.own
        drawn = {
            "torch": lambda: torch.rand((), generator=own),
            "NumPy": lambda: own.random(),
            "old NumPy": lambda: own.random_sample(),
            "Python": lambda: own.random(),
        }[self.kind]()
        return self.inner(x * drawn)


@pytest.mark.parametrize("kind", ["torch", "NumPy", "old NumPy", "Python"])
def test_a_generator_of_the_models_own_is_refused(kind):
    """Its seed is known and its numbers go by place, so one example more gives all others other numbers."""
    with pytest.raises(PrivacyError, match="own"):
        take_steps(Draws(kind))
