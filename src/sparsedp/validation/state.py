"""Refuses a model or a loss that keeps something of the examples it has seen: a step leaves all state as it was.

State is everything that the next step or the saved model could be changed by: parameters and buffers, which nothing
but the optimizer may write to, and what modules, the loss and its closure hold besides.
"""

from __future__ import annotations

import functools
import logging
import pickle
import random
import types
import weakref
from array import array
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from hashlib import blake2b
from typing import Any, NamedTuple, cast, final

import numpy as np
import torch
from torch import Tensor, nn
from torch._C import _functorch
from torch.utils import _pytree as pytree
from torch.utils.data import DataLoader, Dataset, Sampler

from sparsedp.batch import Batch, LossFunction, to_device
from sparsedp.errors import PrivacyError
from sparsedp.randomness import SEED_BYTES, fork_generators

LOSS = "(loss_fn)"
"""Where the names of what the loss holds begin; no attribute can be called so."""

MOST_ENTRIES = 20_000
"""What a model holds beyond so many entries (a vocabulary, say) is compared only where values are."""

Tensors = dict[str, Tensor]
_TORCHS_OWN = frozenset(vars(nn.Module())) | {"_is_full_backward_hook"}
_PLAIN = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device, np.generic)
_NUMBERS = (float, complex, np.generic)
_BYTES = (bytearray, array, np.ndarray)
_BARE = {dict, list, tuple, set, frozenset, deque}
_SKIPPED = (
    type, types.ModuleType, types.BuiltinFunctionType, types.CodeType, weakref.ReferenceType, *weakref.ProxyTypes,
    logging.Logger, logging.Handler, Dataset, DataLoader, Sampler,
)  # fmt: skip
_NUMPYS = (np.random.Generator, np.random.RandomState, np.random.BitGenerator)
_GENERATORS = (torch.Generator, random.Random, *_NUMPYS)


