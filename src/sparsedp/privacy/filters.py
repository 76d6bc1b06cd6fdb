"""Continue after looking: an RDP filter over runs whose plans were chosen from earlier runs' releases.

Ordinary composition, and PLD with it, wants every mechanism fixed before the first release. A second plan chosen
after a first run was looked at breaks that: its noise and length are random. What holds then is

**Theorem** (Feldman and Zrnic 2021, "Individual Privacy Accounting via a Renyi Filter", arXiv 2008.11193: their
composition theorem for adaptively chosen parameters). Fix an order alpha > 1 and a budget B. Let each mechanism, its
parameters included, be chosen from the outputs of those before it, and let rho_t be its Renyi divergence of order
alpha given those outputs. If sum_t rho_t <= B on every path, the whole is (alpha, B)-RDP.

With (alpha, B)-RDP comes (epsilon, delta)-DP by the tight conversion, so B follows from the cap (epsilon, delta)
and alpha. Two things must therefore be fixed beforehand, from public values alone: the cap and the *one* order.
Taking the best order at the end, as an accountant does for a fixed plan, is not covered: different paths would lean
on different orders, each allowed the full delta. So the order is chosen from the cap and the first plan, and kept.

A run that was stopped can be resumed. So what its plan has left may be given to another plan only after its ledger
was closed, as `runs.continuing.continue_runs` does. An earlier run whose ledger is open counts with its whole plan.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol, final

import numpy as np

from sparsedp.errors import PrivacyError
from sparsedp.privacy import checks
from sparsedp.privacy.calibrate import as_spends, warn_if_large, with_spends
from sparsedp.privacy.events import Spend, counted
from sparsedp.privacy.plan import FILTER, Continuation, Plan
from sparsedp.privacy.rdp import ORDERS, TIGHT, renyi
from sparsedp.privacy.splits import BudgetSplit, EqualNoise, Goal


class PriorRun(Protocol):
    """An earlier run on the same units: its ledger, read from its file, or its plan."""

    @property
    def charged_head(self) -> str:
        """What names it: the hash of the ledger's last line before the closing one."""
        ...

    def committed(self) -> tuple[Spend, ...]:
        """The most it can ever spend: its whole plan, or what was charged when its ledger was closed."""
        ...


@final
@dataclass(frozen=True, slots=True)
class RdpFilter:
    """A cap on all runs over the same units together, counted at one fixed Renyi order.

    **Privacy.** Whatever plans it admits, chosen in any way from earlier releases, the whole is (epsilon, delta)-DP,
    provided cap and order were settled without looking at any release. Unlike a PLD guarantee this also covers
    runs stopped early because of what they showed: what their closed ledgers did not charge is free for later runs.
    It counts the runs that it is told of; `runs.continuing.continue_runs` also gives no remainder away twice.
    """

    epsilon: float
    delta: float
    order: float

    def __post_init__(self) -> None:
        checks.positive_epsilon(self.epsilon)
        checks.delta_in_range(self.delta)
        checks.number(self.order, "order", above=1.0)

    @classmethod
    def before(cls, first: Plan, epsilon: float, delta: float) -> RdpFilter:
        """The filter for a cap, its order chosen from public values: the cap and the first plan, fixed in advance.

        The order is the one that leaves most room for further Gaussian releases, whose cost grows like the order.

        Raises:
            PrivacyError: the first plan alone exceeds the cap at every order.
        """
        orders = np.asarray(ORDERS)
        budgets = np.asarray([cls(epsilon, delta, order).budget for order in ORDERS])
        room = (budgets - renyi(first.spends())) / orders
        best = int(room.argmax())
        if not room[best] > 0:
            raise PrivacyError(
                f"the first plan leaves nothing of epsilon={epsilon:g} at delta={delta:g} by RDP; "
                "raise the cap (before looking at any release) or plan a cheaper first run"
            )
        return cls(float(epsilon), float(delta), ORDERS[best])

    @property
    def budget(self) -> float:
        """B: the Renyi divergence of the fixed order that the cap allows. Negative if it allows none."""
        overhead = TIGHT.epsilon(np.asarray([self.order]), np.zeros(1), self.delta)
        return self.epsilon - float(overhead[0])

    def cost(self, spends: Iterable[Spend]) -> float:
        """Renyi divergence of the fixed order of what is spent; infinite if it is not private."""
        return float(renyi(counted(spends), (self.order,))[0])

    def remaining(self, earlier: Iterable[PriorRun]) -> float:
        """What is left of the budget after earlier runs, those that can be resumed counted whole; never below 0."""
        return max(0.0, self.budget - self._spent(earlier))

    def admits(self, plan: Plan, earlier: Iterable[PriorRun]) -> bool:
        """Whether a further plan fits."""
        return self.cost(plan.spends()) <= self.remaining(earlier)

    def calibrate(
        self,
        plan: Plan,
        earlier: Sequence[PriorRun],
        split: BudgetSplit = EqualNoise(),  # noqa: B008
    ) -> Plan:
        """The plan with the least noise that keeps all runs together within the cap.

        Raises:
            PrivacyError: nothing is left, or no noise makes the plan fit.
        """
        spends = as_spends(plan)
        warn_if_large(self.delta, plan)
        left = self.remaining(earlier)
        if left <= 0:
            raise PrivacyError(
                f"the earlier runs used up the cap of epsilon={self.epsilon:g} at delta={self.delta:g}; "
                "nothing more can be released about these units under it"
            )
        goal = Goal(
            limit=left,
            cost=self.cost,
            rough_cost=self.cost,
            what=f"what is left of epsilon={self.epsilon:g} at delta={self.delta:g} in {plan.total_steps} steps",
        )
        return replace(
            with_spends(plan, split.solve(spends, goal)),
            delta=self.delta,
            target_epsilon=self.epsilon,
            accountant=FILTER,
            continuation=Continuation(
                self.order, self._spent(earlier), tuple(run.charged_head for run in earlier)
            ),
        )

    def _spent(self, earlier: Iterable[PriorRun]) -> float:
        return math.fsum(self.cost(run.committed()) for run in earlier)
