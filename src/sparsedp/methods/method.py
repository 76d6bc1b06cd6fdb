"""A method is data: stages, a score, a ratio schedule, a refresh rule, a geometry. Values only; to JSON and back."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields, replace
from enum import Enum
from typing import Any, get_type_hints

import torch
from torch import Tensor

from sparsedp._serialization import from_json, to_json
from sparsedp._validate import exact_ratio
from sparsedp.clipping import Standardized
from sparsedp.errors import SparseDPError
from sparsedp.methods.ranking import Granularity, Names
from sparsedp.methods.schedules import Clock, Constant, EverySteps, PerEpoch, Refresh, Schedule
from sparsedp.methods.scores import Ranking, ScoreSource, read_ranking
from sparsedp.parameters import Support
from sparsedp.privacy.calibration import BudgetSplit
from sparsedp.privacy.mechanism import Release


class GeometryRule(Enum):
    """The space the main stage clips in; earlier stages always clip gradients as they are.

    Scaled: the clip norm follows the support, `C sqrt(k/d)` for k of d coordinates, and an update is as long as
    before: a gradient whose energy is spread evenly loses as little to the clip as a whole one, and meets `k/d`
    of the noise.
    """

    IDENTITY = "identity"
    STANDARDIZED = "standardized"
    SCALED = "scaled"


class OffSupport(Enum):
    """What happens to a coordinate that leaves the support.

    Dropped: its optimizer state is made fresh and it does not move. Coasts: it may still move by its velocity, which
    is public (RS, Sec. 4).
    """

    DROPPED = "dropped"
    COASTS = "coasts"


class Moves(Enum):
    """Which coordinates a stage may move."""

    ALL = "all"
    HEAD = "head"
    SUPPORT = "support"
    NOTHING = "nothing"


@dataclass(frozen=True, slots=True)
class Stage:
    """One stage of a method.

    Attributes:
        name: its phase in the plan.
        moves: the coordinates it may move, and so releases a gradient of; a stage that moves nothing makes one
            release of the ranking's own, over all units.
        observes: whether the ranking sees what it releases.

    A stage before the main one that moves something takes the plan's `warmup_fraction` of the steps; a selection,
    which comes first, the plan's `selection_budget` of epsilon.
    """

    name: str
    moves: Moves
    observes: bool = False

    @property
    def trains(self) -> bool:
        """Whether it takes steps of the training loop: all do but a selection."""
        return self.moves is not Moves.NOTHING


WARM_UP = Stage("warm-up", Moves.ALL, observes=True)
HEAD = Stage("head", Moves.HEAD)
SELECT = Stage("select", Moves.NOTHING, observes=True)
MAIN = Stage("main", Moves.SUPPORT, observes=True)

_SEQUENCES = [(*first, *before, MAIN) for first in ((), (SELECT,)) for before in ((), (WARM_UP,), (HEAD,))]


def phase_names(stages: tuple[Stage, ...]) -> tuple[str, ...]:
    """The phases of the stages, in order; the main one is "train" where nothing trains before it."""
    alone = not any(stage.trains for stage in stages[:-1])
    return (*(stage.name for stage in stages[:-1]), "train" if alone else MAIN.name)


@dataclass(frozen=True, slots=True)
class Decays:
    """The constants of AdaDPIGU Alg. 2: `gamma_1`, `gamma_2` and `mu`."""

    centre: float = 0.9
    variance: float = 0.999
    stabilizer: float = 1e-6

    def __post_init__(self) -> None:
        for name, value in (("centre", self.centre), ("variance", self.variance)):
            if not 0 <= value < 1:
                raise SparseDPError(f"{name}: got {value}, expected a number in [0, 1)")
        if not 0 < self.stabilizer < float("inf"):
            raise SparseDPError(f"stabilizer: got {self.stabilizer}, expected a small number > 0")


@dataclass(frozen=True, slots=True, eq=False)
class Statistics:
    """Running mean `alpha` and variance `beta` of the released gradient, k numbers each on a support, float64.

    Off the support they are 0 and 1: a coordinate that enters, or comes back, starts afresh.
    """

    support: Support
    alpha: Tensor
    beta: Tensor

    @classmethod
    def fresh(cls, support: Support) -> Statistics:
        """`alpha = 0`, `beta = 1`: as at the switch from the warm-up."""
        alpha = torch.zeros(support.size, dtype=torch.float64)
        return cls(support, alpha, torch.ones_like(alpha))

    def geometry(self, decays: Decays) -> Standardized:
        """`z = (g - alpha) / (sqrt(beta) + mu)` on the support (Alg. 2 line 9)."""
        return Standardized(centre=self.alpha, scale=torch.sqrt(self.beta) + decays.stabilizer)

    def moved_to(self, support: Support) -> Statistics:
        """The statistics on another support: coordinates in both keep theirs, the others start."""
        if support == self.support:
            return self
        there = Statistics.fresh(support)
        old, new = self.support.indices, support.indices
        if old.numel() and new.numel():
            place = torch.searchsorted(new, old).clamp_(max=new.numel() - 1)
            both = new[place] == old
            there.alpha[place[both]], there.beta[place[both]] = self.alpha[both], self.beta[both]
        return there

    def updated(self, released: Release, decays: Decays) -> Statistics:
        """The moving averages after a release (Alg. 2 line 15); `beta` moves with the old `alpha`."""
        gradient, alpha = released.mean.to("cpu", torch.float64), self.alpha
        beta = decays.variance * self.beta + (1 - decays.variance) * (gradient - alpha) ** 2
        return Statistics(self.support, decays.centre * alpha + (1 - decays.centre) * gradient, beta)


OF_THE_PLAN = ("warmup_fraction", "selection_budget", "split")
"""Settings of a method that its plan carries, and not its row."""

_SUPPORT_RULE = ("schedule", "active_ratio", "refresh", "clock", "granularity")
"""What a plan states of a support, beside its ranking."""

_ABOUT_SUPPORT = (*_SUPPORT_RULE, "always", "off_support", "prune")
"""What does nothing without a ranking."""

_EVERY_EPOCH, _CONSTANT, _PAPERS_DECAYS = PerEpoch(), Constant(), Decays()


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
        scope: the parameters that take part at all, by name or structure (see `methods.ranking`); all if empty.
        always: those of them that are active in any case; the rest is ranked.
        geometry: the space the main phase clips in.
        off_support: what happens to a coordinate that leaves.
        granularity: what is ranked.
        prune: whether frozen coordinates are set to zero at the first selection, or keep their value.
        per_sample_top: share of the active coordinates each unit keeps (AdaDPIGU's option); None keeps all.
        decays: the constants of the standardized geometry.
        denoise: when the support changes, put the posterior mean of the weights in their place
        (`methods.empirical_bayes`).
        warmup_fraction: share of the steps of a stage before the main one; 0.3 if None.
        selection_budget: share of epsilon that a selection by a release of its own may cost alone; 0.1 if None.
        split: how two stages that train divide the budget; equal noise if None.

    Edge cases: A scored ranking without a warm-up has nothing to rank by at first: its first period is dense.
    """

    name: str
    summary: str = field(default="", compare=False)
    paper: str = field(default="", compare=False)
    stages: tuple[Stage, ...] = (MAIN,)
    ranking: Ranking | None = None
    refresh: Refresh = Refresh.ONCE
    clock: Clock = _EVERY_EPOCH
    schedule: Schedule = _CONSTANT
    active_ratio: float = 1.0
    scope: Names = ()
    always: Names = ()
    geometry: GeometryRule = GeometryRule.IDENTITY
    off_support: OffSupport = OffSupport.DROPPED
    granularity: Granularity = Granularity.COORDINATES
    prune: bool = False
    per_sample_top: float | None = None
    decays: Decays = _PAPERS_DECAYS
    denoise: bool = False
    warmup_fraction: float | None = None
    selection_budget: float | None = None
    split: BudgetSplit | None = None

    def __post_init__(self) -> None:
        exact_ratio(self.active_ratio)
        if self.per_sample_top is not None:
            exact_ratio(self.per_sample_top, "per_sample_top")
        for mistake in self._mistakes():
            raise SparseDPError(f"{self.name}: {mistake}")

    def _mistakes(self) -> Iterator[str]:
        if self.stages not in _SEQUENCES:
            yield (
                f"got the stages {[stage.name for stage in self.stages]}, expected MAIN as the last, before it "
                "at most one of WARM_UP and HEAD, and SELECT as the first"
            )
        source = ScoreSource.PUBLIC if self.ranking is None else self.ranking.source
        if (source is ScoreSource.TOUCHED_ROWS) != (SELECT in self.stages):
            yield "SELECT and a ranking by a count made once, such as frequency, come together; give both or none"
        in_steps = source is ScoreSource.STEP_ROWS
        refresh = Refresh.EVERY_PERIOD if in_steps else Refresh.ONCE
        as_counted = self.refresh is refresh and (self.clock == EverySteps(1) or not in_steps)
        if source.counts_rows and not (as_counted and self.granularity is Granularity.ROWS):
            clock = " and clock=EverySteps(1)" if in_steps else ""
            yield f"it ranks by {source.value}; give granularity=Granularity.ROWS, refresh={refresh}{clock}"
        about = [entry for entry in fields(self) if entry.name in _ABOUT_SUPPORT]
        useless = [entry.name for entry in about if getattr(self, entry.name) != entry.default]
        if self.ranking is None and useless:
            yield (
                f"it trains every coordinate, so {useless} would do nothing; drop them, give ranking=..., or choose "
                "a sparse method"
            )
        if self.prune and self.off_support is OffSupport.COASTS:
            yield (
                "prune sets frozen coordinates to zero and coasting would move them again; give "
                "off_support=OffSupport.DROPPED"
            )

    @property
    def warm_up(self) -> bool:
        """Whether a dense stage comes before the main one."""
        return WARM_UP in self.stages

    @property
    def names(self) -> Names:
        """What parts of a model are called in it: in scope, always and stages."""
        heads = tuple(stage.moves.value for stage in self.stages if stage.moves is Moves.HEAD)
        return (*self.scope, *self.always, *heads)

    def changed(self, *, warm_up: bool | None = None, **changes: Any) -> Method:
        """This row with other values in some of its fields, as they are or as JSON has them; None changes nothing.

        `warm_up` puts that stage in or leaves it out. A value that would do nothing is refused.
        """
        known = [entry.name for entry in fields(self)]
        if unknown := sorted(set(changes) - set(known)):
            raise SparseDPError(f"{self.name}: got {unknown}, expected some of {[*known, 'warm_up']}")
        read = {
            name: read_field(name, value) if isinstance(value, str | list | dict) else value
            for name, value in changes.items()
            if value is not None
        }
        if warm_up is not None:
            *others, main = (stage for stage in read.get("stages", self.stages) if stage != WARM_UP)
            read["stages"] = (*others, WARM_UP, main) if warm_up else (*others, main)
        return replace(self, **read)

    def to_json(self) -> dict[str, Any]:
        """Everything that decides what it does, as JSON values; prose is left out, and so is `denoise` unless set."""
        values = {name: to_json(getattr(self, name)) for name in _JSON_FIELDS}
        if not self.denoise:
            del values["denoise"]
        return values

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> Method:
        """The row `to_json` wrote."""
        if {*values, "denoise"} != {*_JSON_FIELDS}:
            raise SparseDPError(f"method: got the fields {sorted(values)}, expected {sorted(_JSON_FIELDS)}")
        return cls(**{name: read_field(name, value) for name, value in values.items()})

    def support_rule(self) -> dict[str, Any]:
        """How the main stage chooses its support, as a plan states it."""
        if self.ranking is None:
            return {"rule": "scope", "scope": list(self.scope)} if self.scope else {"rule": "full"}
        row = self.to_json()
        names = (*_SUPPORT_RULE, *(name for name in ("scope", "always") if row[name]))
        return {"rule": row["ranking"], **{name: row[name] for name in names}}


_JSON_FIELDS = [entry.name for entry in fields(Method) if entry.compare and entry.name not in OF_THE_PLAN]


def read_field(name: str, value: Any) -> Any:
    """A field from JSON, or as typed: the name alone of a ranking or schedule, one pattern instead of a list."""
    if name == "ranking":
        return None if value is None else read_ranking(value)
    if isinstance(value, str) and name in ("schedule", "scope", "always"):
        value = {"name": value} if name == "schedule" else [value]
    return from_json(get_type_hints(Method)[name], value, name)
