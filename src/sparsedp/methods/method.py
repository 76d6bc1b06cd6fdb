"""A method is data: a few stages, a ranking, a ratio schedule, a refresh rule, a geometry."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from sparsedp._validate import exact_ratio
from sparsedp.errors import SparseDPError
from sparsedp.methods import codec
from sparsedp.methods.clock import Clock, EverySteps, PerEpoch, Refresh
from sparsedp.methods.granularity import Granularity
from sparsedp.methods.rankings import RankedBy, Ranking
from sparsedp.methods.rules import GeometryRule, OffSupport, Protection
from sparsedp.methods.schedules import Constant, Release, Schedule
from sparsedp.methods.scope import Names
from sparsedp.methods.stages import MAIN, SELECT, WARM_UP, Moves, Stage, check_stages
from sparsedp.methods.standardization import Decays

_SUPPORT_RULE = ("schedule", "active_ratio", "refresh", "clock", "granularity")


@dataclass(frozen=True, slots=True, kw_only=True)
class Method:
    """One row of the methods table.

    Attributes:
        name: what users type.
        summary: one line for lists.
        paper: where it comes from.
        stages: what it does one after the other; the main one is last.
        ranking: what orders the coordinates; None trains all of them always.
        refresh: whether each period brings a new ranking.
        clock: the periods of the main phase; the ratio moves with them.
        schedule: the active ratio, period by period.
        active_ratio: the ratio the schedule is built on; a share of what is ranked.
        scope: the parameters that take part at all, by name or structure (see `methods.scope`); all if empty.
        always: those of them that are active in any case; the rest is ranked.
        geometry: the space the main phase clips in.
        off_support: what happens to a coordinate that leaves.
        granularity: what is ranked.
        prune: whether frozen coordinates are set to zero at the first selection, or keep their value.
        per_sample_top: share of the active coordinates each unit keeps (AdaDPIGU's option); None keeps all.
        decays: the constants of the standardized geometry.
        protection: private, or which half is missing.
        denoise: hand out the posterior mean of the weights, by empirical Bayes (see `methods.empirical_bayes`).

    **Edge cases.** A scored ranking without a warm-up has nothing to rank by at first: its first period is dense.
    """

    name: str
    summary: str = field(default="", compare=False)
    paper: str = field(default="", compare=False)
    stages: tuple[Stage, ...] = (MAIN,)
    ranking: Ranking | None = None
    refresh: Refresh = Refresh.ONCE
    clock: Clock = field(default_factory=PerEpoch)
    schedule: Schedule = field(default_factory=Constant)
    active_ratio: float = 1.0
    scope: Names = ()
    always: Names = ()
    geometry: GeometryRule = GeometryRule.IDENTITY
    off_support: OffSupport = OffSupport.DROPPED
    granularity: Granularity = Granularity.COORDINATES
    prune: bool = False
    per_sample_top: float | None = None
    decays: Decays = field(default_factory=Decays)
    protection: Protection = Protection.PRIVATE
    denoise: bool = False

    def __post_init__(self) -> None:
        exact_ratio(self.active_ratio)
        if self.per_sample_top is not None:
            exact_ratio(self.per_sample_top, "per_sample_top")
        check_stages(self.stages, self.name)
        for check in (_check_selection, _check_dense, _check_release, _check_prune):
            check(self)

    @property
    def private(self) -> bool:
        """Whether it guarantees anything at all."""
        return self.protection is Protection.PRIVATE

    @property
    def warm_up(self) -> bool:
        """Whether a dense stage comes before the main one."""
        return WARM_UP in self.stages

    @property
    def names(self) -> Names:
        """What parts of a model are called in it: in scope, always and stages."""
        heads = tuple(stage.moves.value for stage in self.stages if stage.moves is Moves.HEAD)
        return (*self.scope, *self.always, *heads)

    def to_json(self) -> dict[str, Any]:
        """Everything that decides what it does, as JSON values; prose is left out, and so is `denoise` unless set."""
        values = {
            entry.name: codec.write(getattr(self, entry.name)) for entry in fields(self) if entry.compare
        }
        if not self.denoise:
            del values["denoise"]
        return values

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> Method:
        """The row `to_json` wrote.

        Raises:
            SparseDPError: unknown or missing fields, or a value that is none of the choices.
        """
        known = {entry.name for entry in fields(cls) if entry.compare}
        if {*values, "denoise"} != known:
            raise SparseDPError(f"method: got the fields {sorted(values)}, expected {sorted(known)}")
        return cls(**{name: codec.read(name, value) for name, value in values.items()})

    def support_rule(self) -> dict[str, Any]:
        """How the main stage chooses its support, as a plan states it."""
        if self.ranking is None:
            return {"rule": "scope", "scope": list(self.scope)} if self.scope else {"rule": "full"}
        row = self.to_json()
        names = [*_SUPPORT_RULE, *(name for name in ("scope", "always") if row[name])]
        return {"rule": row["ranking"], **{name: row[name] for name in names}}


def _check_selection(method: Method) -> None:
    selects = method.ranking is not None and method.ranking.source.selects
    if selects != (SELECT in method.stages):
        raise SparseDPError(
            f"{method.name}: the stage 'select' and a ranking with a release of its own, such as frequency, come "
            "together; give both or none"
        )
    steps = method.ranking is not None and method.ranking.source is RankedBy.STEP_ROWS
    every_step = method.refresh is Refresh.EVERY_PERIOD and method.clock == EverySteps(1)
    if steps and not (every_step and method.granularity is Granularity.ROWS):
        raise SparseDPError(
            f"{method.name}: its ranking is made in every step and of rows; give Refresh.EVERY_PERIOD, "
            "EverySteps(1) and Granularity.ROWS"
        )
    if selects and (method.refresh is Refresh.EVERY_PERIOD or method.granularity is not Granularity.ROWS):
        raise SparseDPError(
            f"{method.name}: its ranking is made once and of rows; give Refresh.ONCE and Granularity.ROWS"
        )


def _check_dense(method: Method) -> None:
    sparse = method.active_ratio != 1.0 or method.schedule != Constant() or method.prune or method.always
    if method.ranking is None and sparse:
        raise SparseDPError(
            f"{method.name}: it trains every coordinate, but got an active ratio, a schedule or prune; drop them, "
            "give ranking=..., or choose a sparse method"
        )


def _check_release(method: Method) -> None:
    if not isinstance(method.schedule, Release) or not method.schedule.ratios:
        return
    if exact_ratio(method.schedule.ratios[0]) < exact_ratio(method.active_ratio):
        raise SparseDPError(
            f"{method.name}: release starts at {method.schedule.ratios[0]}, below active_ratio="
            f"{method.active_ratio}; release only ever adds coordinates"
        )


def _check_prune(method: Method) -> None:
    if method.prune and method.off_support is OffSupport.COASTS:
        raise SparseDPError(
            f"{method.name}: prune sets frozen coordinates to zero and coasting would move them again; "
            "give off_support=OffSupport.DROPPED"
        )
