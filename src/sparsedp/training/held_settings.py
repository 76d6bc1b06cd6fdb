"""What modules hold beside tensors and plain settings, as a digest that is the same in every process."""

from __future__ import annotations

import functools
import hashlib
import logging
from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import fields, is_dataclass
from enum import Enum
from pathlib import PurePath
from types import FunctionType, MethodType, ModuleType
from typing import Any, final

import numpy as np
import torch
from torch import Tensor, nn

from sparsedp.validation.state import tensor_digest

_SCALAR = (bool, int, float, complex, str, bytes, type(None))
_BY_REPR = (*_SCALAR, Enum, PurePath, range, slice, torch.dtype, torch.device, np.dtype)
_BY_NAME = (ModuleType, logging.Logger, type)
_TORCHS_OWN = frozenset(vars(nn.Module()))
_HOOKS = ("_forward_pre_hooks", "_forward_hooks")


def describe_held(part: nn.Module) -> str:
    """A digest of lists, mappings, arrays, objects, functions and hooks; empty if the modules hold none.

    **Edge cases.** Of an object that has neither attributes nor fields the class alone is told, of a function what it
    has closed over, not what it does. So equal digests do not prove equal functions.
    """
    words = _Words(part)
    found = [f"{name} {words.of(value)}" for name, value in _held(part)]
    return hashlib.sha256("\n".join(found).encode()).hexdigest() if found else ""


def _held(part: nn.Module) -> Iterator[tuple[str, Any]]:
    for name, module in part.named_modules():
        # What PyTorch's own layers keep in private is made of their settings.
        torchs = type(module).__module__.startswith("torch.nn.")
        for key, value in vars(module).items():
            if key not in _TORCHS_OWN and not (torchs and key.startswith("_")) and not _is_plain(value):
                yield f"{name}.{key}", value
        for kind in _HOOKS:
            if hooks := getattr(module, kind):
                yield f"{name}.{kind}", list(hooks.values())


def _is_plain(value: object) -> bool:
    """Whether it is told among the plain settings."""
    return isinstance(value, _SCALAR) or (type(value) is tuple and all(map(_is_plain, value)))


@final
class _Words:
    """Values in words, in which no address and no order of a set appears."""

    def __init__(self, part: nn.Module) -> None:
        self._registered = {id(x) for x in (*part.modules(), *part.parameters(), *part.buffers())}
        self._met: dict[int, tuple[int, Any]] = {}

    def of(self, value: Any) -> str:
        """One value, with all that it holds; of one met before, its number."""
        if isinstance(value, _BY_REPR):
            return f"{type(value).__name__} {value!r}"
        if id(value) in self._registered:
            return type(value).__name__
        if id(value) in self._met:
            return f"{type(value).__name__} {self._met[id(value)][0]}"
        self._met[id(value)] = len(self._met), value  # held, so that no other takes its id
        return f"{type(value).__name__}({self._inside(value)})"

    def _inside(self, value: Any) -> str:
        if isinstance(value, Tensor):
            return f"{value.dtype} {tuple(value.shape)} {tensor_digest(value).hex()}"
        if isinstance(value, (np.ndarray, np.generic)) and value.dtype != object:
            return f"{value.dtype} {value.shape} {hashlib.sha256(value.tobytes()).hexdigest()}"
        if isinstance(value, Mapping):
            return ", ".join(f"{self.of(key)}: {self.of(inner)}" for key, inner in value.items())
        if isinstance(value, (set, frozenset)):
            return ", ".join(sorted(map(self.of, value)))
        if isinstance(value, (list, tuple, deque, np.ndarray)):
            return ", ".join(map(self.of, value))
        if isinstance(value, functools.partial):
            return ", ".join(map(self.of, (value.func, value.args, value.keywords)))
        if isinstance(value, _BY_NAME) or hasattr(value, "__qualname__"):
            return ", ".join([_name_of(value), *map(self.of, _bound_to(value))])
        return ", ".join(f"{name}={self.of(inner)}" for name, inner in _attributes(value))


def _bound_to(value: Any) -> Iterator[Any]:
    """What a function has closed over and its defaults, or what a method belongs to."""
    if isinstance(value, MethodType):
        yield from (value.__self__, value.__func__)
    if isinstance(value, FunctionType):
        yield from (value.__defaults__, value.__kwdefaults__)
        for cell in value.__closure__ or ():
            with suppress(ValueError):  # empty as yet
                yield cell.cell_contents


def _attributes(value: Any) -> list[tuple[str, Any]]:
    if is_dataclass(value):
        return [(entry.name, getattr(value, entry.name, None)) for entry in fields(value)]
    return list(getattr(value, "__dict__", {}).items())


def _name_of(value: Any) -> str:
    names = (getattr(value, name, None) for name in ("__qualname__", "name", "__name__"))
    return f"{getattr(value, '__module__', '')}.{next((name for name in names if name), '')}"
