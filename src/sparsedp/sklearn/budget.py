"""A budget that several fits on the same units draw from, kept in a locked file."""

from __future__ import annotations

import fcntl
import math
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, final

from sparsedp._files import read_json, write_json
from sparsedp._validate import delta_in_range, positive_epsilon
from sparsedp.errors import DataError, PrivacyError
from sparsedp.privacy.accounting import plan_epsilon
from sparsedp.privacy.calibration import RdpFilter
from sparsedp.privacy.plan import Plan

_FORMAT = 1


@final
class PrivacyBudget:
    """(epsilon, delta) for all fits on the same units together; what would pass it is refused before it starts.

    >>> budget = PrivacyBudget(3.0, 1e-5, "ward7.budget.json")  # doctest: +SKIP
    >>> SparseDPClassifier(epsilon=1.0, budget=budget).fit(X, y)  # doctest: +SKIP

    Args:
        epsilon: the most that all fits together may cost.
        delta: of the whole.
        path: the file that holds what was drawn; made if it is not there, and locked while it is written. Copies of
            this object, and other processes, share it.

    Formal guarantees:
        All fits together are (epsilon, delta)-differentially private under adding or removing one unit, also when
        each is chosen after looking at those before it, by Feldman and Zrnic's filter (see `RdpFilter`), whose order
        is settled by the first plan, before anything is released. The budget knows of the fits that were given it,
        and of no others.

    Edge cases:
        A fit pays its whole plan before it starts, and gets nothing back if it fails. Seeded fits pay too. Two
        processes that draw at once are served one after the other. A file with another budget, or a plan for other
        units, is refused. Many fits cost less than the sum of their epsilons; one alone cannot take all of it.
    """

    def __init__(self, epsilon: float, delta: float, path: str | os.PathLike[str]) -> None:
        self.epsilon, self.delta = positive_epsilon(epsilon), delta_in_range(delta)
        self.path = Path(path).absolute()
        with self._locked():
            pass

    def __repr__(self) -> str:
        return f"PrivacyBudget({self.epsilon:g}, {self.delta:g}, {str(self.path)!r})"

    @property
    def draws(self) -> list[dict[str, Any]]:
        """What was drawn so far, first to last: what for, its epsilon and delta by itself, its share of the whole."""
        with self._locked() as content:
            return list(content["draws"])

    @property
    def left(self) -> float:
        """The share of the budget that is left, from 1 to 0."""
        return _left(self.draws)

    def __str__(self) -> str:
        """What is left, in words."""
        drawn = self.draws
        fits = f"{len(drawn)} fit{'' if len(drawn) == 1 else 's'}"
        if drawn and drawn[-1]["share"]:
            fits += f", {int(_left(drawn) / drawn[-1]['share'] + 1e-9)} more like the last"
        return f"{_left(drawn):.1%} left of epsilon={self.epsilon:g} at delta={self.delta:g} after {fits}"

    def draw(self, plan: Plan, what: str = "fit", run: Path | None = None, *, paid: bool = False) -> None:
        """Pay for a plan, before it releases anything.

        Args:
            plan: what is paid for.
            what: its name among the draws.
            run: where the run is kept.
            paid: the run goes on, so it is not paid for again, if it was.

        Raises:
            PrivacyError: it costs more than is left, or protects other units.
            DataError: the file is damaged or of another budget.
        """
        plan.check_calibrated()
        with self._locked() as content:
            units = {"unit": plan.unit, "units": plan.units}
            if (first := content.setdefault("protects", units)) != units:
                raise PrivacyError(
                    f"budget: got a fit that protects {plan.units} units called {plan.unit!r}, expected "
                    f"{first['units']} called {first['unit']!r}, as in the first draw: a budget is for the same units"
                )
            place = None if run is None else str(run.absolute())
            if paid and place and any(one.get("run") == place for one in content["draws"]):
                return
            if "order" not in content:
                content["order"] = RdpFilter.for_first_plan(plan, self.epsilon, self.delta).order
            whole = RdpFilter(self.epsilon, self.delta, content["order"])
            epsilon, share = plan_epsilon(plan), whole.cost(plan.events()) / whole.budget
            left = _left(content["draws"])
            if share > left * (1 + 1e-12):
                raise PrivacyError(
                    f"budget: this fit (epsilon={epsilon:.4g}) costs {share:.1%} of epsilon={self.epsilon:g} at "
                    f"delta={self.delta:g} by Renyi divergence, and {left:.1%} is left; nothing was released. Ask "
                    "for a smaller epsilon"
                )
            drawn = {"what": what, "run": place, "epsilon": epsilon, "delta": plan.delta, "share": share}
            content["draws"].append(drawn)
            write_json(self.path, content)

    @contextmanager
    def _locked(self) -> Iterator[dict[str, Any]]:
        """What the file holds, checked, while nobody else reads or writes it."""
        asked = {"format": _FORMAT, "epsilon": self.epsilon, "delta": self.delta}
        with open(self.path.with_name(self.path.name + ".lock"), "a") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not self.path.exists():
                write_json(self.path, {**asked, "draws": []})
            content = read_json(self.path)
            if not isinstance(content, dict) or not isinstance(content.get("draws"), list):
                raise DataError(f"budget {self.path}: expected the file of a PrivacyBudget")
            if asked != (found := {name: content.get(name) for name in asked}):
                raise PrivacyError(
                    f"budget {self.path}: the file is of {found}, and {asked} was given; a budget stays as it is"
                )
            yield content


def _left(draws: list[dict[str, Any]]) -> float:
    return max(0.0, 1.0 - math.fsum(draw["share"] for draw in draws))
