"""Options: what a user may change in a row of the methods table. Values only; to JSON and back."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

from sparsedp.errors import SparseDPError
from sparsedp.methods import codec
from sparsedp.methods.clock import Clock, Refresh
from sparsedp.methods.granularity import Granularity
from sparsedp.methods.method import Method
from sparsedp.methods.rankings import Ranking, get_ranking
from sparsedp.methods.rules import GeometryRule, OffSupport
from sparsedp.methods.schedules import Schedule
from sparsedp.methods.scope import Names
from sparsedp.methods.stages import WARM_UP, Stage
from sparsedp.methods.standardization import Decays

_ABOUT_SUPPORT = ("refresh", "clock", "schedule", "off_support", "granularity", "prune")


@dataclass(frozen=True, slots=True, kw_only=True)
class MethodOptions:
    """Overrides of a method's row; None leaves the row as it is. See `Method` for the meaning of each.

    `ranking` may be a name ("energy", "magnitude", "ranked", "coherent", "random"). Four more are short for a part
    of a field: `warm_up` puts that stage in or leaves it out, `centre_decay`, `variance_decay` and `stabilizer` are
    the constants in `decays`.
    """

    active_ratio: float | None = None
    scope: Names | None = None
    always: Names | None = None
    stages: tuple[Stage, ...] | None = None
    ranking: str | Ranking | None = None
    refresh: Refresh | None = None
    clock: Clock | None = None
    schedule: Schedule | None = None
    geometry: GeometryRule | None = None
    off_support: OffSupport | None = None
    granularity: Granularity | None = None
    prune: bool | None = None
    per_sample_top: float | None = None
    decays: Decays | None = None
    warm_up: bool | None = None
    centre_decay: float | None = None
    variance_decay: float | None = None
    stabilizer: float | None = None

    def to_json(self) -> dict[str, Any]:
        """The overrides that are set, as JSON values."""
        chosen = {f.name: getattr(self, f.name) for f in fields(self)}
        return {name: codec.write(value) for name, value in chosen.items() if value is not None}

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
        named = isinstance(values.get("ranking"), str)
        read = {
            name: value if named and name == "ranking" else codec.read(name, value)
            for name, value in values.items()
        }
        return cls(**read)


def configure(method: Method, options: MethodOptions | None = None) -> Method:
    """The method's row with the options put in."""
    if options is None:
        return method
    names = (*_ABOUT_SUPPORT, "active_ratio", "scope", "always", "geometry", "per_sample_top", "stages")
    chosen = {name: getattr(options, name) for name in names if getattr(options, name) is not None}
    chosen |= {
        name: codec.read(name, given) for name, given in chosen.items() if isinstance(given, str | list)
    }
    if options.warm_up is not None:
        others = tuple(stage for stage in chosen.get("stages", method.stages) if stage != WARM_UP)
        chosen["stages"] = (*others[:-1], WARM_UP, others[-1]) if options.warm_up else others
    if options.ranking is not None:
        given = options.ranking
        chosen["ranking"] = get_ranking(given) if isinstance(given, str) else given
    if method.ranking is None and options.ranking is None:
        _check_dense(method, chosen)
    decays = _decays(method, options)
    configured = replace(method, **chosen, decays=decays)
    if decays != method.decays and configured.geometry is not GeometryRule.STANDARDIZED:
        raise SparseDPError(
            f"{method.name}: centre_decay, variance_decay and stabilizer belong to the standardized geometry; "
            "drop them or give geometry=GeometryRule.STANDARDIZED"
        )
    return configured


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
    return replace(
        options.decays or method.decays, **{name: value for name, value in given.items() if value is not None}
    )