@final
class StateGuard:
    """Compares the state of a model and its loss before and after a step.

    Parameters and buffers, those of a criterion or a teacher included, must be as they were. Version counters show
    every ordinary write. A write through `.data` or a NumPy view does not move them, so at the first step and at the
    last of every epoch digests of the values are compared too.

    Other state is what attributes of modules, of parameters and of the loss, its closure and arguments hold, however
    nested, and how far generators of random numbers have got. What has changed is put back, and model and loss run on
    zeros instead: what then differs from what the step left depends on the examples or on their number. So a mask
    cached by its shape may stay; the last input may not.

    Formal guarantees: nothing that is kept is a function of the examples, as far as it is watched. Under vmap, what
    is computed from an example is wrapped, and refused whatever its value.
    Edge cases: state may be changed between steps. Not watched: globals, class attributes, hooks, files, caches of
    `lru_cache`, and C code. A hidden write to a trained weight is found only in the steps that compare values.
    """

    def __init__(self, model: nn.Module, loss: LossFunction, some_rows: Callable[[], Batch]) -> None:
        self._model, self._loss, self._some_rows = model, loss, some_rows
        self._device = next(model.parameters()).device
        self._digests: dict[str, tuple[object, bytes]] = {}
        self._first, self._large = True, False
        self._untried = _State(model, loss, by_value=True)

    def check(self) -> None:
        """Run model and loss on a few examples; what they keep since this guard was made raises a `PrivacyError`."""
        self._run(self._some_rows())
        self._refuse_memories(self._untried, _State(self._model, self._loss, by_value=True))

    @contextmanager
    def untouched(self, *, last_of_epoch: bool) -> Iterator[None]:
        """Watch model and loss while gradients are computed; what changed raises a `PrivacyError`."""
        by_value, self._first = last_of_epoch or self._first, False
        others = not self._large or by_value
        before = _State(self._model, self._loss, by_value=by_value) if others else None
        self._large = before is not None and len(before.marks) > MOST_ENTRIES
        tensors = _tensors(self._model, before)  # holds them, so that a new one cannot take an old one's id
        marks = {name: _mark(tensor) for name, tensor in tensors.items()}
        if by_value:
            self._digests = {name: (marks[name], self._digest(name, one)) for name, one in tensors.items()}
        yield
        self._refuse_writes(tensors, marks, _tensors(self._model, before), by_value=by_value)
        if before is not None:
            self._refuse_memories(before, _State(self._model, self._loss, by_value=by_value))

    def _refuse_writes(
        self, tensors: Tensors, marks: dict[str, tuple[int, int]], after: Tensors, *, by_value: bool
    ) -> None:
        changed = set(tensors.keys() ^ after.keys())
        for name in tensors.keys() & after.keys():
            written = marks[name] != _mark(after[name])
            if written or (by_value and self._digests[name][1] != tensor_digest(after[name])):
                changed.add(name)
        if changed:
            raise PrivacyError(
                f"{sorted(changed)[:6]} of the model changed while it looked at private data, without any noise; "
                "switch off running statistics (track_running_stats=False) or move that state out of the model"
            )

    def _digest(self, name: str, tensor: Tensor) -> bytes:
        """The digest a frozen tensor had when it was last written in the open; of others the one it has now."""
        mark, known = self._digests.get(name, (None, b""))
        return known if mark == _mark(tensor) and not tensor.requires_grad else tensor_digest(tensor)

    def _refuse_memories(self, before: _State, after: _State) -> None:
        names = before.marks.keys() | after.marks.keys()
        changed = {name for name in names if before.marks.get(name) != after.marks.get(name)}
        if not changed:
            return
        kept = {
            name
            for name in changed
            if (new := after.marks.get(name))
            and (new.wrapped or ((old := before.marks.get(name)) and old.written_in_place(new)))
        }
        found = _State(self._model, self._loss, by_value=True)
        for runs, rows in ((1, 1), (3, 2)):
            before.put_back()
            try:
                for _ in range(runs):
                    self._run(_zeros(self._some_rows(), rows))
                expected = _State(self._model, self._loss, by_value=True)
            except Exception:  # whatever a model may do with other examples
                expected = before
            kept |= {name for name in changed if expected.value(name) != found.value(name)}
        found.put_back()
        if kept:
            raise PrivacyError(_words(sorted(kept)))

    def _run(self, rows: Batch) -> None:
        with fork_generators(bytes(SEED_BYTES), self._device), torch.enable_grad():
            self._loss(self._model, to_device(rows, self._device))


def tensor_digest(tensor: Tensor) -> bytes:
    """A hash of a tensor's bytes."""
    plain = _unwrapped(tensor).detach()
    plain = plain.to_dense() if plain.layout is not torch.strided else plain
    flat = plain.cpu().contiguous().reshape(-1)
    return blake2b(flat.view(torch.uint8).numpy().data if flat.numel() else b"", digest_size=16).digest()


class _Mark(NamedTuple):
    """Something held under a name: which object it is, and its value where values are compared."""

    identity: object
    value: object
    wrapped: bool = False

    def written_in_place(self, after: _Mark) -> bool:
        """Whether it is the same object with other contents: no run on other examples can undo that."""
        return isinstance(self.identity, tuple) and self.identity[:1] == after.identity[:1]  # type: ignore[index]


