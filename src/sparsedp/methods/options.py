"""Options: what a user may change in a row of the methods table. Values only; to JSON and back."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

from sparsedp.core.errors import SparseDPError
from sparsedp.methods.clock import Clock, EverySteps, PerEpoch, Refresh
from sparsedp.methods.granularity import Granularity
from sparsedp.methods.method import ActiveRatio, GeometryRule, Method, OffSupport
from sparsedp.methods.schedules import Constant, Cooling, Listed, Release, Schedule
from sparsedp.methods.scores import BlockCoherent, get_ranking
from sparsedp.methods.standardization import Decays

_ABOUT_SUPPORT = ("refresh", "clock", "schedule", "off_support", "granularity", "prune")


@dataclass(frozen=True, slots=True, kw_only=True)
class MethodOptions:
    """Overrides of a method's row; None leaves the row as it is. See `Method` for the meaning of each.

    `ranking` is a name ("energy", "magnitude", "ranked", "coherent", "block-coherent", "random"), `block_size` the
    number of steps of block-coherent's blocks; `centre_decay`, `variance_decay` and `stabilizer` are the constants of
    the standardized geometry.
    """

    active_ratio: ActiveRatio | None = None
    ranking: str | None = None
    warm_up: bool | None = None
    refresh: Refresh | None = None
    clock: Clock | None = None
    schedule: Schedule | None = None
    geometry: GeometryRule | None = None
    off_support: OffSupport | None = None
    granularity: Granularity | None = None
    prune: bool | None = None
    per_sample_top: float | None = None
    block_size: int | None = None
    centre_decay: float | None = None
    variance_decay: float | None = None
    stabilizer: float | None = None

    def to_json(self) -> dict[str, Any]:
        """The overrides that are set, as JSON values."""
        chosen = {f.name: getattr(self, f.name) for f in fields(self)}
        return {
            name: _WRITERS.get(name, _plain)(value) for name, value in chosen.items() if value is not None
        }

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> MethodOptions:
        """The options `to_json` wrote.

        Raises:
            SparseDPError: an unknown option, or a value none of the choices.
        """
        known = [f.name for f in fields(cls)]
        unknown = sorted(set(values) - set(known))
        if unknown:
            raise SparseDPError(f"method options: got {unknown}, expected some of {known}")
        return cls(**{name: _READERS.get(name, _plain)(value) for name, value in values.items()})


def configure(method: Method, options: MethodOptions | None = None) -> Method:
    """The method's row with the options put in."""
    if options is None:
        return method
    names = (*_ABOUT_SUPPORT, "active_ratio", "warm_up", "geometry", "per_sample_top")
    chosen = {name: getattr(options, name) for name in names if getattr(options, name) is not None}
    if options.ranking is not None:
        chosen["ranking"] = get_ranking(options.ranking)
    if method.ranking is None and options.ranking is None:
        _check_dense(method, chosen)
    decays = _decays(method, options)
    configured = replace(method, **chosen, decays=decays)
    if decays != method.decays and configured.geometry is not GeometryRule.STANDARDIZED:
        raise SparseDPError(
            f"{method.name}: centre_decay, variance_decay and stabilizer belong to the standardized geometry; "
            "drop them or give geometry=GeometryRule.STANDARDIZED"
        )
    return _with_block_size(configured, options.block_size)


def _check_dense(method: Method, chosen: Mapping[str, Any]) -> None:
    useless = [name for name in _ABOUT_SUPPORT if name in chosen]
    if useless:
        raise SparseDPError(
            f"{method.name}: it trains every coordinate, so {useless} would do nothing; drop them, give ranking=..., "
            "or choose a sparse method"
        )


def _decays(method: Method, options: MethodOptions) -> Decays:
    given = {
        "centre": options.centre_decay,
        "variance": options.variance_decay,
        "stabilizer": options.stabilizer,
    }
    return replace(method.decays, **{name: value for name, value in given.items() if value is not None})


def _with_block_size(method: Method, block_size: int | None) -> Method:
    if block_size is None:
        return method
    if not isinstance(method.ranking, BlockCoherent):
        raise SparseDPError(
            f"{method.name}: block_size={block_size} belongs to the block-coherent ranking; drop it or give "
            'ranking="block-coherent"'
        )
    return replace(method, ranking=replace(method.ranking, block=block_size))


def _plain(value: Any) -> Any:
    return value


def _write_enum(value: Any) -> str:
    return str(value.value)


def _enum_reader(choices: Any, name: str) -> Callable[[Any], Any]:
    def read(value: Any) -> Any:
        known = [choice.value for choice in choices]
        if value not in known:
            raise SparseDPError(f"{name}: got {value!r}, expected one of {known}")
        return choices(value)

    return read


def _write_clock(clock: Clock) -> dict[str, int]:
    return {"per_epoch": clock.times} if isinstance(clock, PerEpoch) else {"every_steps": clock.steps}


def _read_clock(value: Any) -> Clock:
    if isinstance(value, Mapping) and list(value) == ["per_epoch"]:
        return PerEpoch(value["per_epoch"])
    if isinstance(value, Mapping) and list(value) == ["every_steps"]:
        return EverySteps(value["every_steps"])
    raise SparseDPError(f'clock: got {value!r}, expected {{"per_epoch": n}} or {{"every_steps": n}}')


def _write_schedule(schedule: Schedule) -> dict[str, Any]:
    ratios = {"ratios": list(schedule.ratios)} if isinstance(schedule, (Release, Listed)) else {}
    return {"name": schedule.name, **ratios}


_SCHEDULES: dict[str, Callable[[tuple[float, ...]], Schedule]] = {
    "constant": lambda ratios: Constant(),
    "cooling": lambda ratios: Cooling(),
    "release": Release,
    "listed": Listed,
}


def _read_schedule(value: Any) -> Schedule:
    given: Any = {"name": value} if isinstance(value, str) else value
    if not isinstance(given, Mapping) or given.get("name") not in _SCHEDULES:
        raise SparseDPError(
            f'schedule: got {value!r}, expected {{"name": one of {sorted(_SCHEDULES)}, "ratios": [...]}}'
        )
    return _SCHEDULES[given["name"]](tuple(given.get("ratios", ())))


_WRITERS: dict[str, Callable[[Any], Any]] = {
    "refresh": _write_enum,
    "clock": _write_clock,
    "schedule": _write_schedule,
    "geometry": _write_enum,
    "off_support": _write_enum,
    "granularity": _write_enum,
}
_READERS: dict[str, Callable[[Any], Any]] = {
    "refresh": _enum_reader(Refresh, "refresh"),
    "clock": _read_clock,
    "schedule": _read_schedule,
    "geometry": _enum_reader(GeometryRule, "geometry"),
    "off_support": _enum_reader(OffSupport, "off_support"),
    "granularity": _enum_reader(Granularity, "granularity"),
}
