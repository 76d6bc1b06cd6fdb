"""A run's history: one report per epoch, and which supports it has had. Public."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, final

from sparsedp.parameters import Layout, Support
from sparsedp.privacy.mechanism import Released


@dataclass(frozen=True, slots=True)
class EpochReport:
    """One epoch is done: a line of `metrics.jsonl`.

    Attributes:
        epoch: from 1.
        step: how many steps of the plan are done, those lost in a crash included.
        phase: the plan's phase of the last step.
        epsilon: what the plan's steps so far cost; None if the run is not private.
        active: how many coordinates are active.
        active_ratio: the share of all coordinates they are.
        learning_rate: the first parameter group's.
        metrics: on held-out data, which is outside the guarantee; None where not finite.
    """

    epoch: int
    step: int
    phase: str
    epsilon: float | None
    active: int
    active_ratio: float
    learning_rate: float
    metrics: Mapping[str, float | None] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        """One flat object."""
        fields = {name: getattr(self, name) for name in self.__slots__ if name != "metrics"}
        return {**fields, "metrics": dict(self.metrics)}

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> EpochReport:
        """The report `to_json` wrote."""
        return cls(**value)


@dataclass(frozen=True, slots=True)
class SupportSpan:
    """A support and when it began: how many coordinates each parameter kept.

    Attributes:
        step: the first step with this support.
        active: its size.
        by_parameter: active coordinates of each parameter.
    """

    step: int
    active: int
    by_parameter: Mapping[str, int]

    def to_json(self) -> dict[str, Any]:
        """One flat object."""
        return {"step": self.step, "active": self.active, "by_parameter": dict(self.by_parameter)}

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> SupportSpan:
        """The span `to_json` wrote."""
        return cls(**value)


@final
class History:
    """Grows with every epoch and every change of the support; a checkpoint carries all of it.

    Attributes:
        epochs: one report per epoch.
        spans: one entry per support.
        support: the last step's; all coordinates before the first.
    """

    def __init__(
        self,
        layout: Layout,
        epochs: Sequence[EpochReport] = (),
        spans: Sequence[SupportSpan] = (),
        support: Support | None = None,
    ) -> None:
        self._layout = layout
        self.epochs, self.spans = list(epochs), list(spans)
        self.support = Support.full(layout.dimension) if support is None else support

    def note(self, released: Released) -> None:
        """Remember the support of a step if it is a new one."""
        support = released.support
        if self.spans and (support is self.support or support == self.support):
            return
        self.support = support
        counts = {name: places.numel() for name, places in support.split(self._layout).items()}
        self.spans.append(SupportSpan(released.step, support.size, counts))
