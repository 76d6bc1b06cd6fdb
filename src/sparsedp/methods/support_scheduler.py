"""The support scheduler: each step's support and geometry, from released values and public randomness."""

from __future__ import annotations

import logging
from bisect import bisect_right
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, final

import torch
from torch import Tensor

from sparsedp._validate import exact_ratio
from sparsedp.clipping import Geometry, Identity, Standardized
from sparsedp.errors import SparseDPError
from sparsedp.methods.empirical_bayes import EmpiricalBayes, Shrinkage
from sparsedp.methods.method import GeometryRule, Method, Moves, OffSupport, Stage, Statistics
from sparsedp.methods.plan_config import PlanConfig
from sparsedp.methods.public_scores import Knowledge
from sparsedp.methods.ranking import HEAD, Order, Parts, TableRows, find, size_of
from sparsedp.methods.schedules import Refresh, active_count
from sparsedp.methods.scores import Given, NoisyGradient, RankingContext, RankingState, ScoreSource, observe
from sparsedp.methods.warmup import WarmupWatch, under
from sparsedp.parameters import ParameterLayout, Support
from sparsedp.privacy.mechanism import Release
from sparsedp.privacy.plan import Phase, Plan
from sparsedp.randomness import PublicRandomness


@dataclass(frozen=True, slots=True)
class SupportChange:
    """How the support differs from the step before, and what becomes of what left.

    `prune` sets the coordinates that left to zero, `shrinkage` puts the posterior mean in the place of weights, now.
    """

    before: Support
    after: Support
    off_support: OffSupport
    prune: bool
    shrinkage: Shrinkage | None = None

    @property
    def left(self) -> Support:
        """Coordinates that were active and are frozen from now on."""
        return self.before.without(self.after)

    @property
    def entered(self) -> Support:
        """Coordinates that were frozen and are active from now on."""
        return self.after.without(self.before)


@dataclass(frozen=True, slots=True)
class StepSetting:
    """Everything public that shapes one step's release. Fixed for the whole logical step."""

    support: Support
    geometry: Geometry
    per_sample_top: float | None
    change: SupportChange | None


@dataclass(frozen=True, slots=True, eq=False)
class SchedulerState:
    """The controller between two steps: named tensors and JSON values."""

    tensors: Mapping[str, Tensor]
    values: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Timeline:
    """Training begins at step `first`, its main phase has the steps `main_start .. stop - 1`.

    What lies between is the stage before the main one. `main_noise_std` is the noise `nu` on each coordinate of the
    main phase's mean gradient, before any geometry.
    """

    first: int
    main_start: int
    stop: int
    steps_per_epoch: int
    main_noise_std: float


def noise_on_mean(plan: Plan, phase: Phase) -> float:
    """`nu`: standard deviation of the noise on each coordinate of the phase's released mean."""
    return phase.gradient_noise * phase.clip_norm / plan.expected_batch_size(phase)


logger = logging.getLogger("sparsedp")

_NOT_BEGUN, _BEFORE_MAIN = -2, -1
WARMUP = "warmup."
"""How the names of the warm-up's statistics begin in a saved state."""
FROZEN_NOISE = 2
"""First number of the key of the public noise on frozen coordinates; granularity uses 0 and 1."""


