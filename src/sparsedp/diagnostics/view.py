"""The public state of a run that diagnostics start from."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, final

from torch import Tensor

from sparsedp.diagnostics.proxy import PureNoise, proxy_concentration, pure_noise
from sparsedp.methods.timeline import WARM_UP
from sparsedp.parameters import Support
from sparsedp.privacy.plan import Plan
from sparsedp.runs.reader import Run

_SQUARES: Mapping[str, Callable[[int], int]] = {"energy": lambda steps: steps, "coherent": lambda steps: 1}
"""How many independent squares a score averages over a warm-up; rankings not listed have no proxy energy."""


@final
@dataclass(frozen=True, slots=True)
class Proxy:
    """`rho_sig` of a run's support, and what pure noise would give."""

    seen: float
    null: PureNoise


@final
@dataclass(frozen=True, slots=True, eq=False)
class RunView:
    """The public state of a run that diagnostics start from.

    Attributes:
        plan: the run's.
        support: the last one.
        scores: what the last ranking was made from; None for random and dense methods.
        ranking: the method's ranking, as the record describes it; None for dense methods.
        learning_rate: `eta/(1 - momentum)` of SGD, what a constant gradient is moved by in the long run; None for
            other optimizers.
    """

    plan: Plan
    support: Support
    scores: Tensor | None
    ranking: Mapping[str, Any] | None
    learning_rate: float | None = None

    @classmethod
    def of(cls, run: Run) -> RunView:
        """What a run's folder holds."""
        rate = _rate(run.record["settings"]["optimizer"])
        return cls(run.plan, run.active, run.scores, run.method["ranking"], rate)

    def proxy(self) -> Proxy | None:
        """DP-visible concentration against its null; None without a warm-up or for scores that are no energies."""
        warm_up = next((phase for phase in self.plan.phases if phase.name == WARM_UP), None)
        if self.scores is None or self.ranking is None or warm_up is None:
            return None
        squares_of = _SQUARES.get(self.ranking["name"])
        if squares_of is None:
            return None
        squares = squares_of(warm_up.steps)
        null = pure_noise(self.support.size, self.support.dimension, squares)
        return Proxy(proxy_concentration(self.scores, self.support), null)


def _rate(optimizer: Mapping[str, Any]) -> float | None:
    if optimizer["class"] != "SGD" or not optimizer["groups"]:
        return None
    group = optimizer["groups"][0]
    return float(group["lr"]) / (1 - float(group.get("momentum", 0.0)))
