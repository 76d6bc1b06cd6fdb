"""The plan: everything about a run that costs privacy, fixed before it starts."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import final

from sparsedp.errors import PrivacyError
from sparsedp.privacy import checks
from sparsedp.privacy.canonical import FrozenMap, canonical, sha256
from sparsedp.privacy.events import Spend
from sparsedp.privacy.phase import Continuation, Phase, keyed, set_fields, values_of

__all__ = ["FILTER", "Continuation", "Phase", "Plan"]

FILTER = "rdp-filter"
"""The accountant of plans that continue earlier runs."""

FORMAT = 2
"""Version of the JSON form; others are refused."""


@final
@dataclass(frozen=True, slots=True)
class Plan:
    """Phases and what they protect. Sampler, mechanism, ledger and accountant all read it; nothing is typed twice.

    Attributes:
        method: name of the training method.
        phases: in the order they run.
        units: the number N of privacy units; public.
        unit: what a unit is: "row", or the name of the column that identifies it.
        steps_per_epoch: training steps in one epoch.
        delta: the delta of the guarantee; None only for plans without a target.
        target_epsilon: what the noise was calibrated to; None when it was not.
        accountant: the accountant it was calibrated with; set exactly when `target_epsilon` is.
        continuation: set when the plan continues earlier runs: target and delta then cap the total.
        spec: what it was made from, as JSON, the method's row included; read by `methods.PlanSpec`.
    """

    method: str
    phases: tuple[Phase, ...]
    units: int
    steps_per_epoch: int
    unit: str = "row"
    delta: float | None = None
    target_epsilon: float | None = None
    accountant: str | None = None
    continuation: Continuation | None = None
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
        if target is None and self.continuation is not None:
            raise PrivacyError(
                "a plan that continues earlier runs needs the cap on the total as its target_epsilon"
            )
        if target is not None:
            checks.text(self.accountant, "accountant")
            if (self.accountant == FILTER) != (self.continuation is not None):
                raise PrivacyError(
                    f"the accountant {FILTER} and a continuation come together; RdpFilter sets both"
                )
            if delta is None or not self.is_private:
                raise PrivacyError(
                    "a plan with a target_epsilon needs a delta, and a clip and noise in every phase"
                )

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
    def is_private(self) -> bool:
        """Whether every phase is."""
        return all(phase.is_private for phase in self.phases)

    @property
    def charged_head(self) -> str:
        """What names it as an earlier run of an `RdpFilter`: its fingerprint."""
        return self.fingerprint

    def committed(self) -> tuple[Spend, ...]:
        """The most a run of it can ever spend."""
        return self.spends()

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
        start = 0
        for phase in self.phases:
            if phase.name == name:
                return start
            start += phase.steps
        raise PrivacyError(f"no phase {name!r} in this plan; it has {[phase.name for phase in self.phases]}")

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

    def spends(self, steps: int | None = None) -> tuple[Spend, ...]:
        """What the plan, or its first `steps` steps, releases; a phase that is not private has noise 0."""
        left = self.total_steps if steps is None else steps
        if not 0 <= left <= self.total_steps:
            raise PrivacyError(f"steps: got {steps}, expected 0..{self.total_steps}")
        spends = []
        for phase in self.phases:
            count = min(left, phase.steps)
            if count:
                noise = phase.noise_multiplier if phase.is_private else 0.0
                spends.append(Spend(phase.sampling_rate, noise, count))
            left -= count
        return tuple(spends)

    def with_noise(self, noise: Mapping[str, float]) -> Plan:
        """The same plan with the named phases' noise multipliers replaced, and no target."""
        unknown = set(noise) - {phase.name for phase in self.phases}
        if unknown:
            raise PrivacyError(f"no phase {sorted(unknown)} in this plan")
        phases = (replace(p, noise_multiplier=noise.get(p.name, p.noise_multiplier)) for p in self.phases)
        return replace(self, phases=tuple(phases), target_epsilon=None, accountant=None, continuation=None)

    def to_json(self) -> str:
        """Canonical JSON; `from_json` gives back an equal plan."""
        phases = [phase.to_json() for phase in self.phases]
        continuation = None if self.continuation is None else values_of(self.continuation)
        values = {**values_of(self), "phases": phases, "continuation": continuation}
        spec = None if self.spec is None else self.spec.plain()
        return canonical({**values, "spec": spec, "format": FORMAT})

    @classmethod
    def from_json(cls, text: str) -> Plan:
        """The plan a JSON text describes.

        Raises:
            PrivacyError: not JSON, another format version, unknown or missing keys, or an invalid plan.
        """
        try:
            value = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise PrivacyError(f"the plan is not JSON: {error}") from error
        found = value.get("format") if isinstance(value, dict) else type(value).__name__
        if found != FORMAT or isinstance(found, bool):
            raise PrivacyError(
                f"plan format: got {found!r}, expected {FORMAT}; plans of other formats are not read, make it again"
            )
        value = keyed(value, cls, "plan", extra={"format"})
        if not isinstance(value["spec"], dict | None):
            raise PrivacyError(f"plan: got spec {value['spec']!r}, expected a JSON object or null")
        if not isinstance(value["phases"], list):
            raise PrivacyError(f"phases: got {value['phases']!r}, expected a list")
        phases = tuple(Phase.from_json(phase) for phase in value.pop("phases"))
        continuation, spec = value.pop("continuation"), value.pop("spec")
        if continuation is not None:
            continuation = Continuation(**keyed(continuation, Continuation, "continuation"))
        return cls(phases=phases, continuation=continuation, spec=spec, **value)

    @property
    def fingerprint(self) -> str:
        """SHA-256 of the canonical JSON."""
        return sha256(self.to_json())