@final
class _State:
    """All that can be reached from the attributes of a model's modules and from its loss."""

    def __init__(self, model: nn.Module, loss: LossFunction | None, *, by_value: bool) -> None:
        self.marks: dict[str, _Mark] = {}
        self.modules: list[tuple[str, nn.Module]] = []
        self._by_value = by_value
        self._holders: list[tuple[Any, Any]] = []
        own = list(model.named_modules())
        state = [one for _, each in own for one in (*each._parameters.values(), *each._buffers.values())]
        self._seen: dict[int, Any] = {id(one): one for one in (*state, *(each for _, each in own))}
        for prefix, each in own:
            self._attributes(prefix, each)
            for name, tensor in (*each._parameters.items(), *each._buffers.items()):
                if tensor is not None:
                    self._variables(f"{prefix}.{name}".lstrip("."), tensor)
        if loss is not None:
            self._visit(LOSS, loss)

    def value(self, name: str) -> object:
        """The value under a name; names that are not held have one of their own."""
        return self.marks[name].value if name in self.marks else _Mark

    def put_back(self) -> None:
        """Let every container hold again what it held; what was written inside tensors and arrays stays."""
        for holder, held in self._holders:
            if isinstance(holder, types.CellType):
                holder.cell_contents = held
            elif isinstance(holder, list):
                holder[:] = held
            elif isinstance(holder, (set, deque)):
                holder.clear()
                (holder.update if isinstance(holder, set) else holder.extend)(held)
            else:
                for name in holder.keys() - held.keys():
                    del holder[name]
                holder.update(held)

    def _visit(self, name: str, value: Any) -> None:
        if isinstance(value, _PLAIN):
            plain = repr(value) if isinstance(value, _NUMBERS) else value
            self.marks[name] = _Mark(None, (type(value), plain))
            return
        if isinstance(value, _GENERATORS):
            self._seen[id(value)] = value
            self.marks[name] = _Mark((id(value),), _standing(value))
            return
        if isinstance(value, _SKIPPED) or _is_machinery(cast("Any", type(value))) or id(value) in self._seen:
            return
        self._seen[id(value)] = value
        if isinstance(value, Tensor):
            digest = tensor_digest(value) if self._by_value else None
            wrapped = _functorch.is_functorch_wrapped_tensor(value)
            self.marks[name] = _Mark(_mark(value), (tuple(value.shape), str(value.dtype), digest), wrapped)
            self._variables(name, value)
        elif isinstance(value, _BYTES):
            objects = isinstance(value, np.ndarray) and value.dtype.kind == "O"
            raw = value.tobytes() if hasattr(value, "tobytes") else bytes(value)
            self.marks[name] = _Mark((id(value),), (type(value), repr(value) if objects else raw))
        elif isinstance(value, nn.Module):
            self.modules.append((name, value))
            self._attributes(name, value)
            for inner, module in value._modules.items():
                self._visit(f"{name}.{inner}", module)
        else:
            self._parts(name, value)

    def _attributes(self, prefix: str, module: nn.Module) -> None:
        self._holders.append((vars(module), dict(vars(module))))
        for name, value in list(vars(module).items()):
            if name not in _TORCHS_OWN:
                self._visit(f"{prefix}.{name}".lstrip("."), value)

    def _variables(self, name: str, value: Any) -> None:
        held = getattr(value, "__dict__", None)
        if isinstance(held, dict) and type(value) not in _BARE:
            self._holders.append((held, dict(held)))
            for inner, one in list(held.items()):
                self._visit(f"{name}.{inner}", one)

    def _parts(self, name: str, value: Any) -> None:
        """The parts of a function, a container or an object."""
        if isinstance(value, types.FunctionType):
            if not (value.__module__ or "").startswith("torch"):
                for variable, cell in zip(value.__code__.co_freevars, value.__closure__ or (), strict=True):
                    self._cell(f"{name}.{variable}", cell)
                for part in ("__defaults__", "__kwdefaults__"):
                    self._visit(f"{name}.{part}", getattr(value, part))
                self._variables(name, value)
        elif isinstance(value, types.MethodType):
            self._visit(f"{name}.__self__", value.__self__)
            self._visit(name, value.__func__)
        elif isinstance(value, functools.partial):
            for part in ("func", "args", "keywords"):
                self._visit(f"{name}.{part}", getattr(value, part))
        elif isinstance(value, dict):
            self._holders.append((value, dict(value)))
            for place, (key, inner) in enumerate(list(value.items())):
                self._visit(
                    f"{name}[{key!r}]" if isinstance(key, _PLAIN) else f"{name}[value {place}]", inner
                )
                if not isinstance(key, _PLAIN):
                    self._visit(f"{name}[key {place}]", key)
            self._variables(name, value)
        elif isinstance(value, (list, tuple, set, frozenset, deque)):
            if isinstance(value, (list, set, deque)):
                self._holders.append((value, list(value)))
            for place, inner in enumerate(list(value)):
                self._visit(f"{name}[{place}]", inner)
            self._variables(name, value)
        else:
            slots = [slot for slot in _slots(cast("Any", type(value))) if hasattr(value, slot)]
            for slot in slots:
                self._visit(f"{name}.{slot}", getattr(value, slot))
            self._variables(name, value)
            if not slots and not getattr(value, "__dict__", None):
                self.marks[name] = self._opaque(value)

    def _cell(self, name: str, cell: types.CellType) -> None:
        if id(cell) in self._seen:
            return
        self._seen[id(cell)] = cell
        with suppress(ValueError):  # not set yet
            self._holders.append((cell, cell.cell_contents))
            self._visit(name, cell.cell_contents)

    def _opaque(self, value: Any) -> _Mark:
        """Of what cannot be looked into: what pickle makes of it; of a lock or a file, the type."""
        pickled = None
        if self._by_value and type(value) not in _UNSAVED:
            try:
                pickled = pickle.dumps(value)
            except Exception:  # whatever an object may do when it is asked for what it is
                _UNSAVED.add(type(value))
        return _Mark(type(value), pickled)


