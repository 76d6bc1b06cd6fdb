"""Everything a plan is made of, in one value, and the phases that follow from it. Every default stands here."""

from __future__ import annotations

import logging
import math
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any, TypedDict, Unpack, final, get_type_hints

from sparsedp import _validate as checks
from sparsedp._serialization import FrozenMap, from_json, plain_json
from sparsedp.errors import PrivacyError, PrivacyWarning, SparseDPError
from sparsedp.methods.catalog import get_method
from sparsedp.methods.method import OF_THE_PLAN, Method
from sparsedp.methods.phases import ClipNorm, draft_phases, steps_of_an_epoch
from sparsedp.privacy.accounting import plan_epsilon
from sparsedp.privacy.calibration import BudgetSplit, EqualNoise, calibrate, read_split, warn_if_large
from sparsedp.privacy.normalization import PrivateNormalisation
from sparsedp.privacy.plan import LOSS_SHARE, Plan

METHOD = "tp-topk"
EPSILON = 3.0
EPOCHS = 20
CLIP_NORM = 1.0
WARMUP_FRACTION = 0.3
SELECTION_BUDGET = 0.1
ACCOUNTANT = "pld"

_OPTIONAL = ("noise_multiplier", "private_loss")
"""Left out of the JSON form where they are None."""

logger = logging.getLogger("sparsedp")


def default_delta(units: int) -> float:
    """The largest power of ten that is at most a tenth of 1/N, and at most 1e-5.

    A delta near 1/N would allow publishing somebody's record outright.
    """
    return 10.0 ** min(-5, math.floor(-math.log10(10 * units)))


def default_batch_size(units: int) -> int:
    """The power of two nearest to 4 sqrt(N), at most N: large batches drown the noise, small ones sample less."""
    return min(units, 1 << round(math.log2(4 * math.sqrt(units))))


