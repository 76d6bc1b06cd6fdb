"""One codec for a method's row: every field to JSON values and back. Options are some of its fields."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import fields, is_dataclass, replace
from enum import Enum
from typing import Any

from sparsedp.errors import SparseDPError
from sparsedp.methods.clock import Clock, EverySteps, PerEpoch, Refresh
from sparsedp.methods.granularity import Granularity
from sparsedp.methods.rankings import Ranking, get_ranking
from sparsedp.methods.rules import GeometryRule, OffSupport, Protection
from sparsedp.methods.schedules import Schedule, get_schedule
from sparsedp.methods.stages import Moves, Stage
from sparsedp.methods.standardization import Decays


def write(value: Any) -> Any:
    """JSON values of a field: plain values as they are, the pieces of a row by their fields."""
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, PerEpoch):
        return {"per_epoch": value.times}
    if isinstance(value, EverySteps):
        return {"every_steps": value.steps}
    if is_dataclass(value) and not isinstance(value, type):
        return {item.name: write(getattr(value, item.name)) for item in fields(value)}
    return [write(item) for item in value] if isinstance(value, (tuple, list)) else value


def read(name: str, value: Any) -> Any:
    """The value of the field `name` from what `write` gave, or a user typed.

    Raises:
        SparseDPError: it is none of the choices.
    """
    return _READERS[name](value) if name in _READERS else value


def _one_of(choices: type[Enum], name: str) -> Callable[[Any], Any]:
    def read_choice(value: Any) -> Any:
        known = [choice.value for choice in choices]
        if value not in known:
            raise SparseDPError(f"{name}: got {value!r}, expected one of {known}")
        return choices(value)

    return read_choice


def _clock(value: Any) -> Clock:
    match value:
        case {"per_epoch": times} | {"times": times} if len(value) == 1:
            return PerEpoch(times)
        case {"every_steps": steps} | {"steps": steps} if len(value) == 1:
            return EverySteps(steps)
    raise SparseDPError(f'clock: got {value!r}, expected {{"per_epoch": n}} or {{"every_steps": n}}')


def _ranking(value: Any) -> Ranking | None:
    return None if value is None else _piece("ranking", value, get_ranking)


def _schedule(value: Any) -> Schedule:
    found: Schedule = _piece("schedule", value, get_schedule)
    return found


def _piece(what: str, value: Any, named: Callable[[str], Any]) -> Any:
    """A registered piece by its name, with the other values put into its fields."""
    given: Any = {"name": value} if isinstance(value, str) else value
    if not isinstance(given, Mapping) or not isinstance(given.get("name"), str):
        raise SparseDPError(f'{what}: got {value!r}, expected a name, or {{"name": ..., and its own values}}')
    known = named(given["name"])
    others = {name: _frozen(inner) for name, inner in given.items() if name != "name"}
    unknown = sorted(set(others) - {item.name for item in fields(known)})
    if unknown:
        raise SparseDPError(f"{what}: {given['name']!r} has no {unknown}")
    return replace(known, **others)


def _frozen(value: Any) -> Any:
    return tuple(_frozen(item) for item in value) if isinstance(value, (list, tuple)) else value


def _stages(value: Any) -> tuple[Stage, ...]:
    try:
        return tuple(Stage(**{**stage, "moves": Moves(stage["moves"])}) for stage in value)
    except (TypeError, KeyError, ValueError) as error:
        raise SparseDPError(f"stages: got {value!r}, expected a list of name, moves and observes") from error


def _names(value: Any) -> tuple[str, ...]:
    given = [value] if isinstance(value, str) else value
    if not isinstance(given, (list, tuple)) or not all(isinstance(name, str) and name for name in given):
        raise SparseDPError(f"scope and always: got {value!r}, expected names of parameters or structure")
    return tuple(given)


def _decays(value: Any) -> Decays:
    try:
        return Decays(**value)
    except TypeError as error:
        raise SparseDPError(f"decays: got {value!r}, expected centre, variance and stabilizer") from error


_READERS: Mapping[str, Callable[[Any], Any]] = {
    "stages": _stages,
    "ranking": _ranking,
    "scope": _names,
    "always": _names,
    "refresh": _one_of(Refresh, "refresh"),
    "clock": _clock,
    "schedule": _schedule,
    "geometry": _one_of(GeometryRule, "geometry"),
    "off_support": _one_of(OffSupport, "off_support"),
    "granularity": _one_of(Granularity, "granularity"),
    "decays": _decays,
    "protection": _one_of(Protection, "protection"),
}