@final
class SupportScheduler:
    """Runs the method of a plan: `begin_step(step)` before each release, `update(released)` after it.

    Steps come in order; a resumed run may leave some out (they were paid for and lost).

    Formal guarantees: It holds public state only and is fed `Release` values and public randomness keyed by step and
    period, so whatever it decides is post-processing, and a replay decides the same.
    """

    def __init__(
        self, plan: Plan, layout: ParameterLayout, public: PublicRandomness, known: Knowledge | None = None
    ) -> None:
        self._method = PlanConfig.of(plan).method
        self._layout = layout
        self._public = public
        self._known = known or Knowledge()
        self._plan = plan
        main = plan.training[-1]
        start, per_epoch = plan.first_step(main.name), plan.steps_per_epoch
        first, stop = plan.first_step(plan.training[0].name), start + main.steps
        self._timeline = Timeline(first, start, stop, per_epoch, noise_on_mean(plan, main))
        self._starts = self._method.clock.starts(main.steps, per_epoch)
        self._parts = Parts.of(layout, self._method.scope, self._method.always)
        if HEAD in self._method.names:
            logger.info('"head" means %s', [slot.name for slot in find(layout, (HEAD,), "scope")])
            self._parts.head_support()  # refuses an empty one before anything is charged
        self._ranking = self._method.ranking
        self._source = ScoreSource.PUBLIC if self._ranking is None else self._ranking.source
        if self._source.counts_rows:
            self._parts.check_tables(self._method.name)
        if isinstance(self._ranking, Given):
            self._ranking.check(self._known)
        self._begin()
        for period in range(len(self._starts)):
            self._count(period)  # refuses at once a schedule that would leave nothing to train

    def _begin(self) -> None:
        d = self._layout.dimension
        self._next_step = self._timeline.first
        self._period = _NOT_BEGUN
        self._awaited: int | None = None
        self._pruned = False
        self._counted_step = -1
        self._support = Support.full(d)
        self._order: Order | None = None
        self._last_scores: Tensor | None = None
        self._scored_steps = 0
        self._score_state: RankingState = self._ranking.init(d) if self._ranking else {}
        self._statistics: Statistics | None = None
        self._watch = WarmupWatch(self._plan, d)
        self._decisions: list[Mapping[str, Any]] = []
        self._start: Tensor | None = None
        if self._method.denoise:
            weights = self._known.weights
            self._start = torch.zeros(d) if weights is None else weights().detach().to("cpu").clone()

    @property
    def method(self) -> Method:
        """The plan's method."""
        return self._method

    @property
    def support(self) -> Support:
        """The support of the step last set; all coordinates before the first."""
        return self._support

    @property
    def tables(self) -> TableRows | None:
        """The rows that a release of the ranking's own counts, if the method has one."""
        return TableRows(self._parts.ranked) if self._source.counts_rows else None

    def scores(self) -> Tensor | None:
        """The scores the present ranking was made from; None before a ranking and for random ones."""
        return None if self._last_scores is None else self._last_scores.clone()

    def begin_step(self, step: int) -> StepSetting:
        """Settle the support, geometry and top-r of a step; called once per step, in order, before its release."""
        if self._awaited is not None:
            raise SparseDPError(f"step {self._awaited} has not been observed; call update(released) first")
        if not self._next_step <= step < self._timeline.stop:
            raise SparseDPError(
                f"step: got {step}, expected {self._next_step} to {self._timeline.stop - 1}; "
                "steps come in order and each is set once"
            )
        within = step - self._timeline.main_start
        period = bisect_right(self._starts, within) - 1 if within >= 0 else _BEFORE_MAIN
        if self._source is ScoreSource.STEP_ROWS and self._parts.ranked and self._counted_step != step:
            raise SparseDPError(f"step {step}: its rows have not been counted; call observe_counts first")
        change = self._enter(period) if period != self._period else None
        self._next_step, self._awaited = step + 1, step
        main = period > _BEFORE_MAIN
        top = self._method.per_sample_top if main else None
        return StepSetting(self._support, self._geometry(main), top, change)

    def update(self, released: Release) -> None:
        """Update scores and geometry statistics with the release of the step last set."""
        if released.step != self._awaited or released.support != self._support:
            raise SparseDPError(
                f"update: got {released}, expected step {self._awaited} on {self._support}; "
                "call begin_step(step), release on its support, then update"
            )
        self._awaited = None
        ranks_again = self._order is None or self._method.refresh is Refresh.EVERY_PERIOD
        if self._ranking and self._source is ScoreSource.GRADIENTS and ranks_again and self._stage.observes:
            seen = self._observation(released)
            self._score_state = self._ranking.update(self._score_state, seen)
            self._scored_steps += 1
        if self._statistics is not None:
            self._statistics = self._statistics.updated(released, self._method.decays)
        self._watch.observe(released)

    def observe_counts(self, released: Release) -> None:
        """Learn from the count of a selection, which comes first, or of a step's rows, before its `begin_step`."""
        if self._ranking is None or self.tables is None or released.mean.shape != (self.tables.total,):
            raise SparseDPError(
                f"got {released}, expected a count for each row of a table, of a method that ranks them"
            )
        self._score_state = self._ranking.update(self._score_state, observe(released))
        self._scored_steps += 1
        self._counted_step = released.step

    def state(self) -> SchedulerState:
        """All that is needed to go on exactly from here, between two steps; not to be written to."""
        if self._awaited is not None:
            raise SparseDPError(
                f"step {self._awaited} has not been observed; take the state between two steps"
            )
        tensors = {
            "support": self._support.indices,
            **{f"score.{name}": value.clone() for name, value in self._score_state.items()},
            **{f"{WARMUP}{name}": value for name, value in self._watch.state().items()},
        }
        values: dict[str, Any] = {
            **self._identity(),
            "next_step": self._next_step,
            "period": self._period,
            "scored_steps": self._scored_steps,
            "pruned": self._pruned,
        }
        if isinstance(self._ranking, EmpiricalBayes):
            values["decisions"] = self._decisions
        if self._start is not None:
            tensors["start"] = self._start
        if self._statistics is not None:
            tensors |= {"alpha": self._statistics.alpha.clone(), "beta": self._statistics.beta.clone()}
        if self._order is not None:
            tensors["order"] = self._order.items
            values["order_of_rows"] = self._order.rows is not None
        if self._last_scores is not None:
            tensors["scores"] = self._last_scores
        return SchedulerState(tensors, values)

    def restore(self, state: SchedulerState) -> None:
        """Go on from a state taken by a controller of the same method, layout, plan and public seed."""
        for name, expected in self._identity().items():
            if (found := state.values.get(name)) != expected:
                raise SparseDPError(
                    f"the saved state differs in {name}: got {found}, expected {expected}; resume with the "
                    "method and seed it was saved with"
                )
        tensors, values = state.tensors, state.values
        self._begin()
        self._next_step, self._period = values["next_step"], values["period"]
        self._scored_steps, self._pruned = values["scored_steps"], values["pruned"]
        self._support = Support(tensors["support"], self._layout.dimension)
        if "alpha" in tensors:
            self._statistics = Statistics(self._support, tensors["alpha"].clone(), tensors["beta"].clone())
        self._score_state = under(tensors, "score.")
        self._watch.restore(under(tensors, WARMUP))
        self._start = tensors["start"].clone() if "start" in tensors else None
        self._decisions = list(values.get("decisions", ()))
        rows = TableRows(self._parts.ranked) if values.get("order_of_rows") else None
        self._order = Order(tensors["order"].clone(), rows) if "order" in tensors else None
        self._last_scores = tensors["scores"].clone() if "scores" in tensors else None

    def _identity(self) -> dict[str, Any]:
        return {
            "method": self._method.to_json(),
            "timeline": asdict(self._timeline),
            "dimension": self._layout.dimension,
            "public_seed": self._public.seed,
        }

    @property
    def _stage(self) -> Stage:
        return self._method.stages[-1 if self._period > _BEFORE_MAIN else -2]

    def _enter(self, period: int) -> SupportChange | None:
        """Begin a period: rank if it is time, take the first k of the order."""
        self._period = period
        main = period > _BEFORE_MAIN
        if main and (self._order is None or self._method.refresh is Refresh.EVERY_PERIOD):
            self._rank(period)
        if main and self._order is not None:
            after = self._parts.support_with(self._order.first(self._count(period)))
        elif self._stage.moves is Moves.HEAD:
            after = self._parts.head_support()
        else:
            after = self._parts.all_support()
        if after == self._support:
            return None
        prune = main and self._method.prune and not self._pruned
        change = SupportChange(self._support, after, self._method.off_support, prune, self._shrinkage())
        self._pruned = self._pruned or prune
        self._support = after
        return change

    def _rank(self, period: int) -> None:
        """A new order of the coordinates; the old one stays when nothing was scored since."""
        ranking = self._ranking
        if ranking is None or (self._source is not ScoreSource.PUBLIC and not self._scored_steps):
            return
        left = self._timeline.stop - self._timeline.main_start - self._starts[period]
        place = RankingContext(self._parts, self._method.granularity, self._public, period, self._known, left)
        self._last_scores = ranking.scores(self._score_state)
        self._order = ranking.order(self._score_state, place)
        if isinstance(ranking, EmpiricalBayes):
            decision = ranking.decision(self._score_state, place)
            logger.info("%s keeps %s", self._method.name, decision.reason)
            self._decisions = [*self._decisions, {"step": self._next_step, **decision.to_json()}]
        again = self._method.refresh is Refresh.EVERY_PERIOD
        if not isinstance(ranking, EmpiricalBayes):  # its sums go on
            self._score_state = ranking.init(self._layout.dimension) if again else {}
        self._scored_steps = 0
        if not again:
            periods = range(period, len(self._starts))
            self._order = self._order.prefix(max(self._count(later) for later in periods))

    def _shrinkage(self) -> Shrinkage | None:
        ranking, state = self._ranking, self._score_state
        if self._start is None or not isinstance(ranking, EmpiricalBayes) or not state["steps"]:
            return None
        return Shrinkage(self._start, ranking.factors(state))

    def _count(self, period: int) -> int:
        """The scheduled number of active coordinates among those that are ranked."""
        ranked = size_of(self._parts.ranked)
        if ranked == 0:
            return 0
        target = exact_ratio(self._method.active_ratio)
        return active_count(self._method.schedule.ratio(period, len(self._starts), target), ranked)

    def _geometry(self, main: bool) -> Geometry:
        rule, support = self._method.geometry, self._support
        if main and rule is GeometryRule.STANDARDIZED:
            known = self._statistics or Statistics.fresh(support)
            self._statistics = known.moved_to(support)
            return self._statistics.geometry(self._method.decays)
        if main and rule is GeometryRule.SCALED and 0 < support.size < support.dimension:
            scale = support.active_ratio**0.5
            scales = torch.full((support.size,), scale, dtype=torch.float64)
            return Standardized(torch.zeros_like(scales), scales, gain=1 / scale)
        return Identity()

    def _observation(self, released: Release) -> NoisyGradient:
        if released.support.is_full or isinstance(self._ranking, EmpiricalBayes):
            return observe(released)
        noise = self._public.normal(self._layout.dimension, (FROZEN_NOISE, released.step))
        return observe(released, noise, self._timeline.main_noise_std)
