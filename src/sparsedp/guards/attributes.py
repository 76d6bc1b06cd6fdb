"""Watching what a model and its loss keep beside parameters and buffers: nothing of private rows may stay there."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import final

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from sparsedp.core.batch import PerSampleLoss, Rows, to_device
from sparsedp.core.errors import PrivacyError
from sparsedp.core.generators import SEED_BYTES, own_generators
from sparsedp.guards.look import LOSS, Look, Marks
from sparsedp.guards.twin import Twin

TWIN_ROWS = 2
MOST_ENTRIES = 20_000
"""What a model holds beyond so many entries (a vocabulary, say) is compared only where values are."""


@final
class AttributeGuard:
    """Refuses a model that holds something of the rows it has looked at in its attributes, and a loss with a memory.

    Looked at are the attributes of all modules, of their parameters and of their classes, and for a loss its own:
    attributes, what a method belongs to, arguments of a `partial`, defaults, variables closed over, and globals that
    its code names. Tensors, arrays, bytes, numbers and texts are found through containers (keys as well as values),
    functions and objects, callable ones too; an object that hides what it holds is told by what pickle makes of it.

    What has changed or is new after a look at private rows must be the same in a twin, made before, that has looked
    at other rows instead: two, all zero. So a mask kept by its length is welcome; the last input is not, nor a count
    of rows or of forwards, which depends on the batch.

    **Privacy.** The model is given back and saved whole; what it keeps of a row is released without noise. What a
    loss keeps of a row weighs on every gradient of later steps, where no clip bounds it.
    **Edge cases.** The guard is made before any trial of the model, and `check` comes after them all. Between steps
    attributes may be changed. Every step compares identities and version counters; the first and the last of each
    epoch compare values. Not found: what hides in a generator, a file or another thing that cannot be pickled, in
    the cache of an `lru_cache`, in variables that hooks have closed over and in globals of functions that a model or
    a loss calls by name.
    """

    def __init__(self, model: nn.Module, loss: PerSampleLoss, some_rows: Callable[[], Rows]) -> None:
        self._model, self._loss, self._some_rows = model, loss, some_rows
        self._device = next(model.parameters()).device
        look = self._look(by_value=True)
        self._pristine = Twin.of(model, loss, look)
        self._untried = look.marks
        self._large = len(self._untried) > MOST_ENTRIES
        self._first = True

    def check(self) -> None:
        """Look at a few rows, and compare with how all was when this guard was made.

        Raises:
            PrivacyError: something has changed, and what.
        """
        with own_generators(bytes(SEED_BYTES), self._device), torch.enable_grad():
            self._loss(self._model, to_device(self._some_rows(), self._device))
        self._refuse(self._untried, self._look(by_value=True).marks)

    @contextmanager
    def untouched(self, *, last_of_epoch: bool) -> Iterator[None]:
        """Watch model and loss while gradients are computed.

        Raises:
            PrivacyError: something has changed, and what.
        """
        by_value = last_of_epoch or self._first
        self._first = False
        if self._large and not by_value:
            yield
            return
        before = self._look(by_value)
        if by_value:
            self._pristine = Twin.of(self._model, self._loss, before)
        yield
        self._refuse(before.marks, self._look(by_value).marks)

    def _look(self, by_value: bool) -> Look:
        return Look(self._model, self._loss, by_value=by_value)

    def _refuse(self, before: Marks, after: Marks) -> None:
        changed = {name for name in after if name not in before or before[name] != after[name]}
        if not changed:
            return
        values = self._look(by_value=True).marks
        expected = self._of_a_twin()
        kept = sorted(name for name in changed if expected is None or expected.get(name, ()) != values[name])
        if kept:
            raise PrivacyError(_words(kept))

    def _of_a_twin(self) -> Marks | None:
        """What would be held after a look at other rows; None if no twin can be made or run."""
        if self._pristine is None:
            return None
        twin = self._pristine.again()
        for mine, others in zip(self._model.modules(), twin.model.modules(), strict=False):
            others.training = mine.training
        with own_generators(bytes(SEED_BYTES), self._device), torch.enable_grad():
            rows = pytree.tree_map_only(
                Tensor,
                lambda leaf: leaf.new_zeros(TWIN_ROWS, *leaf.shape[1:]).to(self._device),
                self._some_rows(),
            )
            return twin.marks_after(rows)


def marks_of(model: nn.Module, by_value: bool) -> Marks:
    """What the model's attributes hold: tensors by value or by identity and version, the rest by value."""
    return Look(model, by_value=by_value).marks


def _words(kept: list[str]) -> str:
    of_model = [name for name in kept if not name.startswith(LOSS)]
    of_loss = [name.replace(LOSS, "loss_fn", 1) for name in kept if name.startswith(LOSS)]
    found = []
    if of_model:
        found.append(
            f"{', '.join(of_model[:6])} of the model changed while it looked at private data, and would be released "
            "with it, without any noise; keep nothing in a forward pass that depends on the rows or their number"
        )
    if of_loss:
        found.append(
            f"{', '.join(of_loss[:6])} changed while the loss looked at private data: what it keeps of one record "
            "changes everybody's gradient in later steps, past the clip; compute a row's loss from that row, the "
            "model and constants"
        )
    return ". ".join(found)
