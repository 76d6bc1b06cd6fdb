"""Where things are held that a copy of a model shares with it: variables of functions, classes and parameters."""

from __future__ import annotations

import dis
from collections.abc import Iterator
from functools import lru_cache
from types import CellType, CodeType, FunctionType
from typing import Any

from torch import Tensor

from sparsedp.guards.sorts import Sort, sort_of

Owner = CellType | FunctionType | type | Tensor
"""What has a namespace of its own, and is the same object in every copy."""

MOST_IN_A_GLOBAL = 1_000
"""A global container of more entries is taken for a table, not for a memory."""

_OF_A_FUNCTION = ("__defaults__", "__kwdefaults__", "__dict__")
_GLOBAL = " global "
_HOLDING = {Sort.PLAIN, Sort.TENSOR, Sort.ARRAY, Sort.BYTES, Sort.MAPPING, Sort.SEQUENCE}


def read(owner: Owner) -> dict[str, Any]:
    """What an owner holds, by name; an empty variable is left out."""
    if isinstance(owner, CellType):
        try:
            return {"": owner.cell_contents}
        except ValueError:
            return {}
    if isinstance(owner, FunctionType):
        found = {f".{name}": getattr(owner, name) for name in _OF_A_FUNCTION}
        return found | {_GLOBAL + name: value for name, value in _globals(owner)}
    if isinstance(owner, type):
        return {
            f".{name}": value
            for name, value in list(vars(owner).items())
            if sort_of(type(value)) in _HOLDING and not name.startswith(("__", "_abc_"))
        }
    return {f".{name}": value for name, value in vars(owner).items()}


def write(owner: Owner, content: dict[str, Any]) -> None:
    """Make an owner hold what `read` once found, and nothing else."""
    if isinstance(owner, CellType):
        if content:
            owner.cell_contents = content[""]
        elif read(owner):
            del owner.cell_contents
    elif isinstance(owner, FunctionType):
        for name in read(owner).keys() - content.keys():
            del owner.__globals__[name.removeprefix(_GLOBAL)]
        for name, value in content.items():
            if name.startswith(_GLOBAL):
                owner.__globals__[name.removeprefix(_GLOBAL)] = value
            else:
                setattr(owner, name.removeprefix("."), value)
    else:
        held = read(owner)
        for name in held.keys() - content.keys():
            delattr(owner, name.removeprefix("."))
        for name, value in content.items():
            if held.get(name, owner) is not value:
                setattr(owner, name.removeprefix("."), value)


def _globals(function: FunctionType) -> Iterator[tuple[str, Any]]:
    """Globals that the function's code writes to, and containers, tensors and arrays that it reads."""
    written, used = _global_names(function.__code__)
    for name in used:
        if name in function.__globals__:
            value = function.__globals__[name]
            sort = sort_of(type(value))
            if name in written or (
                sort in _HOLDING
                and sort is not Sort.PLAIN
                and (sort not in (Sort.MAPPING, Sort.SEQUENCE) or len(value) <= MOST_IN_A_GLOBAL)
            ):
                yield name, value


@lru_cache(maxsize=4096)
def _global_names(code: CodeType) -> tuple[frozenset[str], tuple[str, ...]]:
    """The names of globals that some code writes to, and of all that it uses, functions inside it included."""
    written, used = set[str](), set[str]()
    for line in dis.get_instructions(code):
        if line.opname in ("STORE_GLOBAL", "DELETE_GLOBAL"):
            written.add(line.argval)
        if line.opname in ("LOAD_GLOBAL", "STORE_GLOBAL", "DELETE_GLOBAL"):
            used.add(line.argval)
    for inner in code.co_consts:
        if isinstance(inner, CodeType):
            more_written, more_used = _global_names(inner)
            written |= more_written
            used |= set(more_used)
    return frozenset(written), tuple(sorted(used))
