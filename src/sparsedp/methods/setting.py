"""What the controller tells the training step, and what it needs to be continued."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from sparsedp.core.geometry import Geometry
from sparsedp.methods.rules import OffSupport
from sparsedp.parameters import Support


@dataclass(frozen=True, slots=True)
class SupportChange:
    """How the support differs from the step before.

    Attributes:
        before: the support till now.
        after: the support from now on.
        off_support: what becomes of those that left.
        prune: set the coordinates that left to zero, now.
    """

    before: Support
    after: Support
    off_support: OffSupport
    prune: bool

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
class ControllerState:
    """The controller between two steps: named tensors and JSON values."""

    tensors: Mapping[str, Tensor]
    values: Mapping[str, Any]
