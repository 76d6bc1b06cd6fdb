"""The plan: everything about a run that costs privacy, fixed before it starts."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, NamedTuple, final

from sparsedp import _validate as checks
from sparsedp._files import parse_json
from sparsedp._serialization import FrozenMap, canonical, from_json, sha256, to_json
from sparsedp.errors import PrivacyError

if TYPE_CHECKING:
    from sparsedp.clipping import Clip

FLAT, AUTO = "flat", "auto"
"""How a unit's gradient is clipped, beside norms by group: to one norm, or to nearly that norm always."""

LOSS_SHARE = 0.04
"""Share of a step's precision for the loss it releases: that has five times the step's noise, over its own bound."""


@final
@dataclass(frozen=True, slots=True)
class Phase:
    """Some consecutive steps of one mechanism.

    Attributes:
        name: unique in its plan; charges carry it.
        sampling_rate: Poisson probability q of each unit in each step; 1 is a plain Gaussian release.
        clip_norm: L2 bound on a unit's contribution.
        noise_multiplier: noise standard deviation over `clip_norm`; 0 until it is calibrated.
        support: the method's support rule, as JSON, e.g. {"rule": "top-k", "ratio": 0.2}.
        geometry: name of the space gradients are clipped in.
        trains: False for a preliminary release (feature statistics), which counts in no epoch.
        count_share: share of a step's precision (noise_multiplier^-2) for a count of the rows it touches.
        clipping: "flat"; "auto" (AUTO-S: every contribution has nearly the norm `clip_norm`); or pairs of a pattern
            of parameter names and the norm of that group, with `clip_norm` the root of their squares.
        loss_bound: what an example's loss counts for at most in the loss that an epoch's last step releases as well,
            for `LOSS_SHARE` of its precision; 0 where none is released.
    """

    name: str
    steps: int
    sampling_rate: float
    clip_norm: float
    noise_multiplier: float = 0.0
    support: FrozenMap = field(default_factory=lambda: FrozenMap({"rule": "full"}))
    geometry: str = "identity"
    trains: bool = True
    count_share: float = 0.0
    clipping: str | tuple[tuple[str, float], ...] = FLAT
    loss_bound: float = 0.0

    def __post_init__(self) -> None:
        where = f"phase {self.name!r}"
        checks.text(self.name, "phase name")
        checks.text(self.geometry, f"{where}: geometry")
        set_fields(
            self,
            steps=checks.whole(self.steps, f"{where}: steps", at_least=1),
            sampling_rate=checks.probability(self.sampling_rate, f"{where}: sampling_rate"),
            clip_norm=checks.number(self.clip_norm, f"{where}: clip_norm", above=0.0),
            noise_multiplier=checks.number(self.noise_multiplier, f"{where}: noise_multiplier", at_least=0.0),
            support=FrozenMap(self.support),
            count_share=checks.number(self.count_share, f"{where}: count_share", at_least=0.0),
            loss_bound=checks.number(self.loss_bound, f"{where}: loss_bound", at_least=0.0),
        )
        if self.clipping not in (FLAT, AUTO):
            self._check_groups(where)
        if self.clipping != FLAT and self.geometry != "identity":
            raise PrivacyError(
                f"{where}: gradients are clipped in the space {self.geometry!r}, which takes one number; got "
                f"max_grad_norm={self.clipping!r}. Give a number, or a method that clips gradients as they are"
            )
        if self.count_share >= 1:
            raise PrivacyError(f"{where}: count_share is {self.count_share}, expected a share below 1")
        if self.loss_bound and (self.count_share or not self.trains):
            raise PrivacyError(
                f"private_loss: the steps of {where} count rows or do not train, and have no precision "
                "left for a loss; evaluate on held-out data, or take another method"
            )

    def _check_groups(self, where: str) -> None:
        if isinstance(self.clipping, str):
            raise PrivacyError(
                f"{where}: clipping is {self.clipping!r}, expected {FLAT!r}, {AUTO!r} or pairs"
            )
        pairs = tuple(
            (checks.text(pattern, f"{where}: pattern"), checks.number(norm, f"{where}: clip_norm", above=0.0))
            for pattern, norm in self.clipping
        )
        set_fields(self, clipping=pairs)
        if not math.isclose(self.clip_norm, math.hypot(*(norm for _, norm in pairs))):
            raise PrivacyError(
                f"{where}: clip_norm is {self.clip_norm}, expected the root of the squares of {pairs}"
            )

    @property
    def clip(self) -> Clip:
        """What bounds a unit's contribution."""
        from sparsedp.clipping import AutomaticClip, FlatClip, LayerClip  # torch, which planning does without

        if isinstance(self.clipping, tuple):
            return LayerClip(self.clipping)
        return AutomaticClip(self.clip_norm) if self.clipping == AUTO else FlatClip(self.clip_norm)

    @property
    def gradient_noise(self) -> float:
        """The gradient's own noise multiplier, in a step that may count rows as well."""
        return self.noise_multiplier / math.sqrt(1 - self.count_share)

    @property
    def count_noise(self) -> float:
        """The noise multiplier of the count of rows, in a phase that makes one in every step."""
        return self.noise_multiplier / math.sqrt(self.count_share)

    @property
    def loss_noises(self) -> tuple[float, float]:
        """The noise multipliers of loss and gradient in a step that releases both: together they cost the step's."""
        whole = self.noise_multiplier
        return whole / math.sqrt(LOSS_SHARE), whole / math.sqrt(1 - LOSS_SHARE)


