"""What a run has spent: its ledger, read against its plan."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, final

from sparsedp.privacy.accountants import accountant_for, epsilon_by_epoch
from sparsedp.privacy.ledger import RunLedger
from sparsedp.privacy.plan import Plan
from sparsedp.training.result import LedgerSummary


@final
@dataclass
class Spending:
    """The ledger of a run and the epsilon it amounts to.

    Attributes:
        plan: what is paid for.
        ledger: where it is written down.
    """

    plan: Plan
    ledger: RunLedger

    @cached_property
    def _by_epoch_end(self) -> Mapping[int, float]:
        return dict(zip(self.plan.epoch_ends(), epsilon_by_epoch(self.plan), strict=True))

    def at_epoch_end(self, step: int) -> float | None:
        """Epsilon of the plan's first steps, up to the end of an epoch; None when not private."""
        if self.plan.delta is None or not self.plan.is_private:
            return None
        return self._by_epoch_end[step]

    def planned(self) -> float:
        """Epsilon of the whole plan: the guarantee, whatever the run has got to."""
        return self._epsilon(self.plan.event())

    def summary(self) -> LedgerSummary:
        """What the ledger says."""
        return LedgerSummary(
            steps=self.ledger.charged,
            planned=self.plan.total_steps,
            epsilon=self._epsilon(self.ledger.event()),
            entries=self.ledger.length,
            head=self.ledger.head,
        )

    def _epsilon(self, event: Any) -> float:
        if not self.plan.is_private or self.plan.delta is None:
            return math.inf
        return accountant_for(self.plan).epsilon(event, self.plan.delta)
