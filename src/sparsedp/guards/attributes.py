"""Watching what a model keeps beside its parameters and buffers: private rows must not stay in its attributes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from copy import deepcopy
from typing import Any, final

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from sparsedp.core.batch import PerSampleLoss, Rows, to_device
from sparsedp.core.errors import PrivacyError
from sparsedp.core.generators import SEED_BYTES, own_generators
from sparsedp.guards.guard import digest

TWIN_ROWS = 2
MOST_ENTRIES = 20_000
"""What a model holds beyond so many entries (a vocabulary, say) is compared only where values are."""

_OWN = frozenset(vars(nn.Module())) | {"_is_full_backward_hook"}
"""What PyTorch keeps in every module; parameters and buffers are watched elsewhere."""
_PLAIN = (bool, int, float, complex, str, bytes, type(None))

Marks = dict[str, object]
"""What is held under each name, as something that can be compared."""


@final
class AttributeGuard:
    """Refuses a model whose attributes hold something of the rows it has looked at.

    Tensors, arrays, numbers and texts are found through containers and plain objects. What has changed or is new
    after the model has looked at private rows must be the same in a twin of the model, made before, that has looked
    at other rows instead: two, all zero. So a mask kept by its length is welcome; the last input is not, nor a count
    of rows or of forwards, which depends on the batch.

    **Privacy.** The model is given back and saved whole; what it keeps of a row is released without noise.
    **Edge cases.** The guard is made before any trial of the model, and `check` comes after them all. Between steps
    attributes may be changed. Every step compares identities and version counters; the first and the last of each
    epoch compare values. Variables that hooks and functions have closed over are not found.
    """

    def __init__(self, model: nn.Module, loss: PerSampleLoss, some_rows: Callable[[], Rows]) -> None:
        self._model, self._loss, self._some_rows = model, loss, some_rows
        self._device = next(model.parameters()).device
        self._pristine = _twin(model)
        self._untried = marks_of(model, by_value=True)
        self._large = len(self._untried) > MOST_ENTRIES
        self._first = True

    def check(self) -> None:
        """Look at a few rows, and compare with how the model was when this guard was made.

        Raises:
            PrivacyError: an attribute has changed, and which.
        """
        with own_generators(bytes(SEED_BYTES), self._device), torch.enable_grad():
            self._loss(self._model, to_device(self._some_rows(), self._device))
        self._refuse(self._untried, marks_of(self._model, by_value=True))

    @contextmanager
    def untouched(self, *, last_of_epoch: bool) -> Iterator[None]:
        """Watch the model while gradients are computed.

        Raises:
            PrivacyError: an attribute has changed, and which.
        """
        by_value = last_of_epoch or self._first
        self._first = False
        if self._large and not by_value:
            yield
            return
        held: list[Any] = []  # so that a new object cannot take the id of an old one
        before = marks_of(self._model, by_value, held)
        if by_value:
            self._pristine = _twin(self._model)
        yield
        self._refuse(before, marks_of(self._model, by_value))

    def _refuse(self, before: Marks, after: Marks) -> None:
        changed = {name for name in after if name not in before or before[name] != after[name]}
        if not changed:
            return
        expected = self._of_a_twin()
        values = marks_of(self._model, by_value=True)
        kept = sorted(name for name in changed if expected is None or expected.get(name, ()) != values[name])
        if kept:
            raise PrivacyError(
                f"{', '.join(kept[:6])} of the model changed while it looked at private data, and would be released "
                "with it, without any noise; keep nothing in a forward pass that depends on the rows or their number"
            )

    def _of_a_twin(self) -> Marks | None:
        """What the model would hold if it had looked at other rows; None if no twin can be made or run."""
        twin = None if self._pristine is None else _twin(self._pristine)
        if twin is None:
            return None
        for mine, others in zip(self._model.modules(), twin.modules(), strict=False):
            others.training = mine.training
        with own_generators(bytes(SEED_BYTES), self._device), torch.enable_grad():
            rows = pytree.tree_map_only(
                Tensor,
                lambda leaf: leaf.new_zeros(TWIN_ROWS, *leaf.shape[1:]).to(self._device),
                self._some_rows(),
            )
            try:
                self._loss(twin, rows)
            except Exception:  # whatever a model may do with zeros; without a twin every change is refused
                return None
        return marks_of(twin, by_value=True)


def marks_of(model: nn.Module, by_value: bool, held: list[Any] | None = None) -> Marks:
    """What the model's attributes hold: tensors by value or by identity and version, the rest by value."""
    known = {id(p) for p in [*model.parameters(), *model.buffers()]}
    seen: set[int] = set()
    marks: Marks = {}

    def visit(name: str, value: Any) -> None:
        if isinstance(value, nn.Module) or id(value) in known or callable(value):
            return
        if isinstance(value, _PLAIN):
            marks[name] = (type(value), repr(value))
        elif isinstance(value, (Tensor, np.ndarray, np.generic)):
            marks[name] = _mark(value, by_value)
            if held is not None:
                held.append(value)
        elif id(value) not in seen:
            seen.add(id(value))
            for part, inner in _parts(value):
                visit(f"{name}{part}", inner)

    for prefix, module in model.named_modules():
        for name, value in list(vars(module).items()):
            if name not in _OWN:
                visit(f"{prefix}.{name}" if prefix else name, value)
    return marks


def _parts(value: Any) -> Iterator[tuple[str, Any]]:
    """What a container or a plain object holds, with its name."""
    if isinstance(value, Mapping):
        yield from (
            (f"[{key!r}]" if isinstance(key, _PLAIN) else "[...]", inner) for key, inner in value.items()
        )
    elif isinstance(value, (list, tuple, set, frozenset)) or type(value).__name__ == "deque":
        yield from ((f"[{place}]", inner) for place, inner in enumerate(value))
    else:
        slots = [name for kind in type(value).__mro__ for name in getattr(kind, "__slots__", ())]
        names = [*getattr(value, "__dict__", {}), *(slots if not isinstance(slots, str) else [slots])]
        yield from ((f".{name}", getattr(value, name)) for name in names if hasattr(value, name))


def _mark(value: Tensor | np.ndarray[Any, Any] | np.generic, by_value: bool) -> object:
    if isinstance(value, Tensor) and not by_value:
        return id(value), value._version
    if isinstance(value, Tensor):
        return tuple(value.shape), str(value.dtype), digest(value)
    return value.shape, str(value.dtype), value.tobytes() if value.dtype != object else repr(value)


def _twin(model: nn.Module) -> nn.Module | None:
    """A copy that shares parameters and buffers; None if an attribute cannot be copied."""
    shared: dict[int, Any] = {id(t): t for t in [*model.parameters(), *model.buffers()]}
    try:
        return deepcopy(model, shared)
    except Exception:  # a lock, a file, a tensor with a graph: whatever deepcopy cannot do
        return None