@final
@dataclass(frozen=True, slots=True)
class PriorSpending:
    """What earlier runs on the same units spent, and the cap over all of them; made by `RdpFilter.calibrate`.

    Attributes:
        order: the filter's fixed Renyi order, of which the earlier runs `spent`.
        ledgers: heads of the earlier runs' ledgers; none for a first run, which declares cap and order.
        run: names the run that the plan is for, so that no other counts on the same remainder; empty for any.
    """

    order: float
    spent: float
    ledgers: tuple[str, ...]
    run: str = ""

    def __post_init__(self) -> None:
        checks.number(self.order, "continuation: order", above=1.0)
        checks.number(self.spent, "continuation: spent", at_least=0.0)
        set_fields(self, ledgers=tuple(checks.text(head, "continuation: ledger") for head in self.ledgers))


def set_fields(item: object, **values: object) -> None:
    """Put checked and converted values into a frozen dataclass, as it is made."""
    for name, value in values.items():
        object.__setattr__(item, name, value)


class SampledGaussian(NamedTuple):
    """`steps` releases of one mechanism, under adding or removing one unit; noise 0 is no protection at all."""

    sampling_rate: float
    noise_multiplier: float
    steps: int


def normalize_events(events: Iterable[SampledGaussian]) -> tuple[SampledGaussian, ...]:
    """Events as accountants count them: one without noise makes all non-private, one that samples nobody is free."""
    known = tuple(
        SampledGaussian(float(rate), float(noise), steps) for rate, noise, steps in events if rate > 0
    )
    return known if is_private(known) else (SampledGaussian(1.0, 0.0, 1),)


def merge_events(events: Iterable[SampledGaussian]) -> tuple[SampledGaussian, ...]:
    """Equal mechanisms added up: composition does not depend on the order."""
    steps: dict[tuple[float, float], int] = {}
    for rate, noise, count in events:
        steps[rate, noise] = steps.get((rate, noise), 0) + count
    return tuple(SampledGaussian(rate, noise, count) for (rate, noise), count in steps.items() if count)


def slice_events(events: Iterable[SampledGaussian], start: int, stop: int) -> tuple[SampledGaussian, ...]:
    """The events of the steps start..stop-1."""
    parts, first = [], 0
    for rate, noise, count in events:
        overlap = min(first + count, stop) - max(first, start)
        if overlap > 0:
            parts.append(SampledGaussian(rate, noise, overlap))
        first += count
    return tuple(parts)


