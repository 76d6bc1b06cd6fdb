"""The table of accountants, and the guarantee of a plan epoch by epoch."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Protocol

from sparsedp.errors import PrivacyError
from sparsedp.privacy.events import Spend
from sparsedp.privacy.plan import FILTER, Plan
from sparsedp.privacy.pld import PldAccountant
from sparsedp.privacy.rdp import CLASSIC, TIGHT, RdpAccountant


class Accountant(Protocol):
    """Bounds epsilon and delta of what was spent, under adding or removing one unit."""

    @property
    def name(self) -> str:
        """Its key in the table."""
        ...

    def epsilon(self, spends: Iterable[Spend], delta: float) -> float:
        """An upper bound on epsilon at delta; infinite if not private, 0 for nothing."""
        ...

    def rough_epsilon(self, spends: Iterable[Spend], delta: float) -> float:
        """A quick upper bound within about one percent of `epsilon`, for searches."""
        ...

    def delta(self, spends: Iterable[Spend], epsilon: float) -> float:
        """An upper bound on delta at epsilon; 1 if not private, 0 for nothing."""
        ...

    def curve(self, spends: Iterable[Spend], marks: Sequence[int], delta: float) -> tuple[float, ...]:
        """Epsilon after each of an increasing list of step counts; never decreases."""
        ...


ACCOUNTANTS: Mapping[str, Accountant] = MappingProxyType(
    {
        entry.name: entry
        for entry in (
            PldAccountant("pld"),
            RdpAccountant("rdp", TIGHT),
            RdpAccountant("rdp-classic", CLASSIC),
        )
    }
)
"""`pld` is the tightest; `rdp` and `rdp-classic` are what papers report."""


def accountant(name: str) -> Accountant:
    """The accountant of that name."""
    if name not in ACCOUNTANTS:
        raise PrivacyError(f"accountant: got {name!r}, expected one of {sorted(ACCOUNTANTS)}")
    return ACCOUNTANTS[name]


def accountant_for(plan: Plan) -> Accountant:
    """The accountant a plan was calibrated with; `pld` if with none.

    A plan that continues earlier runs has one of its own: it counts what they spent, at the filter's fixed order.
    """
    if plan.continuation is not None:
        before = plan.continuation
        return RdpAccountant(FILTER, TIGHT, (before.order,), (before.spent,))
    return accountant(plan.accountant or "pld")


def epsilon_by_epoch(plan: Plan, name: str | None = None, delta: float | None = None) -> tuple[float, ...]:
    """Epsilon of a plan at the end of each epoch (`plan.epoch_ends()`); all infinite if a phase is not private.

    By the plan's own accountant and at its own delta, unless told otherwise.

    **Privacy.** These are prefixes of the plan. A run stopped early guarantees the *planned* epsilon, unless the stop
    did not depend on anything that was released.
    """
    return _chosen(plan, name).curve(plan.spends(), plan.epoch_ends(), _delta_of(plan, delta))


def plan_epsilon(plan: Plan, name: str | None = None, delta: float | None = None) -> float:
    """Epsilon of the whole plan, by its own accountant and at its own delta unless told otherwise."""
    return _chosen(plan, name).epsilon(plan.spends(), _delta_of(plan, delta))


def _chosen(plan: Plan, name: str | None) -> Accountant:
    return accountant_for(plan) if name is None or name == plan.accountant else accountant(name)


def _delta_of(plan: Plan, delta: float | None) -> float:
    chosen = plan.delta if delta is None else delta
    if chosen is None:
        raise PrivacyError("delta: the plan has none; pass delta=, well below 1 / the number of units")
    return chosen
