"""The plan as a method sees it: where its phases lie and how loud the noise is."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from sparsedp.errors import SparseDPError
from sparsedp.methods import stages
from sparsedp.methods.method import Method
from sparsedp.privacy.plan import Phase, Plan

WARM_UP = stages.WARM_UP.name
"""The phase of a dense warm-up."""


@dataclass(frozen=True, slots=True)
class Timeline:
    """Training begins at step `first`, its main phase has the steps `main_start .. stop - 1`.

    What lies between is the stage before the main one, with a selection at its end if the method has one there.

    `main_noise_std` is the noise `nu` on each coordinate of the main phase's mean gradient, before any geometry.
    """

    first: int
    main_start: int
    stop: int
    steps_per_epoch: int
    main_noise_std: float

    @property
    def main_steps(self) -> int:
        """Steps of the main phase."""
        return self.stop - self.main_start

    def to_json(self) -> dict[str, Any]:
        """As JSON values."""
        return asdict(self)

    @classmethod
    def of(cls, plan: Plan, method: Method) -> Timeline:
        """Read a plan made for this method.

        Raises:
            SparseDPError: its phases are not those of the method's stages.
        """
        training = plan.training
        trains = tuple(stage for stage in method.stages if stage.trains)
        names, expected = tuple(phase.name for phase in training), stages.phase_names(trains)
        if names != expected:
            raise SparseDPError(
                f"the plan's training phases are {list(names)}, expected {list(expected)} for {method.name!r}; "
                "make it with build_plan"
            )
        main = training[-1]
        first, main_start = plan.first_step(training[0].name), plan.first_step(main.name)
        before_main = plan.phases[plan.phases.index(training[0]) : plan.phases.index(main)]
        if not {phase.name for phase in before_main} <= {stage.name for stage in method.stages}:
            raise SparseDPError(
                "the plan has another phase between warm-up and main; put it before the warm-up"
            )
        return cls(
            first=first,
            main_start=main_start,
            stop=main_start + main.steps,
            steps_per_epoch=plan.steps_per_epoch,
            main_noise_std=noise_on_mean(plan, main),
        )


def noise_on_mean(plan: Plan, phase: Phase) -> float:
    """`nu`: standard deviation of the noise on each coordinate of the phase's released mean."""
    clipped = 0.0 if phase.clip_norm is None else phase.gradient_noise * phase.clip_norm
    return (phase.noise_std or clipped) / plan.expected_batch_size(phase)
