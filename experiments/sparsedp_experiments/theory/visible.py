"""What the papers' theory says of a run, from its releases and public numbers: free, as `sparsedp diagnose` is."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, final

import torch

from sparsedp.diagnostics import RunView, WarmupStatistics, shown_size, split_concentration, statistics_of
from sparsedp.runs.run import Run
from sparsedp_experiments.theory.bounds import best_rate_at_most
from sparsedp_experiments.theory.misranking import (
    Pair,
    misranking_bernstein,
    misranking_chebyshev,
    misranking_coherent,
    misranking_energy,
)
from sparsedp_experiments.theory.wire import BytesSent, encode_values, traffic


@final
@dataclass(frozen=True, slots=True)
class Odds:
    """How likely the warm-up's noise is to swap an average active coordinate with an average frozen one.

    Attributes:
        larger: the active one's |G|, from the split estimate.
        smaller: the frozen one's.
        energy: the exact probability for the energy score.
        coherent: that for the coherent score.
        chebyshev: the bound of TP-TopK, Prop. 5.3, cut at 1.
        bernstein: that of its Remark B.1.
    """

    larger: float
    smaller: float
    energy: float
    coherent: float
    chebyshev: float
    bernstein: float


@final
@dataclass(frozen=True, slots=True)
class Theory:
    """What the papers' bounds say.

    Attributes:
        odds: by ranking, the odds of misranking; only where the split estimate tells the two kinds apart.
        wire: bytes of an update on the last support, its indices spread over the steps between two refreshes.
        best_rate_at_most: a bound on RS's r*, the best share of frozen coordinates; None without clip or noise.
    """

    odds: Mapping[str, Odds]
    wire: BytesSent
    best_rate_at_most: float | None

    def to_json(self) -> dict[str, Any]:
        """As JSON values."""
        return {
            "odds": {name: asdict(odds) for name, odds in self.odds.items()},
            "wire": {**asdict(self.wire), "per_step": self.wire.per_step, "share": self.wire.share},
            "best_rate_at_most": self.best_rate_at_most,
        }


def theory_of(folder: Path | str) -> Theory:
    """What the theory says of the run in a folder.

    Raises:
        DataError: there is no run, or one of its files is damaged.
    """
    run = Run.open(folder)
    view = RunView.of(run)
    found = None if run.warmup is None else statistics_of(run)
    size = shown_size(view.support)
    odds = {} if found is None else {name: _odds(found, name, size) for name in found.splits}
    return Theory({name: one for name, one in odds.items() if one is not None}, _wire(view, run), _rate(view))


def _odds(found: WarmupStatistics, ranking: str, size: int) -> Odds | None:
    split = found.splits[ranking]
    concentration, left = split_concentration(split, size), split.dimension - size
    if concentration.share is None or not left or not found.noise_std:
        return None
    inside = concentration.share.value * concentration.total.value
    larger = math.sqrt(max(inside, 0.0) / size)
    smaller = math.sqrt(max(concentration.total.value - inside, 0.0) / left)
    if not smaller < larger:
        return None
    pair = Pair(larger, smaller, found.noise_std, found.planned)
    return Odds(
        larger,
        smaller,
        energy=misranking_energy(pair),
        coherent=misranking_coherent(pair),
        chebyshev=min(1.0, misranking_chebyshev(pair)),
        bernstein=misranking_bernstein(pair),
    )


def _wire(view: RunView, run: Run) -> BytesSent:
    """Encode the last support and the weights on it, as many times as it was used."""
    flat = torch.cat([run.weights[slot.name].reshape(-1).float() for slot in run.layout])
    phase = view.plan.phases[-1]
    first = view.plan.first_step(phase.name)
    refreshes = sum(span.step >= first for span in run.spans)
    steps = max(1, phase.steps // max(1, refreshes))
    message = encode_values(view.support.gather(flat))
    return traffic([view.support] * steps, [message] * steps)


def _rate(view: RunView) -> float | None:
    phase = view.plan.phases[-1]
    if phase.clip_norm is None or not phase.noise_multiplier > 0:
        return None
    return best_rate_at_most(
        noise_multiplier=phase.gradient_noise,
        dimension=view.support.dimension,
        batch_size=view.plan.expected_batch_size(phase),
    )
