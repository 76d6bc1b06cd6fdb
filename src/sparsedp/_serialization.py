"""Canonical JSON: one text for one value, so that it can be compared, hashed and chained."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterator, Mapping
from typing import Any, final

from sparsedp.errors import SparseDPError


def canonical(value: Any) -> str:
    """The one JSON text of a value: sorted keys, no spaces, shortest exact floats, no NaN or infinity."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False, ensure_ascii=True)


def sha256(text: str | bytes) -> str:
    """The SHA-256 of a text, in hexadecimal."""
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
        """The same value as fresh dicts and lists."""
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