class PlanArgs(TypedDict, total=False):
    """What may be asked of a plan besides method and unit; None, or leaving it out, is a gap. See `PlanConfig`."""

    epsilon: float | None
    noise_multiplier: float | None
    delta: float | None
    epochs: int | None
    batch_size: int | None
    max_grad_norm: ClipNorm | None
    warmup_fraction: float | None
    selection_budget: float | None
    split: BudgetSplit | None
    accountant: str | None
    normalise: PrivateNormalisation | None
    private_loss: float | None


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class PlanConfig:
    """Everything a plan is made of, without a gap: made by `asked`, carried by the plan, in its file.

    Attributes:
        method: the row of the methods table, changes put in.
        units: the number N of privacy units, public; each is a `unit`: "row", or the name of what has several.
        epsilon: the budget, at `delta`; None where the noise is given.
        epochs: passes over the data, on average.
        batch_size: expected size of a batch.
        clip_norm: bound on each unit's gradient, as `ClipNorm` says.
        warmup_fraction: share of the steps of a stage before the main one.
        selection_budget: share of epsilon that a selection with a release of its own may cost, taken alone. Epsilons
            do not add: 0.1 costs the training about one percent of its noise.
        split: how two stages that train divide the budget; with one there is nothing to divide.
        accountant: who counts.
        normalise: centre and scale the inputs by statistics released first.
        noise_multiplier: the noise of every phase that trains, over the clip norm, instead of a budget.
        private_loss: the bound on an example's loss, for a training loss that is released every epoch; None for none.
    """

    method: Method
    units: int
    unit: str
    epsilon: float | None
    delta: float
    epochs: int
    batch_size: int
    clip_norm: ClipNorm
    warmup_fraction: float
    selection_budget: float
    split: BudgetSplit
    accountant: str
    normalise: PrivateNormalisation | None
    noise_multiplier: float | None = None
    private_loss: float | None = None

    def __post_init__(self) -> None:
        if self.private_loss is not None:
            checks.number(self.private_loss, "private_loss", above=0.0)
        if self.noise_multiplier is not None:
            self._check_noise(self.noise_multiplier)
        budgeted = self.epsilon is not None or self.noise_multiplier is not None
        if not budgeted or self.delta is None:
            raise PrivacyError(
                f"{self.method.name}: got epsilon={self.epsilon} and delta={self.delta}, expected a number for each"
            )
        if not 0 < checks.number(self.selection_budget, "selection_budget") < 1:
            raise PrivacyError(f"selection_budget: got {self.selection_budget}, expected a share in (0, 1)")
        if Method.from_json(self.method.to_json()) != self.method:
            raise SparseDPError(
                f"{self.method.name}: a piece of it has the name of another; give your ranking a name of its own, "
                "and make it known by register_ranking"
            )

    def _check_noise(self, noise: float) -> None:
        checks.number(noise, "noise_multiplier", above=0.0)
        if self.epsilon is not None:
            raise PrivacyError(
                f"got epsilon={self.epsilon} and noise_multiplier={noise}, expected one of them: the noise is found "
                "for a budget, or the budget follows from the noise"
            )
        if not all(stage.trains for stage in self.method.stages) or self.split != EqualNoise():
            raise PrivacyError(
                f"noise_multiplier: {self.method.name} shares a budget between phases (a selection of its own, or "
                "another split than equal noise), whose noise follows from epsilon; give epsilon instead"
            )

    @classmethod
    def asked(
        cls, method: Method | str = METHOD, *, units: int, unit_name: str = "row", **asked: Unpack[PlanArgs]
    ) -> PlanConfig:
        """What a user asks for, with the gaps filled from public numbers."""
        row = get_method(method) if isinstance(method, str) else method
        values: dict[str, Any] = {
            "epsilon": EPSILON if asked.get("noise_multiplier") is None else None,
            "epochs": EPOCHS,
            "max_grad_norm": CLIP_NORM,
            "warmup_fraction": WARMUP_FRACTION,
            "selection_budget": SELECTION_BUDGET,
            "split": EqualNoise(),
            "accountant": ACCOUNTANT,
            "normalise": None,
        }
        for given in ({name: getattr(row, name) for name in OF_THE_PLAN}, asked):
            values |= {name: value for name, value in given.items() if value is not None}
        if "batch_size" not in values:
            values["batch_size"] = default_batch_size(units)
        if "delta" not in values:
            values["delta"] = default_delta(units)
            logger.info(
                "delta was not given: it is %g, safe for %d units (%s)", values["delta"], units, unit_name
            )
        if asked.get("private_loss") is not None:
            logger.info(
                "private_loss: the last step of an epoch gives %.0f %% of its precision to the loss; its gradient's "
                "noise is %.1f %% larger, epsilon the same",
                100 * LOSS_SHARE,
                100 / math.sqrt(1 - LOSS_SHARE) - 100,
            )
        norm = values.pop("max_grad_norm")
        row = replace(row, warmup_fraction=None, selection_budget=None, split=None)
        values["clip_norm"] = tuple(norm.items()) if isinstance(norm, Mapping) else norm
        return cls(method=row, units=units, unit=unit_name, **values)

    def draft(self) -> Plan:
        """The plan before its noise is known.

        The sampling rate is `batch_size/units` exactly; an epoch is `units/batch_size` steps, to the nearest whole
        number and at least 1 (halves go up).
        """
        steps_per_epoch = steps_of_an_epoch(self.units, self.batch_size, self.epochs)
        phases = draft_phases(
            self.method,
            total=self.epochs * steps_per_epoch,
            sampling_rate=self.batch_size / self.units,
            clip_norm=self.clip_norm,
            warmup_fraction=self.warmup_fraction,
            loss_bound=self.private_loss or 0.0,
        )
        return Plan(
            method=self.method.name,
            phases=phases if self.normalise is None else (self.normalise.phase(), *phases),
            units=self.units,
            steps_per_epoch=steps_per_epoch,
            unit=self.unit,
            delta=self.delta,
            spec=FrozenMap(self.to_json()),
        )

    def plan(self) -> Plan:
        """The plan, its noise calibrated to `epsilon` at `delta`; or with the noise given, and the epsilon it costs.

        Formal guarantees: Never more than `epsilon`. Whatever the method, the cost is that of steps, rates and noise:
        support, geometry and ratio are post-processing.
        """
        draft, epsilon = self.draft(), self.epsilon
        if epsilon is None:
            return self._with_noise(draft)
        split = self.split if len(draft.training) > 1 else EqualNoise()
        share = self.selection_budget * epsilon
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", PrivacyWarning)  # the whole plan warns
            alone = [
                calibrate(replace(draft, phases=(phase,)), share, self.delta, self.accountant)
                for phase in draft.phases
                if not phase.trains and phase.noise_multiplier == 0
            ]
        found = {plan.phases[0].name: plan.phases[0].noise_multiplier for plan in alone}
        return calibrate(draft.with_noise(found), epsilon, self.delta, self.accountant, split)

    def _with_noise(self, draft: Plan) -> Plan:
        """The plan with the noise given in every phase that has none yet; its target is what that costs."""
        noise = self.noise_multiplier or 0.0
        missing = {phase.name: noise for phase in draft.phases if phase.noise_multiplier == 0}
        filled = draft.with_noise(missing)
        warn_if_large(self.delta, filled)
        cost = plan_epsilon(filled, self.accountant, self.delta)
        if not math.isfinite(cost):
            raise PrivacyError(
                f"noise_multiplier: got {noise}, so little that the {self.accountant} accountant finds no finite "
                "epsilon; give more noise"
            )
        return replace(filled, target_epsilon=cost, accountant=self.accountant)

    def check(self, plan: Plan) -> None:
        """Refuse a plan that is not the one asked for, but for noise, target and what it continues."""
        drafted = self.draft()
        for name in ("method", "units", "unit", "steps_per_epoch", "phases"):
            got, expected = getattr(plan, name), getattr(drafted, name)
            if name == "phases":
                got, expected = (
                    [replace(one, noise_multiplier=0.0) for one in phases] for phases in (got, expected)
                )
            if got != expected:
                raise PrivacyError(
                    f"the plan says {name} {got!r}, and what it was made from {expected!r}: it was changed "
                    "afterwards. Make it again"
                )

    def to_json(self) -> dict[str, Any]:
        """JSON values; `from_json` gives back an equal one."""
        values = {entry.name: getattr(self, entry.name) for entry in fields(self)}
        for name in ("method", "split", "normalise"):
            values[name] = None if values[name] is None else values[name].to_json()
        for name in _OPTIONAL:
            if values[name] is None:
                del values[name]
        return {**values, "clip_norm": plain_json(self.clip_norm)}

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> PlanConfig:
        """What `to_json` gave."""
        known = {entry.name for entry in fields(cls)}
        if {*values, *_OPTIONAL} != known:
            raise SparseDPError(f"what a plan was made from: got {sorted(values)}, expected {sorted(known)}")
        read, hints = dict(values), get_type_hints(cls)
        for name, value in values.items():
            match name:
                case "method":
                    read[name] = Method.from_json(value)
                case "split":
                    read[name] = read_split(value)
                case "normalise" if value is not None:
                    read[name] = PrivateNormalisation.from_json(value)
                case _:
                    read[name] = from_json(hints[name], value, name)
        return cls(**read)

    @classmethod
    def of(cls, plan: Plan) -> PlanConfig:
        """What a plan was made from; one that was put together by hand does not say, and is refused."""
        if plan.spec is None:
            raise PrivacyError(
                f"the plan for {plan.method!r} does not say what it was made from: it was put together by hand. "
                "Make it with sparsedp.plan"
            )
        return cls.from_json(plan.spec.plain())


def plan(
    method: Method | str = METHOD, *, units: int, unit_name: str = "row", **asked: Unpack[PlanArgs]
) -> Plan:
    """A calibrated plan; what is not given is filled in as `fit` does.

    >>> plan("dp-sgd", units=1000, noise_multiplier=1.0, delta=1e-5, epochs=1, batch_size=99).target_epsilon < 3
    True

    Args:
        method: a name, or a `Method` from `get_method(name, **changes)`.
        units: the number N of privacy units; public.
        unit_name: what a unit is called.
        asked: epsilon or noise_multiplier, delta, epochs, batch_size, max_grad_norm, accountant, normalise,
            private_loss, and what a method with two phases takes: warmup_fraction, selection_budget, split.
    """
    return PlanConfig.asked(method, units=units, unit_name=unit_name, **asked).plan()


build_plan = plan
"""`sparsedp.plan`, where a plan is called plan."""
