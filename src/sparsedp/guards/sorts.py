"""What sort of thing a value is to somebody who looks for private rows in it: plain, a container, an object."""

from __future__ import annotations

import io
import logging
import random
import types
import weakref
from array import array
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from enum import Enum, auto
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

_PLAIN = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device)
_NOT_SAVED = (
    type,
    types.BuiltinFunctionType,
    types.MethodWrapperType,
    types.WrapperDescriptorType,
    types.MethodDescriptorType,
    types.ClassMethodDescriptorType,
    types.GetSetDescriptorType,
    types.MemberDescriptorType,
    types.CodeType,
    property,
    classmethod,
    staticmethod,
    weakref.ReferenceType,
    *weakref.ProxyTypes,
)
_GENERATORS = (
    torch.Generator,
    np.random.Generator,
    np.random.RandomState,
    np.random.BitGenerator,
    random.Random,
)
_OF_THE_PROCESS = (types.ModuleType, logging.Logger, logging.Handler)
_MACHINERY = tuple(
    f"sparsedp.{package}."
    for package in (
        "callbacks", "evaluation", "federated", "gradients", "guards", "integrations", "own_loop", "ranks", "runs",
        "sampling", "training",
    )
)  # fmt: skip
"""What a run itself is made of; it changes in a step, and a user's object may lead from the loss to it."""


class Sort(Enum):
    """How a value is looked at."""

    PLAIN = auto()
    TENSOR = auto()
    ARRAY = auto()
    BYTES = auto()
    MAPPING = auto()
    SEQUENCE = auto()
    MODULE = auto()
    FUNCTION = auto()
    OBJECT = auto()
    UNSEEN = auto()
    """Not looked at: classes, descriptors, generators of random numbers."""
    APART = auto()
    """Not looked at, and no part of a copy either: Python modules, loggers, the run itself."""


def _sort_of(kind: type) -> Sort:
    for sort, kinds in _SORTS:
        if issubclass(kind, kinds):
            return sort
    if kind.__module__.startswith(_MACHINERY):
        return Sort.APART
    if _is_of_torch(kind.__module__) and hasattr(kind, "__call__"):  # noqa: B004
        return Sort.UNSEEN
    return Sort.OBJECT


_SORTS: tuple[tuple[Sort, Any], ...] = (
    (Sort.PLAIN, _PLAIN),
    (Sort.TENSOR, Tensor),
    (Sort.ARRAY, (np.ndarray, np.generic)),
    (Sort.BYTES, (bytearray, array, io.StringIO, io.BytesIO)),
    (Sort.MODULE, nn.Module),
    (Sort.FUNCTION, types.FunctionType),
    (Sort.UNSEEN, (*_NOT_SAVED, *_GENERATORS)),
    (Sort.APART, _OF_THE_PROCESS),
    (Sort.MAPPING, Mapping),
    (Sort.SEQUENCE, (list, tuple, set, frozenset, deque)),
)

sort_of: Callable[[type], Sort] = lru_cache(maxsize=4096)(_sort_of)
"""The sort of a type's values; by type alone, as it is asked of every value in every step."""


@lru_cache(maxsize=4096)
def own_classes(kind: type) -> tuple[type, ...]:
    """The classes of a type that are neither PyTorch's nor Python's own."""
    return tuple(
        each for each in kind.__mro__ if not _is_of_torch(each.__module__) and each.__module__ not in _PYTHONS
    )


_PYTHONS = {"builtins", "abc", "typing", "collections", "collections.abc", "functools", "types", "enum"}


def is_a_librarys(function: types.FunctionType) -> bool:
    """Whether nobody but PyTorch wrote it; a wrapper has the module of what it wraps."""
    return _is_of_torch(function.__module__ or "")


def _is_of_torch(module: str) -> bool:
    return module == "torch" or module.startswith("torch.")


def parts(value: Any, sort: Sort) -> Iterator[tuple[str, Any]]:
    """What a container or an object holds, each with its name; nothing if that cannot be looked into."""
    if sort is Sort.MAPPING:
        for place, (key, inner) in enumerate(list(value.items())):
            if sort_of(type(key)) is Sort.PLAIN:
                yield f"[{key!r}]", inner
            else:
                yield f"[key {place}]", key
                yield f"[value {place}]", inner
    elif sort is Sort.SEQUENCE:
        yield from ((f"[{place}]", inner) for place, inner in enumerate(list(value)))
    for name, member in _members(type(value)):
        try:
            yield f".{name}", member.__get__(value)
        except AttributeError:  # a slot that was never set
            continue
    if type(value) not in _BARE:
        yield from ((f".{name}", inner) for name, inner in list(getattr(value, "__dict__", {}).items()))


_BARE = {dict, list, tuple, set, frozenset, deque}


def _find_members(kind: type) -> tuple[tuple[str, Any], ...]:
    return tuple(
        (name, member)
        for each in kind.__mro__
        for name, member in vars(each).items()
        if isinstance(member, types.MemberDescriptorType)
        and name not in ("__doc__", "__weakref__", "__dict__")
    )


_members: Callable[[type], tuple[tuple[str, Any], ...]] = lru_cache(maxsize=4096)(_find_members)
