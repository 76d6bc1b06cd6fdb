"""What a run has spent: its ledger, on disk or in memory, read against its plan."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, final

from sparsedp.privacy.accountants import accountant_for, epsilon_by_epoch
from sparsedp.privacy.ledger import Charge, FileLedger, MemoryLedger
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
    ledger: FileLedger | MemoryLedger

    def charge(self, charge: Charge) -> None:
        """Pay for one release before it is made."""
        self.ledger.charge(charge)

    @property
    def charged(self) -> int:
        """Steps paid for, the open block whole."""
        return self.ledger.charged if isinstance(self.ledger, FileLedger) else len(self.ledger.charges)

    @property
    def place(self) -> Mapping[str, object]:
        """Head and length of the ledger file, for a checkpoint."""
        if isinstance(self.ledger, FileLedger):
            return {"head": self.ledger.head, "length": self.ledger.length}
        return {"head": None, "length": 0}

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
        place = self.place
        head, length = place["head"], place["length"]
        return LedgerSummary(
            steps=self.charged,
            planned=self.plan.total_steps,
            epsilon=self._epsilon(self.ledger.event()),
            entries=int(str(length)),
            head=None if head is None else str(head),
        )

    def _epsilon(self, event: Any) -> float:
        if not self.plan.is_private or self.plan.delta is None:
            return math.inf
        return accountant_for(self.plan).epsilon(event, self.plan.delta)

    def close(self) -> None:
        """Release the ledger file."""
        if isinstance(self.ledger, FileLedger):
            self.ledger.close()