_UNSAVED: weakref.WeakSet[type] = weakref.WeakSet()
"""Types of objects that pickle has refused."""


def _standing(generator: Any) -> object:
    """How far a generator has got."""
    if isinstance(generator, torch.Generator):
        return tensor_digest(generator.get_state())
    if isinstance(generator, random.Random):
        return generator.getstate()
    if isinstance(generator, np.random.RandomState):
        generator = generator._bit_generator
    return repr(getattr(generator, "bit_generator", generator).state)


def _tensors(model: nn.Module, state: _State | None) -> Tensors:
    """Parameters and buffers of the model and of modules apart from it."""
    found = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    for prefix, module in [] if state is None else state.modules:
        for name, tensor in (*module._parameters.items(), *module._buffers.items()):
            if tensor is not None:
                found[f"{prefix}.{name}"] = tensor
    return found


def _mark(tensor: Tensor) -> tuple[int, int]:
    return id(tensor), tensor._version


def _unwrapped(tensor: Tensor) -> Tensor:
    """The values behind the wrappers that vmap leaves around what was computed in it."""
    while _functorch.is_functorch_wrapped_tensor(tensor):
        tensor = _functorch.get_unwrapped(tensor)
    return tensor


def _zeros(rows: Batch, count: int) -> Batch:
    return pytree.tree_map_only(Tensor, lambda leaf: leaf.new_zeros(count, *leaf.shape[1:]), rows)


@functools.lru_cache(maxsize=4096)
def _slots(kind: type) -> tuple[str, ...]:
    members = {name: one for each in kind.__mro__ for name, one in vars(each).items()}
    slots = [name for name, one in members.items() if isinstance(one, types.MemberDescriptorType)]
    return tuple(name for name in slots if name not in ("__dict__", "__weakref__"))


@functools.lru_cache(maxsize=4096)
def _is_machinery(kind: type) -> bool:
    """Whether it is part of the run itself, or a callable of torch's: what changes there is no user's memory."""
    if issubclass(kind, (nn.Module, Tensor)):
        return False
    if kind.__module__.startswith("sparsedp."):
        return kind.__module__ != "sparsedp.batch"
    return kind.__module__.split(".")[0] == "torch" and hasattr(kind, "__call__")  # noqa: B004


def _words(kept: list[str]) -> str:
    of_model = [name for name in kept if not name.startswith(LOSS)]
    if of_model:
        return (
            f"{', '.join(of_model[:6])} of the model changed while it looked at private data, and would be released "
            "with it, without any noise; keep nothing in a forward pass that depends on the rows or their number"
        )
    return (
        f"{', '.join(kept[:6]).replace(LOSS, 'loss_fn')} changed while the loss looked at private data: what it "
        "keeps of one record changes everybody's gradient in later steps, past the clip; compute a row's loss from "
        "that row, the model and constants"
    )