def dp_event(events: Iterable[SampledGaussian]) -> Any:
    """Convert events to one of `dp_accounting`: a self-composed, Poisson-sampled Gaussian each."""
    import dp_accounting as dp

    known = tuple(events)
    if not is_private(known):
        return dp.NonPrivateDpEvent()
    sampled = [dp.PoissonSampledDpEvent(rate, dp.GaussianDpEvent(noise)) for rate, noise, _ in known]
    parts = [dp.SelfComposedDpEvent(one, event.steps) for one, event in zip(sampled, known, strict=True)]
    return dp.ComposedDpEvent(parts) if parts else dp.NoOpDpEvent()


def is_private(events: Sequence[SampledGaussian]) -> bool:
    """Whether every mechanism adds noise."""
    return all(event.noise_multiplier > 0 for event in events)


FILTER = "rdp-filter"
"""The accountant of plans that continue earlier runs."""
FORMAT = 2
"""Version of the JSON form; others are refused."""
_USUAL = (("count_share", 0.0), ("clipping", FLAT), ("loss_bound", 0.0))


@final
@dataclass(frozen=True, slots=True)
class Plan:
    """Phases of a method, in order, and what they protect. Sampler, mechanism, ledger and accountant all read it.

    Attributes:
        units: the number N of privacy units; public.
        unit: what a unit is: "row", or the name of the column that identifies it.
        delta: of the guarantee; None only for plans without a target.
        target_epsilon: what the noise was calibrated to; None when it was not.
        accountant: what it was calibrated with; set exactly when `target_epsilon` is.
        continuation: set when the plan continues earlier runs: target and delta then cap the total.
        spec: what it was made from, as JSON, the method's row included; read by `methods.PlanConfig`.
    """

    method: str
    phases: tuple[Phase, ...]
    units: int
    steps_per_epoch: int
    unit: str = "row"
    delta: float | None = None
    target_epsilon: float | None = None
    accountant: str | None = None
    continuation: PriorSpending | None = None
    spec: FrozenMap | None = None

    def __post_init__(self) -> None:
        checks.text(self.method, "method")
        checks.text(self.unit, "unit")
        names = [phase.name for phase in self.phases]
        if not names or len(set(names)) != len(names):
            raise PrivacyError(
                f"phases: got the names {names}, expected at least one phase and no name twice"
            )
        target, delta = self.target_epsilon, self.delta
        set_fields(
            self,
            phases=tuple(self.phases),
            units=checks.whole(self.units, "units", at_least=1),
            steps_per_epoch=checks.whole(self.steps_per_epoch, "steps_per_epoch", at_least=1),
            delta=None if delta is None else checks.delta_in_range(delta),
            target_epsilon=None if target is None else checks.positive_epsilon(target),
            spec=None if self.spec is None else FrozenMap(self.spec),
        )
        if (target is None) != (self.accountant is None):
            raise PrivacyError("target_epsilon and accountant come together; calibrate sets both")
        if (self.accountant == FILTER) != (self.continuation is not None):
            raise PrivacyError(
                f"the accountant {FILTER} and a continuation come together; RdpFilter sets both"
            )
        if target is not None:
            checks.text(self.accountant, "accountant")
            if delta is None or not self.is_calibrated:
                raise PrivacyError("a plan with a target_epsilon needs a delta, and noise in every phase")

    @property
    def total_steps(self) -> int:
        """All releases of all phases."""
        return sum(phase.steps for phase in self.phases)

    @property
    def training(self) -> tuple[Phase, ...]:
        """The phases that train, in order."""
        return tuple(phase for phase in self.phases if phase.trains)

    @property
    def training_steps(self) -> int:
        """Releases of the phases that train."""
        return sum(phase.steps for phase in self.training)

    @property
    def is_calibrated(self) -> bool:
        """Whether every phase has its noise."""
        return all(phase.noise_multiplier > 0 for phase in self.phases)

    def check_calibrated(self) -> None:
        """Refuse a plan that no guarantee follows from."""
        noiseless = [phase.name for phase in self.phases if not phase.noise_multiplier]
        if noiseless or self.delta is None:
            raise PrivacyError(
                f"plan: got delta={self.delta} and no noise in {noiseless}, expected a delta and noise in each; "
                "make it by sparsedp.plan, or calibrate it"
            )

    def preliminary(self, name: str) -> Phase | None:
        """The release before training of that name, if the plan has it."""
        return next((phase for phase in self.phases if phase.name == name and not phase.trains), None)

    def phase_at(self, step: int) -> Phase:
        """The phase a step (counted from 0 over the whole plan) belongs to."""
        end = 0
        for phase in self.phases:
            end += phase.steps
            if 0 <= step < end:
                return phase
        raise PrivacyError(
            f"step {step} is outside the plan's 0..{self.total_steps - 1}; a new plan costs extra"
        )

    def first_step(self, name: str) -> int:
        """The step a phase starts at."""
        place = [phase.name for phase in self.phases].index(name)
        return sum(phase.steps for phase in self.phases[:place])

    def expected_batch_size(self, phase: Phase) -> float:
        """q*N: the public number sums are divided by."""
        return phase.sampling_rate * self.units

    def epoch_ends(self) -> tuple[int, ...]:
        """How many steps of the plan are done at the end of each epoch; the last may be short."""
        trained, ends, done = 0, [], 0
        for phase in self.phases:
            if phase.trains:
                first = self.steps_per_epoch - trained % self.steps_per_epoch
                ends += [done + step for step in range(first, phase.steps + 1, self.steps_per_epoch)]
                trained += phase.steps
            done += phase.steps
        return tuple(ends) if ends and ends[-1] == done else (*ends, done)

    def releases_loss(self, step: int) -> bool:
        """Whether a step shares its precision with a loss: the last of each epoch, if one was asked for."""
        return bool(self.phase_at(step).loss_bound) and step + 1 in self.epoch_ends()

    def events(self, steps: int | None = None) -> tuple[SampledGaussian, ...]:
        """What the plan, or its first `steps` steps, releases."""
        left = self.total_steps if steps is None else steps
        if not 0 <= left <= self.total_steps:
            raise PrivacyError(f"steps: got {steps}, expected 0..{self.total_steps}")
        whole = [SampledGaussian(p.sampling_rate, p.noise_multiplier, p.steps) for p in self.phases]
        return slice_events(whole, 0, left)

    def with_noise(self, noise: Mapping[str, float]) -> Plan:
        """The same plan with the named phases' noise multipliers replaced, and no target."""
        if unknown := set(noise) - {phase.name for phase in self.phases}:
            raise PrivacyError(f"no phase {sorted(unknown)} in this plan")
        phases = (replace(p, noise_multiplier=noise.get(p.name, p.noise_multiplier)) for p in self.phases)
        return replace(self, phases=tuple(phases), target_epsilon=None, accountant=None, continuation=None)

    def to_json(self) -> str:
        """Canonical JSON, which leaves out what a phase usually has; `from_json` gives back an equal plan."""
        values = to_json(self)
        values["phases"] = [
            {name: value for name, value in phase.items() if (name, value) not in _USUAL}
            for phase in values["phases"]
        ]
        return canonical({**values, "format": FORMAT})

    @classmethod
    def from_json(cls, text: str) -> Plan:
        """The plan a JSON text describes."""
        value = parse_json(text, "the plan")
        found = value.get("format") if isinstance(value, dict) else type(value).__name__
        if found != FORMAT or isinstance(found, bool):
            raise PrivacyError(
                f"plan format: got {found!r}, expected {FORMAT}; plans of other formats are not read, make it again"
            )
        return from_json(cls, {name: part for name, part in value.items() if name != "format"}, "plan")

    @property
    def fingerprint(self) -> str:
        """SHA-256 of the canonical JSON."""
        return sha256(self.to_json())
