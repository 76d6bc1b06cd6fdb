"""One look at all that a model and its loss hold beside the model's own parameters and buffers."""

from __future__ import annotations

import pickle
import types
from collections.abc import Collection
from hashlib import blake2b
from io import BytesIO, StringIO
from typing import Any, final
from weakref import WeakSet

import numpy as np
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, Sampler

from sparsedp.core.batch import PerSampleLoss
from sparsedp.guards.guard import digest
from sparsedp.guards.namespaces import Owner, read
from sparsedp.guards.sorts import Sort, is_a_librarys, own_classes, parts, sort_of

LOSS = "(loss_fn)"
"""Where the names of what the loss holds begin; no attribute can be called so."""

LARGE = 1 << 20
"""A tensor of more elements is not copied for a twin, so any change of it is refused."""

_OWN = frozenset(vars(nn.Module())) | {"_is_full_backward_hook"}
"""What PyTorch keeps in every module; the model's parameters and buffers are watched elsewhere."""
_HOOKS = ("_forward_hooks", "_forward_pre_hooks")
_RUN = ("forward", "__call__")
_DATA = (Dataset, DataLoader, Sampler)

Marks = dict[str, object]
"""What is held under each name, as something that can be compared."""


@final
class Look:
    """Finds what can be reached from a model's attributes and from its loss, and marks it.

    Attributes:
        marks: tensors and what cannot be looked into by value or by identity and version, all else by value.
        owners: what has variables that a copy of the model would share.
        shared: what a copy should share instead of copying: large tensors, files, what a run is made of.
        modules: those outside of the model's own, by name.
    """

    def __init__(
        self,
        model: nn.Module,
        loss: PerSampleLoss | None = None,
        *,
        by_value: bool,
        skip: Collection[int] = (),
    ) -> None:
        self.marks: Marks = {}
        self.owners: list[Owner] = []
        self.shared: list[Any] = []
        self.modules: list[tuple[str, nn.Module]] = []
        self._by_value = by_value
        own = list(model.named_modules())
        state = [
            tensor
            for _, each in own
            for tensor in (*each._parameters.values(), *each._buffers.values())
            if tensor is not None
        ]
        self._seen: dict[int, Any] = dict.fromkeys(
            skip
        )  # holds all, so that no new object takes an old one's id
        self._seen.update((id(each), each) for each in (*state, *(each for _, each in own)))
        self._in_loss = False
        for prefix, each in own:
            self._attributes(prefix, each)
            for name, tensor in (*each._parameters.items(), *each._buffers.items()):
                if tensor is not None and tensor.__dict__:
                    self._vars(f"{prefix}.{name}" if prefix else name, tensor)
        self.shared += state
        self.owners += state
        self._in_loss = True
        self._visit(LOSS, loss)

    def _visit(self, name: str, value: Any) -> None:
        sort = sort_of(type(value))
        if sort is Sort.PLAIN:
            self.marks[name] = _plain(value)
            return
        if sort is Sort.UNSEEN or id(value) in self._seen:
            return
        self._seen[id(value)] = value
        if sort in (Sort.TENSOR, Sort.ARRAY, Sort.BYTES):
            self._leaf(name, value, sort)
        elif sort is Sort.MODULE:
            self._module(name, value)
        elif sort is Sort.FUNCTION:
            self._function(name, value)
        elif sort is Sort.APART or (self._in_loss and isinstance(value, _DATA)):
            self.shared.append(value)
        else:
            self._object(name, value, sort)

    def _leaf(self, name: str, value: Any, sort: Sort) -> None:
        if sort is Sort.TENSOR:
            self.marks[name] = _tensor(value, self._by_value)
            if isinstance(value, nn.Parameter) or value.numel() > LARGE:
                self.shared.append(value)
                self.owners.append(value)
            self._vars(name, value)
        else:
            self.marks[name] = _array(value) if sort is Sort.ARRAY else (type(value), _bytes(value))

    def _vars(self, name: str, tensor: Tensor) -> None:
        for inner, value in list(tensor.__dict__.items()):
            self._visit(f"{name}.{inner}", value)

    def _module(self, name: str, module: nn.Module) -> None:
        """One that is not among the model's own: in a list, a function, the loss."""
        self.modules.append((name, module))
        self._attributes(name, module)
        for part in (module._parameters, module._buffers, module._modules):
            for inner, value in list(part.items()):
                self._visit(f"{name}.{inner}", value)

    def _attributes(self, prefix: str, module: nn.Module) -> None:
        held = vars(module)
        for name in [name for name in held if name not in _OWN]:
            self._visit(f"{prefix}.{name}" if prefix else name, held[name])
        for kind in _HOOKS:
            if hooks := held.get(kind):
                for place, hook in enumerate(list(hooks.values())):
                    if not isinstance(hook, types.FunctionType):
                        self._visit(f"{prefix}.{kind}[{place}]", hook)
        self._classes(type(module))

    def _classes(self, kind: type) -> None:
        for each in own_classes(kind):
            if id(each) not in self._seen:
                self._seen[id(each)] = each
                self._namespace(each.__qualname__, each)
                for name in _RUN:
                    if isinstance(run := vars(each).get(name), types.FunctionType):
                        self._visit(f"{each.__qualname__}.{name}", run)

    def _function(self, name: str, function: types.FunctionType) -> None:
        if is_a_librarys(function):
            return
        self._namespace(name, function)
        for variable, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
            if id(cell) not in self._seen:
                self._seen[id(cell)] = cell
                self._namespace(f"{name}.{variable}", cell)

    def _namespace(self, name: str, owner: Owner) -> None:
        self.owners.append(owner)
        for inner, value in read(owner).items():
            self._visit(name + inner, value)

    def _object(self, name: str, value: Any, sort: Sort) -> None:
        empty = True
        for part, inner in parts(value, sort):
            empty = False
            self._visit(f"{name}{part}", inner)
        if sort is not Sort.OBJECT:
            return
        if callable(value):
            self._classes(type(value))
        if empty:
            self.marks[name] = self._opaque(value)

    def _opaque(self, value: Any) -> object:
        """Of what cannot be looked into; what cannot be saved either (a lock, a file) is told by its type alone."""
        if not self._by_value:
            return (type(value),) if type(value) in _UNSAVED else (type(value), id(value))
        try:
            saved = pickle.dumps(value)
        except Exception:  # whatever an object may do when it is asked for what it is
            _UNSAVED.add(type(value))
            if not isinstance(value, types.GeneratorType):
                self.shared.append(value)
            return (type(value),)
        return type(value), blake2b(saved, digest_size=16).digest()


_UNSAVED: WeakSet[type] = WeakSet()
"""Types of objects that pickle has refused."""


def modules_apart(model: nn.Module, loss: PerSampleLoss) -> list[tuple[str, nn.Module]]:
    """Modules that model and loss hold elsewhere than among the model's own, by name."""
    return Look(model, loss, by_value=False).modules


def _plain(value: Any) -> object:
    return type(value), repr(value) if isinstance(value, (float, complex)) else value


def _tensor(value: Tensor, by_value: bool) -> object:
    if not by_value:
        return id(value), value._version
    return tuple(value.shape), str(value.dtype), digest(value)


def _array(value: np.ndarray[Any, Any] | np.generic) -> object:
    return value.shape, str(value.dtype), value.tobytes() if value.dtype != object else repr(value)


def _bytes(value: Any) -> object:
    if isinstance(value, (StringIO, BytesIO)):
        return None if value.closed else value.getvalue()
    return bytes(value)
