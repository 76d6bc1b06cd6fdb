"""A budget that several fits on the same units draw from, kept in a locked file."""

from __future__ import annotations

import fcntl
import json
import math
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, final

from sparsedp._files import write_atomically
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
        composition: "rdp" adds up Renyi divergences at one order (an RDP filter), so that many fits cost less than
            their sum; "sum" adds up epsilons and deltas, so that one fit may take all of it.

    Formal guarantees:
        All fits together are (epsilon, delta)-differentially private under adding or removing one unit, also when
        each is chosen after looking at those before it: by basic composition, or by Feldman and Zrnic's filter (see
        `RdpFilter`), whose order is settled by the first plan, before anything is released. The budget knows of the
        fits that were given it, and of no others.

    Edge cases:
        A fit pays its whole plan before it starts, and gets nothing back if it fails. Seeded fits pay too. Two
        processes that draw at once are served one after the other. A file with another budget, or a plan for other
        units, is refused.
    """

    def __init__(
        self, epsilon: float, delta: float, path: str | os.PathLike[str], composition: str = "rdp"
    ) -> None:
        if not (math.isfinite(epsilon) and epsilon > 0 and 0 < delta < 1):
            told = "expected a finite epsilon > 0 and 0 < delta < 1"
            raise PrivacyError(f"budget: got epsilon={epsilon!r} and delta={delta!r}, {told}")
        if composition not in ("rdp", "sum"):
            raise PrivacyError(f"composition: got {composition!r}, expected 'rdp' or 'sum'")
        self.epsilon, self.delta, self.composition = float(epsilon), float(delta), composition
        self.path = Path(path).absolute()
        with self._locked() as content:
            self._check(content)

    def __repr__(self) -> str:
        return f"PrivacyBudget({self.epsilon:g}, {self.delta:g}, {str(self.path)!r}, {self.composition!r})"

    @property
    def draws(self) -> list[dict[str, Any]]:
        """What was drawn so far, first to last: what for, and its epsilon and delta by itself."""
        with self._locked() as content:
            return list(self._check(content)["draws"])

    @property
    def left(self) -> float:
        """The share of the budget that is left, from 1 to 0; under "sum" the smaller of epsilon's and delta's."""
        with self._locked() as content:
            return self._left(self._check(content))

    def __str__(self) -> str:
        """What is left, in words."""
        drawn = self.draws
        fits = f"{len(drawn)} fit{'' if len(drawn) == 1 else 's'}"
        if drawn and drawn[-1]["share"]:
            fits += f", {int(self.left / drawn[-1]['share'] + 1e-9)} more like the last"
        whole = f"epsilon={self.epsilon:g} at delta={self.delta:g} ({self.composition})"
        return f"{self.left:.1%} left of {whole} after {fits}"

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
            self._check(content)
            units = {"unit": plan.unit, "units": plan.units}
            if (first := content.setdefault("protects", units)) != units:
                raise PrivacyError(
                    f"budget: got a fit that protects {plan.units} units called {plan.unit!r}, expected "
                    f"{first['units']} called {first['unit']!r}, as in the first draw: a budget is for the same units"
                )
            place = None if run is None else str(run.absolute())
            if paid and place and any(one.get("run") == place for one in content["draws"]):
                return
            cost, share = self._cost(plan, content)
            left = self._left(content)
            if share > left * (1 + 1e-12):
                whole = "" if content["draws"] else ", or, for one fit that takes it all, composition='sum'"
                raise PrivacyError(
                    f"budget: this fit (epsilon={plan_epsilon(plan):.4g}) costs {share:.1%} of epsilon="
                    f"{self.epsilon:g} at delta={self.delta:g} by {self.composition!r}, and {left:.1%} is left; "
                    "nothing was released. Ask for a smaller epsilon"
                    + (whole if self.composition == "rdp" else "")
                )
            drawn = {"what": what, "run": place, "epsilon": plan_epsilon(plan), "delta": plan.delta}
            content["draws"].append({**drawn, "cost": cost, "share": share})
            self._write(content)

    def _cost(self, plan: Plan, content: dict[str, Any]) -> tuple[list[float], float]:
        """What a plan costs in the budget's own measure, and as a share of the whole."""
        if self.composition == "sum":
            cost = [plan_epsilon(plan), float(plan.delta or 0.0)]
            return cost, max(cost[0] / self.epsilon, cost[1] / self.delta)
        if "order" not in content:
            content["order"] = RdpFilter.for_first_plan(plan, self.epsilon, self.delta).order
        whole = RdpFilter(self.epsilon, self.delta, content["order"])
        rho = whole.cost(plan.events())
        return [rho], rho / whole.budget

    def _left(self, content: dict[str, Any]) -> float:
        draws = content["draws"]
        if not draws:
            return 1.0
        totals = [math.fsum(one) for one in zip(*(draw["cost"] for draw in draws), strict=True)]
        if self.composition == "sum":
            whole = [self.epsilon, self.delta]
        else:
            whole = [RdpFilter(self.epsilon, self.delta, content["order"]).budget]
        return max(0.0, 1.0 - max(total / most for total, most in zip(totals, whole, strict=True)))

    @contextmanager
    def _locked(self) -> Iterator[dict[str, Any]]:
        """What the file holds, while nobody else reads or writes it."""
        with open(self.path.with_name(self.path.name + ".lock"), "a") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not self.path.exists():
                made = {"format": _FORMAT, "epsilon": self.epsilon, "delta": self.delta}
                self._write({**made, "composition": self.composition, "draws": []})
            try:
                content = json.loads(self.path.read_text())
            except (OSError, ValueError) as error:
                raise DataError(
                    f"budget {self.path}: {error}; expected the file of a PrivacyBudget"
                ) from error
            yield content

    def _check(self, content: Any) -> dict[str, Any]:
        asked = {"epsilon": self.epsilon, "delta": self.delta, "composition": self.composition}
        if not isinstance(content, dict) or not isinstance(content.get("draws"), list):
            raise DataError(f"budget {self.path}: expected the file of a PrivacyBudget")
        found = {name: content.get(name) for name in asked}
        if found != asked or content.get("format") != _FORMAT:
            raise PrivacyError(
                f"budget {self.path}: the file is of {found}, and {asked} was given; a budget stays as it is"
            )
        return content

    def _write(self, content: dict[str, Any]) -> None:
        write_atomically(self.path, (json.dumps(content, indent=1) + "\n").encode())
