"""What a warm-up shows about its coordinates, kept by every run. Post-processing of releases, so free.

The first half of the steps ranks the coordinates, by every score in `RANKINGS`; the even and the odd steps of the
second half each give a mean gradient, whose product estimates energies without bias.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import final

import torch
from torch import Tensor

from sparsedp.methods.method import WARM_UP
from sparsedp.methods.scores import Coherent, Energy, observe
from sparsedp.privacy.mechanism import Release
from sparsedp.privacy.plan import Phase, Plan

MINIMUM_WARMUP = 3
"""One step to rank by and two to estimate with."""
RANKINGS: tuple[Energy | Coherent, ...] = (Energy(), Coherent())
DENSE_SHARE = 0.3
"""The share of a run without a warm-up that is looked at as if it were one."""
MOST_COORDINATES = 20_000_000
"""Beyond, nothing is kept: it takes 32 bytes a coordinate while the warm-up is on, and 16 afterwards."""
_COUNTS = ("rank_steps", "even_steps", "odd_steps")


@final
class WarmupWatch:
    """Takes in the releases of a warm-up.

    A run without a warm-up counts as having one for the first 30 % of its steps, if they are dense.

    Formal guarantees: It is given released values only, so what it keeps is as public as the run.
    Edge cases: A step that was lost is left out. Without a step of each part, and when not every coordinate was
    active, nothing is kept.
    """

    def __init__(self, plan: Plan, dimension: int) -> None:
        self._first, self._steps = plan.first_step(observed_phase(plan).name), observed_steps(plan)
        self._dimension = dimension
        self._over = self._steps < MINIMUM_WARMUP or dimension > MOST_COORDINATES
        self._tensors: dict[str, Tensor] = {}

    def observe(self, released: Release) -> None:
        """Take in a step; after the last one, keep what it amounts to."""
        if self._over:
            return
        step = released.step - self._first
        if step < self._steps:
            if not released.support.is_full:
                self._over, self._tensors = True, {}
                return
            self._add(step, released)
        if step >= self._steps - 1:
            self._over, self._tensors = True, self._amount()

    def state(self) -> dict[str, Tensor]:
        """What a checkpoint keeps."""
        return {**self._tensors, "over": torch.tensor(self._over)}

    def restore(self, tensors: Mapping[str, Tensor]) -> None:
        """Go on from a state."""
        self._tensors = {name: value.clone() for name, value in tensors.items() if name != "over"}
        self._over = bool(tensors["over"])

    def _add(self, step: int, released: Release) -> None:
        seen, kept = observe(released), self._tensors or self._empty()
        if step < self._steps // 2:
            for score in RANKINGS:
                moved = score.update(under(kept, f"{score.name}."), seen)
                kept |= {f"{score.name}.{name}": value for name, value in moved.items()}
            kept["rank_steps"] = kept["rank_steps"] + 1
        else:
            part = "even" if step % 2 == 0 else "odd"
            kept[f"{part}_sum"] = kept[f"{part}_sum"] + seen.gradient
            kept[f"{part}_steps"] = kept[f"{part}_steps"] + 1
        self._tensors = kept

    def _empty(self) -> dict[str, Tensor]:
        scores = {
            f"{score.name}.{name}": value
            for score in RANKINGS
            for name, value in score.init(self._dimension).items()
        }
        sums = {name: torch.zeros(self._dimension, dtype=torch.float64) for name in ("even_sum", "odd_sum")}
        return {**scores, **sums, **{name: torch.zeros((), dtype=torch.int64) for name in _COUNTS}}

    def _amount(self) -> dict[str, Tensor]:
        kept = self._tensors
        if not kept or any(int(kept[name]) == 0 for name in _COUNTS):
            return {}
        orders = {}
        for score in RANKINGS:
            scores = score.scores(under(kept, f"{score.name}."))
            order = torch.sort(scores, descending=True, stable=True).indices
            orders[f"order.{score.name}"] = order.to(torch.int32)
        first, second = kept["even_sum"] / kept["even_steps"], kept["odd_sum"] / kept["odd_steps"]
        counts = {name: kept[name] for name in _COUNTS}
        return {**orders, "first": first.float(), "second": second.float(), **counts}


def observed_phase(plan: Plan) -> Phase:
    """The phase the statistics are of: the warm-up, or the first training phase if there is none."""
    return next(phase for phase in plan.phases if phase.trains)


def observed_steps(plan: Plan) -> int:
    """How many steps of that phase: the whole warm-up, or 30 % of a phase that is none."""
    phase = observed_phase(plan)
    return phase.steps if phase.name == WARM_UP.name else round(DENSE_SHARE * phase.steps)


def under(tensors: Mapping[str, Tensor], prefix: str) -> dict[str, Tensor]:
    """Copies of the tensors whose names begin so, by the rest of the name."""
    return {
        name.removeprefix(prefix): value.clone() for name, value in tensors.items() if name.startswith(prefix)
    }
