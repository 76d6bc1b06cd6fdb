"""A forward pass whose random numbers are keyed by the step's secret and the rows they belong to."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, final

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from sparsedp.errors import ModelError
from sparsedp.grad_sample.chances import Draw, is_random, operation_name, run_and_watch
from sparsedp.grad_sample.distributions import KNOWN, drawn_shape
from sparsedp.randomness import Chance, GeneratorWatch, own_generators


@final
class KeyedDraws(TorchDispatchMode):
    """Replaces PyTorch's random operations: a row's numbers follow from secret, row and draw, not from its place.

    Every operation takes one number from torch's own generator, which is seeded alike for every forward of a step.
    That number names the draw. So a part of the forward that PyTorch runs again from the same state of the generator
    (checkpointing) draws the same.
    """

    def __init__(self, draws: tuple[Draw, ...], chance: Chance) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._draws, self.chance = draws, chance
        self._places: dict[int, int] = {}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if not is_random(func):
            return func(*args, **kwargs)
        operation = operation_name(func)
        if operation not in KNOWN:
            result, drew = run_and_watch(func, args, kwargs)
            if drew:
                raise _other_numbers(operation)
            return result
        number = int(torch.empty((), dtype=torch.int64).random_())
        draw = self._expect(number, operation, args, kwargs)
        return KNOWN[draw.operation](lambda count: self._words(draw, number, count), args, kwargs)

    def _expect(self, number: int, operation: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Draw:
        """The draw that comes next, or that had this number before."""
        place = self._places.setdefault(number, len(self._places))
        draw = self._draws[place] if place < len(self._draws) else None
        known = draw is not None and draw.operation == operation
        if (
            draw is None
            or not known
            or drawn_shape(operation, args, kwargs) != draw.expected(len(self.chance.rows))
        ):
            raise _other_numbers(operation)
        return draw

    def _words(self, draw: Draw, number: int, count: int) -> Tensor:
        rows = None if draw.axis is None else self.chance.rows
        size = torch.Size(draw.shape).numel()
        words = self.chance.secret.words(rows, number, size * count)
        if draw.axis is None:
            return words.reshape(*draw.shape, count)
        return words.reshape(len(words), *draw.shape, count).movedim(0, draw.axis)


def _other_numbers(operation: str) -> ModelError:
    return ModelError(
        f"the forward pass draws other random numbers ({operation}) than it did for a trial, so what is drawn "
        "depends on the rows; draw the same numbers for every row, and use them or not"
    )


def keyed_draws(draws: tuple[Draw, ...], chance: Chance | None) -> KeyedDraws | None:
    """The numbers of one forward and its backward; None if it draws none.

    Raises:
        ModelError: there are draws, and nobody says whose.
    """
    return KeyedDraws(draws, named(chance)) if draws else None


@contextmanager
def drawing(keyed: KeyedDraws | None) -> Iterator[None]:
    """Around the forward, and again around its backward, in which checkpointing runs parts of it once more."""
    if keyed is None:
        yield
        return
    with own_generators(keyed.chance.secret.seed(), torch.device("cpu")), keyed:
        yield


def named(chance: Chance | None) -> Chance:
    """The chance of a micro-batch whose model draws random numbers.

    Raises:
        ModelError: it has none.
    """
    if chance is None:
        raise ModelError(
            "the model draws random numbers (dropout?), and the micro-batch does not say which rows of the data set "
            "it holds, so they cannot be drawn row by row; give MicroBatch(..., chance=...), or call model.eval()"
        )
    return chance


@contextmanager
def nothing_drawn(device: torch.device) -> Iterator[None]:
    """Around the forwards of a micro-batch: random numbers come from the step's secret or not at all.

    Raises:
        ModelError: a global generator was drawn from.
    """
    watch = GeneratorWatch(device)
    yield
    if (whose := watch.moved()) is not None:
        raise ModelError(
            f"the forward pass drew from {whose} generator, which it did not for a trial (or another thread of the "
            "program did); what is drawn must not depend on the rows. Draw the same numbers for every row, and use "
            "them or not"
        )
