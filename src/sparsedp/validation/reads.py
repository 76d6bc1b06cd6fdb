"""Which rows of what a data set holds are read when an item is made: indices are noted, never values."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple, cast, final

import numpy as np
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree
from torch.utils.data import Dataset

FEW = 64
"""Containers of at most this many members are looked into for others."""


class Source(NamedTuple):
    """Something whose rows are read: a data set with all it holds, or one attribute of the outermost."""

    name: str
    length: int
    inner: bool


Note = Callable[[object], None]
"""Notes a subscript, by position."""

_EVERYTHING = slice(None)


@final
class Reads:
    """Makes watched copies of what a data set holds; the data set itself is left alone."""

    def __init__(self) -> None:
        self.tensors = _WatchedTensors()
        self._rows: dict[Source, set[int]] = {}
        self._made: dict[int, Any] = {}

    def taken(self) -> dict[Source, set[int]]:
        """Which rows were read since the last call."""
        found, self._rows = self._rows, {}
        return found

    def watch_data_set(self, dataset: Any, name: str, length: int, *, inner: bool) -> Any:
        """A copy of the data set that shares its rows and notes which are read."""
        if id(dataset) in self._made or not hasattr(dataset, "__dict__"):
            return self._made.get(id(dataset), dataset)
        source = Source(name, length, inner)
        watched = self._made[id(dataset)] = object.__new__(_noting(type(dataset)))
        watched.__dict__["_sparsedp_note"] = self._note_for(source)
        for attribute, value in vars(dataset).items():
            below = source if inner else Source(f"{name}.{attribute}", length, inner)
            watched.__dict__[attribute] = self._watch(value, below, f"{name}.{attribute}")
        return watched

    def _watch(self, value: Any, source: Source, name: str) -> Any:
        """A watched stand-in for what may hold a row of each item; the value itself for all else."""
        kind, note = type(value), self._note_for(source)
        if isinstance(value, Dataset) or kind.__module__.startswith("datasets."):
            return self.watch_data_set(value, name, len(cast("Any", value)), inner=True)
        pandas: Any = sys.modules.get("pandas")
        if pandas is not None and isinstance(value, (pandas.DataFrame, pandas.Series)):
            return _Frame(value, note) if len(value) == source.length else value
        if isinstance(value, Tensor):
            if value.dim() and len(value) == source.length:
                self.tensors.watch(_memory(value), note)
        elif kind in (np.ndarray, np.memmap):
            if value.ndim and len(value) == source.length:
                self.tensors.watch((value.ctypes.data, value.size), note)
                return _noted(value.view(_Array), note)
        elif kind in _CONTAINERS:
            if len(value) == source.length and (kind is not dict or set(value) == set(range(source.length))):
                return _noted(_CONTAINERS[kind](value), note)
            if kind is dict and len(value) <= FEW:
                return {key: self._watch(one, source, name) for key, one in value.items()}
            if len(value) <= FEW:
                return kind(self._watch(one, source, name) for one in value)
        elif type(getattr(value, "__dict__", None)) is dict and id(value) not in self._made:
            return self._watch_object(value, source, name)
        return self._made.get(id(value), value)

    def _watch_object(self, value: Any, source: Source, name: str) -> Any:
        """A copy of an object that holds rows; the object itself where it holds none."""
        self._made[id(value)] = value
        held = vars(value)
        watched = {key: self._watch(one, source, f"{name}.{key}") for key, one in held.items()}
        if any(watched[key] is not one for key, one in held.items()):
            made = self._made[id(value)] = object.__new__(type(value))
            made.__dict__.update(watched)
        return self._made[id(value)]

    def _note_for(self, source: Source) -> Note:
        return lambda key: self._rows.setdefault(source, set()).update(_positions(key, source.length))


def _positions(key: object, length: int) -> Iterable[int]:
    """The rows that a subscript stands for; all of them when it cannot be told."""
    if isinstance(key, tuple):
        key = key[0] if key else _EVERYTHING
    if isinstance(key, slice):
        return range(length)[key]
    try:
        where = np.asarray(key)
        if where.dtype == bool and where.shape == (length,):
            where = where.nonzero()[0]
        if where.dtype.kind in "iu":
            return [int(i) % length for i in where.reshape(-1)]
    except (TypeError, ValueError, RuntimeError):
        pass
    return range(length)


def _noted(watched: Any, note: Note) -> Any:
    watched._sparsedp_note = note
    return watched


def _reading_all(name: str, get: Callable[[Any], Any]) -> Callable[..., Any]:
    def read(self: Any, *args: Any) -> Any:
        self._sparsedp_note(_EVERYTHING)
        return getattr(get(self), name)(*args)

    return read


def _noting(kind: Any, *whole: str) -> Any:
    """A kind of container, or a data set's class, that notes which rows are read; the methods named read all."""

    def getitem(self: Any, index: Any) -> Any:
        self._sparsedp_note(index)
        return kind.__getitem__(self, index)

    def get(self: Any, key: Any, default: Any = None) -> Any:
        self._sparsedp_note(key)
        return kind.get(self, key, default)

    methods: dict[str, Any] = {name: _reading_all(name, lambda self: super(made, self)) for name in whole}
    made: Any = type(kind)(
        kind.__name__, (kind,), {**methods, "__getitem__": getitem, **({"get": get} if kind is dict else {})}
    )
    return made


