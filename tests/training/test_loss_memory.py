"""A loss that remembers a record lets it weigh on everybody's gradient: refused wherever the memory is."""

from __future__ import annotations

import logging
import random
import threading
from collections.abc import Callable
from functools import lru_cache, partial

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from guarded import cross_entropy, take_steps
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from runs import CLASSES, FEATURES, a_trainer, network
from sparsedp.batch import LossFunction, PerExampleLoss, from_criterion
from sparsedp.errors import PrivacyError


class Scaled(nn.Module):
    """Dynamic loss scaling, as mixed precision has it: after an overflow it backs off."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = 1.0

    def forward(self, output: Tensor, target: Tensor) -> Tensor:
        losses = (output.squeeze(1) - target).square() * self.scale
        if not bool(losses.isfinite().all()):
            self.scale *= 0.5
        return losses


def test_a_loss_scale_that_one_record_halves_for_all_is_refused() -> None:
    criterion, bad = Scaled(), [False]

    def loss(model: Callable[..., Tensor], batch: tuple[Tensor, Tensor]) -> Tensor:
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


class Remembering:
    def __init__(self) -> None:
        self.seen: list[float] = []

    def method(self, model: Callable[..., Tensor], batch: tuple[Tensor, Tensor]) -> Tensor:
        self.seen.append(float(batch[0].max()))
        return cross_entropy(model, batch)


def with_a_nonlocal() -> LossFunction:
    largest = 0.0

    def loss(model, batch):
        nonlocal largest
        largest = max(largest, float(batch[0].max()))
        return cross_entropy(model, batch) / largest

    return loss


def with_the_first_batch() -> LossFunction:
    first: list[Tensor] = []

    def loss(model, batch):
        if not first:
            first.append(batch[0])
        return cross_entropy(model, batch)

    return loss


def with_an_array() -> LossFunction:
    sums = np.zeros(FEATURES)

    def loss(model, batch):
        sums[:] += batch[0].sum(0).double().numpy()
        return cross_entropy(model, batch)

    return loss


def with_a_default(model, batch, kept={}):  # noqa: B006
    kept["last"] = batch[0]
    return cross_entropy(model, batch)


def with_an_attribute(model, batch):
    with_an_attribute.last = batch[0]
    return cross_entropy(model, batch)


def with_an_argument(kept, model, batch):
    kept.append(batch[0].mean())
    return cross_entropy(model, batch)


def with_a_generator(chance: random.Random | np.random.Generator) -> LossFunction:
    """Of a known seed: what the next example is given depends on how many there were."""
    return lambda model, batch: cross_entropy(model, batch) * chance.random()


MEMORIES: dict[str, tuple[Callable[[], LossFunction], str]] = {
    "a buffer": (lambda: from_criterion(Buffered(lambda module, mean: module.mean.add_(mean))), "mean"),
    "a buffer's data": (
        lambda: from_criterion(Buffered(lambda module, mean: module.mean.data.add_(mean))),
        "mean",
    ),
    "a parameter": (
        lambda: from_criterion(Buffered(lambda module, mean: module.weight.add_(mean))),
        "weight",
    ),
    "nonlocal": (with_a_nonlocal, "largest"),
    "the first batch": (with_the_first_batch, r"first\[0\]"),
    "an array": (with_an_array, "sums"),
    "a default": (lambda: with_a_default, r"__defaults__\[0\]\['last'\]"),
    "an attribute of a function": (lambda: with_an_attribute, r"loss_fn\.last"),
    "an argument of a partial": (lambda: partial(with_an_argument, []), r"args\[0\]\[0\]"),
    "a method's object": (lambda: Remembering().method, r"__self__\.seen\[0\]"),
    "Python's generator": (lambda: with_a_generator(random.Random(0)), "chance"),
    "NumPy's generator": (lambda: with_a_generator(np.random.default_rng(0)), "chance"),
}


@pytest.mark.parametrize("case", MEMORIES)
def test_a_memory_is_refused_by_name(case: str) -> None:
    make, name = MEMORIES[case]
    with pytest.raises(PrivacyError, match=rf"{name}\b|{name} "):
        take_steps(loss=make())


def test_a_hidden_write_to_a_criterions_buffer_is_found_by_the_end_of_its_epoch() -> None:
    armed = [False]

    def write(module: Buffered, mean: Tensor) -> None:
        if armed[0]:
            module.mean.data.add_(mean)

    def between(step: int) -> None:
        armed[0] = step == 2  # the third step is neither the first nor the last of its epoch

    with pytest.raises(PrivacyError, match="mean"):
        take_steps(loss=from_criterion(Buffered(write)), between=between)


def with_a_cache_by_shape() -> LossFunction:
    cache: dict[int, Tensor] = {}

    def loss(model, batch):
        width = batch[0].shape[1]
        if width not in cache:
            cache[width] = torch.ones(width)
        return cross_entropy(model, (batch[0] * cache[width], batch[1]))

    return loss


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

    def loss(self, model: Callable[..., Tensor], batch: tuple[Tensor, Tensor]) -> Tensor:
        return cross_entropy(model, batch) * len(self.data)


HARMLESS: dict[str, Callable[[], LossFunction]] = {
    "weighted": lambda: from_criterion(nn.CrossEntropyLoss(weight=torch.ones(CLASSES), reduction="none")),
    "a cache by shape": with_a_cache_by_shape,
    "things of the process": with_things_of_the_process,
    "a teacher": with_a_teacher,
    "autocast": lambda: torch.autocast("cpu", dtype=torch.bfloat16)(cross_entropy),
    "a method": lambda: Experiment().loss,
}


@pytest.mark.parametrize("case", HARMLESS)
def test_what_does_not_depend_on_rows_may_be_kept(case: str) -> None:
    take_steps(loss=HARMLESS[case]())


def test_a_loss_may_be_changed_between_steps() -> None:
    temperature, criterion = [1.0], Buffered(lambda module, mean: None)

    def warmer(step: int) -> None:
        temperature[0] *= 2
        criterion.mean.fill_(step)

    take_steps(
        loss=lambda model, batch: from_criterion(criterion)(model, batch) / temperature[0], between=warmer
    )


def test_made_up_examples_leave_variables_as_the_loss_left_them() -> None:
    cache: dict[int, Tensor] = {}

    def loss(model, batch):
        cache.setdefault(batch[0].shape[1], torch.ones(1))
        return cross_entropy(model, batch)

    same = cache
    take_steps(loss=loss)
    assert cache is same
    assert list(cache) == [FEATURES]


def test_a_run_refuses_a_loss_with_a_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sparsedp.validation.model.validate_model", lambda *anything: ())
    monkeypatch.setattr("runs.loss_fn", PerExampleLoss(with_the_first_batch()))
    with pytest.raises(PrivacyError, match=r"loss_fn\.first\[0\] changed"):
        a_trainer(evaluate=None)
