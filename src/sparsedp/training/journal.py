"""The journal: which supports a run has had and what each epoch showed. Public."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, final

from sparsedp.core.layout import Layout
from sparsedp.core.support import Support
from sparsedp.privacy.released import Released
from sparsedp.runs.history import EpochReport, SupportSpan


@final
class Journal:
    """Grows with every epoch and every change of the support; a checkpoint carries all of it.

    Attributes:
        epochs: one report per epoch.
        spans: one entry per support.
        support: the last step's; all coordinates before the first.
    """

    def __init__(self, layout: Layout) -> None:
        self._layout = layout
        self.epochs: list[EpochReport] = []
        self.spans: list[SupportSpan] = []
        self.support = Support.full(layout.dimension)

    def note(self, released: Released) -> None:
        """Remember the support of a step if it is a new one."""
        support = released.support
        if self.spans and (support is self.support or support == self.support):
            return
        self.support = support
        counts = {name: places.numel() for name, places in support.split(self._layout).items()}
        self.spans.append(SupportSpan(released.step, support.size, counts))

    def state(self) -> dict[str, Any]:
        """What a checkpoint keeps."""
        return {
            "epochs": [report.to_json() for report in self.epochs],
            "spans": [span.to_json() for span in self.spans],
            "support": self.support.indices,
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on from a checkpoint."""
        self.epochs = [EpochReport.from_json(value) for value in state["epochs"]]
        self.spans = [SupportSpan.from_json(value) for value in state["spans"]]
        self.support = Support(state["support"], self._layout.dimension)
