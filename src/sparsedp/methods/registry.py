"""The table of methods. A method is registered by a file in `methods/entries/`, or by the user's own."""

from __future__ import annotations

import importlib
import pkgutil

from sparsedp.core.errors import SparseDPError
from sparsedp.methods import entries
from sparsedp.methods.method import Method

_METHODS: dict[str, Method] = {}


def register(method: Method) -> Method:
    """Add a row to the table.

    Raises:
        SparseDPError: the name is taken by another method.
    """
    if method.name in _METHODS and _METHODS[method.name] != method:
        raise SparseDPError(f"method: the name {method.name!r} is taken; choose another")
    _METHODS[method.name] = method
    return method


def get_method(name: str) -> Method:
    """The method of that name."""
    _discover()
    if name not in _METHODS:
        raise SparseDPError(f"method: got {name!r}, expected one of {sorted(_METHODS)}")
    return _METHODS[name]


def all_methods() -> tuple[Method, ...]:
    """Every registered method, by name."""
    _discover()
    return tuple(_METHODS[name] for name in sorted(_METHODS))


def _discover() -> None:
    for module in pkgutil.iter_modules(entries.__path__):
        importlib.import_module(f"{entries.__name__}.{module.name}")
