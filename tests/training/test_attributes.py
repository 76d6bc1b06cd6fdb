"""What a model keeps of the rows it looked at is found in its attributes, by name; public things may be kept."""

from __future__ import annotations

from collections import deque

import numpy as np
import pytest
import torch
from runs import FEATURES, a_trainer, advance, network
from torch import Tensor, nn

from sparsedp.core.errors import PrivacyError


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


def for_large_batches_only(model, x):
    if len(x) > 10:
        model.first = x


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
    for_large_batches_only: "first",
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