_WHOLE = ("__iter__", "__contains__", "__add__", "__mul__", "__eq__", "index", "count")
_CONTAINERS: dict[Any, Any] = {
    list: _noting(list, *_WHOLE, "__reversed__", "copy"),
    tuple: _noting(tuple, *_WHOLE),
    dict: _noting(dict, "values", "items"),
}


class _Array(np.ndarray):
    """A view of an array; what is read from it is a plain array."""

    _FACTS = frozenset({"shape", "dtype", "ndim", "size", "nbytes", "itemsize", "strides", "flags"})

    def __getattribute__(self, name: str) -> Any:
        if not name.startswith("_") and name not in _Array._FACTS:
            self._read(_EVERYTHING)
        return super().__getattribute__(name)

    def __getitem__(self, key: Any) -> Any:
        self._read(key)
        return np.asarray(self)[key]

    def __iter__(self) -> Any:
        return iter(_plain(self))

    def __array_ufunc__(self, ufunc: Any, method: str, *inputs: Any, **more: Any) -> Any:
        return getattr(ufunc, method)(*map(_plain, inputs), **more)

    def __array_function__(self, func: Any, types: Any, args: Any, kwargs: Any) -> Any:
        return func(*pytree.tree_map(_plain, args), **pytree.tree_map(_plain, kwargs))

    def _read(self, key: object) -> None:
        note = self.__dict__.get("_sparsedp_note")  # views that NumPy makes of it have none
        if note is not None:
            note(key)


def _plain(value: Any) -> Any:
    if isinstance(value, _Array):
        value._read(_EVERYTHING)
        return np.asarray(value)
    return value


def _memory(tensor: Tensor) -> tuple[int, int]:
    try:
        return tensor.untyped_storage().data_ptr(), tensor.numel()
    except (NotImplementedError, RuntimeError):
        return id(tensor), -1


@final
class _WatchedTensors(TorchFunctionMode):
    """Notes the rows of these tensors, and of whatever shares their memory, that operations read."""

    _FACTS = ("__get__", "__len__", "size", "dim", "numel", "stride", "is_floating_point", "data_ptr")
    _PICKS = (Tensor.select, torch.select, Tensor.index_select, torch.index_select)

    def __init__(self) -> None:
        super().__init__()
        self._notes: dict[tuple[int, int], Note] = {}

    def watch(self, memory: tuple[int, int], note: Note) -> None:
        """Note what is read of a tensor, or an array by a tensor over the same memory."""
        self._notes.setdefault(memory, note)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        leaves = pytree.tree_leaves((args, kwargs))
        notes = [note for leaf in leaves if isinstance(leaf, Tensor) and (note := self._note_of(leaf))]
        result = func(*pytree.tree_map(_plain, args), **pytree.tree_map(_plain, kwargs))
        if notes and func.__name__ not in self._FACTS:
            key: Any = _EVERYTHING
            if func is Tensor.__getitem__ and self._note_of(args[0]):
                key = args[1]
            elif func in self._PICKS and args[1] == 0:
                key = args[2]
            elif isinstance(result, Tensor) and self._note_of(result):
                return result  # the same rows under another name
            for note in notes:
                note(key)
        return result

    def _note_of(self, tensor: Tensor) -> Note | None:
        return self._notes.get(_memory(tensor))


class _Frame:
    """A pandas frame or series that notes which rows are read; columns taken from it do as well."""

    _FACTS = frozenset({"shape", "columns", "index", "dtypes", "dtype", "name", "size", "ndim", "empty"})

    def __init__(self, frame: Any, note: Note) -> None:
        self._frame, self._sparsedp_note = frame, note

    def __len__(self) -> int:
        return len(self._frame)

    def __getitem__(self, key: Any) -> Any:
        found = self._frame[key]
        if isinstance(key, (str, list)) and getattr(found, "shape", ())[:1] == (len(self._frame),):
            return _Frame(found, self._sparsedp_note)
        scalar = not hasattr(found, "shape") or self._frame.ndim == 1
        self._sparsedp_note(self._frame.index.get_indexer([key]) if scalar and np.ndim(key) == 0 else key)
        return found

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._frame, name)
        if name in ("iloc", "iat", "loc", "at"):
            return _Located(self._frame, found, self._sparsedp_note, labels=name in ("loc", "at"))
        if name == "values":
            return _noted(np.asarray(found).view(_Array), self._sparsedp_note)
        if self._frame.ndim == 2 and name in self._frame.columns:
            return _Frame(found, self._sparsedp_note)
        if name not in self._FACTS:
            self._sparsedp_note(_EVERYTHING)
        return found


_OPERATORS = (
    "iter",
    "eq",
    "ne",
    "lt",
    "le",
    "gt",
    "ge",
    "add",
    "sub",
    "mul",
    "truediv",
    "invert",
    "contains",
)
for _name in _OPERATORS:
    setattr(_Frame, f"__{_name}__", _reading_all(f"__{_name}__", lambda self: self._frame))


class _Located(NamedTuple):
    """A frame's rows by position or by label."""

    frame: Any
    locator: Any
    note: Note
    labels: bool

    def __getitem__(self, key: Any) -> Any:
        rows = key[0] if type(key) is tuple and self.frame.ndim == 2 else key
        if self.labels and np.ndim(rows) == 0 and not isinstance(rows, slice):
            rows = self.frame.index.get_indexer_for([rows])
        elif self.labels:
            rows = _EVERYTHING
        self.note(rows)
        return self.locator[key]
