"""JSON: one text for one value, so that it can be hashed; and dataclasses to JSON and back, by their type hints."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
import types
import typing
from collections.abc import Iterator, Mapping, Sequence
from enum import Enum
from functools import cache
from typing import Any, Literal, TypeVar, final

from sparsedp.errors import DataError, SparseDPError

T = TypeVar("T")
Json = Any


def canonical(value: Any) -> str:
    """The one JSON text of a value: sorted keys, no spaces, shortest exact floats, no NaN or infinity."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False, ensure_ascii=True)


def sha256(text: str | bytes) -> str:
    return hashlib.sha256(text.encode() if isinstance(text, str) else text).hexdigest()


@final
class FrozenMap(Mapping[str, Any]):
    """An immutable, hashable mapping of JSON values; lists in it become tuples.

    Two are equal when their canonical texts are, so 1 and 1.0 differ, as their fingerprints do.
    """

    __slots__ = ("_items", "_text")

    def __init__(self, items: Mapping[str, Any]) -> None:
        self._items: dict[str, Any] = {key: _freeze(value, key) for key, value in items.items()}
        self._text = canonical(self.plain())

    def plain(self) -> dict[str, Any]:
        return {key: _thaw(value) for key, value in self._items.items()}

    def __getitem__(self, key: str) -> Any:
        return self._items[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._items)

    def __len__(self) -> int:
        return len(self._items)

    def __eq__(self, other: object) -> bool:
        return self._text == other._text if isinstance(other, FrozenMap) else NotImplemented

    def __hash__(self) -> int:
        return hash(self._text)

    def __reduce__(self) -> tuple[type[FrozenMap], tuple[dict[str, Any]]]:
        return FrozenMap, (self.plain(),)

    def __repr__(self) -> str:
        return f"FrozenMap({self._text})"


def _freeze(value: Any, where: object) -> Any:
    if not isinstance(where, str):
        raise SparseDPError(f"a JSON object's keys are text, got the key {where!r}")
    if value is None or isinstance(value, (bool, int, str)):
        return value
    if isinstance(value, float) and math.isfinite(value):
        return value
    if isinstance(value, Mapping):
        return FrozenMap(value)
    if isinstance(value, (list, tuple)):
        return tuple(_freeze(item, where) for item in value)
    raise SparseDPError(
        f"{where}: got {value!r}, expected JSON: text, finite numbers, true, false, null, lists, maps"
    )


def _thaw(value: Any) -> Any:
    if isinstance(value, FrozenMap):
        return value.plain()
    return [_thaw(item) for item in value] if isinstance(value, tuple) else value


def to_json(value: Any) -> Json:
    """Convert dataclasses, enums, mappings and sequences to plain values, dicts and lists, all the way down."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: to_json(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return {str(key): to_json(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [to_json(item) for item in value]
    return value.value if isinstance(value, Enum) else value


def from_json(kind: type[T], value: Json, where: str) -> T:
    """Convert a JSON value to a dataclass or `TypedDict`; the inverse of `to_json`.

    Edge cases:
        A whole number stands for a float and stays whole. A field with a default may be missing. Of a `TypedDict`
        other keys are ignored.
    """
    return typing.cast("T", _read(kind, value, where))


def _read(hint: Any, value: Json, where: str) -> Any:
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if hint is Any:
        return value
    if origin in (typing.Union, types.UnionType):
        for one in arguments:
            try:
                return _read(one, value, where)
            except DataError:
                continue
        raise _wrong(hint, value, where)
    if origin is Literal and value in arguments:
        return value
    if origin in (dict, Mapping) and isinstance(value, dict):
        return {key: _read(arguments[1], item, f"{where}, {key}") for key, item in value.items()}
    if hint is FrozenMap and isinstance(value, dict):
        return FrozenMap(value)
    if origin is tuple and Ellipsis not in arguments and isinstance(value, list):
        if len(value) != len(arguments):
            raise _wrong(hint, value, where)
        return tuple(_read(one, item, where) for one, item in zip(arguments, value, strict=True))
    if origin in (list, tuple, Sequence) and isinstance(value, list):
        items = [_read(arguments[0], item, f"{where}, item {i}") for i, item in enumerate(value)]
        return items if origin is list else tuple(items)
    if typing.is_typeddict(hint) and isinstance(value, dict):
        read = _fields(hint, value, where, required=_hints(hint))
        return {key: read.get(key, item) for key, item in value.items()}
    if dataclasses.is_dataclass(hint) and isinstance(value, dict):
        fields = dataclasses.fields(hint)
        unknown = sorted(value.keys() - {field.name for field in fields})
        if unknown:
            raise DataError(f"{where}: got the unknown fields {unknown}")
        absent = dataclasses.MISSING
        required = [f.name for f in fields if f.default is absent and f.default_factory is absent]
        return typing.cast("type", hint)(**_fields(hint, value, where, required=required))
    if isinstance(hint, type) and issubclass(hint, Enum) and value in [one.value for one in hint]:
        return hint(value)
    plain = isinstance(hint, type) and not origin and not typing.is_typeddict(hint)
    exact = plain and isinstance(value, bool) is (hint is bool)
    if exact and isinstance(value, (int, float) if hint is float else hint):
        return value
    raise _wrong(hint, value, where)


def _fields(
    hint: Any, value: Mapping[str, Json], where: str, required: typing.Iterable[str]
) -> dict[str, Any]:
    missing = [name for name in required if name not in value]
    if missing:
        raise DataError(f"{where}: {missing[0]} is missing; restore the file from a copy")
    return {
        name: _read(one, value[name], f"{where}, {name}")
        for name, one in _hints(hint).items()
        if name in value
    }


@cache
def _hints(hint: Any) -> dict[str, Any]:
    return typing.get_type_hints(hint)


def _wrong(hint: Any, value: Json, where: str) -> DataError:
    name = getattr(hint, "__name__", str(hint)) if not typing.get_origin(hint) else str(hint)
    if isinstance(hint, type) and issubclass(hint, Enum):
        name = f"one of {[one.value for one in hint]}"
    return DataError(f"{where}: got {value!r}, expected {name}")


def plain_json(value: Json) -> Json:
    """The value as it is when it has been written and read again: tuples are lists."""
    return json.loads(json.dumps(value))


def json_equal(one: Json, other: Json) -> bool:
    return json.dumps(one, sort_keys=True) == json.dumps(other, sort_keys=True)


def json_diff(one: Json, other: Json, name: str = "") -> Iterator[tuple[str, Json, Json]]:
    """Yield where two JSON values differ, by dotted names, and what stands there."""
    if isinstance(one, dict) and isinstance(other, dict):
        pairs = [(key, one.get(key), other.get(key)) for key in dict.fromkeys([*one, *other])]
    elif isinstance(one, list) and isinstance(other, list) and len(one) == len(other):
        pairs = [(str(i), old, new) for i, (old, new) in enumerate(zip(one, other, strict=True))]
    else:
        if not json_equal(one, other):
            yield name, one, other
        return
    for key, old, new in pairs:
        yield from json_diff(old, new, f"{name}.{key}" if name else key)


def short(value: Json) -> str:
    """Write a JSON value in at most sixty characters."""
    text = json.dumps(value)
    return text if len(text) <= 60 else text[:57] + "..."
