"""What a setting may be: checks for values that users write in files and on the command line."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from sparsedp._serialization import FrozenMap
from sparsedp.errors import SparseDPError


@dataclass(frozen=True, slots=True)
class Kind:
    """A kind of value: how to say it, and how to read it (None for a value that is not of this kind)."""

    words: str
    read: Callable[[Any], Any]

    def check(self, name: str, value: Any) -> Any:
        """The value as the program wants it.

        Raises:
            SparseDPError: it is something else.
        """
        found = self.read(value)
        if found is None:
            raise SparseDPError(f"{name}: got {value!r}, expected {self.words}")
        return found


def _number(value: Any) -> float | None:
    plain = isinstance(value, (int, float)) and not isinstance(value, bool)
    return float(value) if plain and not math.isnan(value) else None


def _finite(value: Any) -> float | None:
    found = _number(value)
    return found if found is not None and math.isfinite(found) else None


def _finite_where(holds: Callable[[float], bool]) -> Callable[[Any], float | None]:
    def read(value: Any) -> float | None:
        found = _finite(value)
        return found if found is not None and holds(found) else None

    return read


def _budget(value: Any) -> float | None:
    found = math.inf if value == "inf" else _number(value)
    return found if found is not None and found > 0 else None


def _whole(value: Any) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) and value >= 0 else None


def _count(value: Any) -> int | None:
    return _whole(value) or None


def _text(value: Any) -> str | None:
    return value if isinstance(value, str) and value else None


def _flag(value: Any) -> bool | None:
    return value if isinstance(value, bool) else None


def _ratio(value: Any) -> float | str | None:
    return value if value == "auto" else _finite(value)


def _bounds(value: Any) -> float | tuple[float, ...] | None:
    if not isinstance(value, (list, tuple)):
        return _finite(value)
    both = [_finite(part) for part in value]
    return tuple(part for part in both if part is not None) if len(both) == 2 and None not in both else None


def _table(value: Any) -> FrozenMap | None:
    fits = isinstance(value, Mapping) and all(isinstance(key, str) for key in value)
    return FrozenMap(value) if fits else None


def _names(value: Any) -> tuple[str, ...] | None:
    fits = isinstance(value, (list, tuple)) and value and all(isinstance(name, str) for name in value)
    return tuple(value) if fits else None


TEXT = Kind("a name", _text)
FLAG = Kind("true or false", _flag)
NUMBER = Kind("a number", _finite)
POSITIVE = Kind("a number > 0", _finite_where(lambda value: value > 0))
NOT_NEGATIVE = Kind("a number >= 0", _finite_where(lambda value: value >= 0))
DECAY = Kind("a number in [0, 1)", _finite_where(lambda value: 0 <= value < 1))
WHOLE = Kind("a whole number >= 0", _whole)
COUNT = Kind("a whole number >= 1", _count)
CHANCE = Kind("a number between 0 and 1", _finite_where(lambda value: 0 < value < 1))
BUDGET = Kind("a finite number > 0, or inf for a method that is not private", _budget)
RATIO = Kind('a share in (0, 1], or "auto"', _ratio)
BOUNDS = Kind("a number, or two: for the warm-up and for the main phase", _bounds)
TABLE = Kind("a table of names and values", _table)
NAMES = Kind("a list of names", _names)


def choice(*options: str) -> Kind:
    """One of a few words."""
    return Kind(f"one of {', '.join(options)}", lambda value: value if value in options else None)
