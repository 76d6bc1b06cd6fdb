"""Advice from what a run released: would fewer coordinates have sufficed, which, and how sure is that.

It rests on the split estimates of the warm-up (`splits.py`) alone. The ratio is chosen by progress per step at the
best step size (`criteria.py`); what the one-step criterion of TP-TopK (Prop. 5.1) says is reported beside it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, final

from scipy import special

from sparsedp.core.layout import Layout
from sparsedp.core.ratio import exact_ratio, share_of
from sparsedp.core.support import Support
from sparsedp.diagnostics.criteria import NoisyEstimate, SplitEnergies
from sparsedp.diagnostics.proxy import split_concentration
from sparsedp.diagnostics.splits import WarmupStatistics, statistics_of, why_nothing
from sparsedp.methods.choice import meaning_of, noise_ratio
from sparsedp.methods.scope import part_sizes
from sparsedp.methods.timeline import noise_on_mean
from sparsedp.methods.warmup import looked_at
from sparsedp.privacy.plan import Plan
from sparsedp.runs.reader import Run

RATIOS = (0.05, 0.1, 0.2, 0.3, 0.5, 0.7, 0.9)

CAVEATS = (
    "The estimate looks one step ahead at the weights of the warm-up. Energy moves to other coordinates as training "
    "goes on, so a support that holds more of it now need not train better over a whole run; and what a smaller "
    "support does to clipping is left out. Try it against a larger ratio before you believe it.",
    "The advice costs no privacy, but a new run on the same data does: the two budgets add up.",
)


@final
@dataclass(frozen=True, slots=True)
class Option:
    """One ranking at one ratio.

    Attributes:
        ranking: "energy", "coherent", or "random".
        ratio: k/d.
        progress: of a step, at its best size, over that of a dense step; above 1 when it pays.
        gain: noise energy saved less gradient energy lost (Prop. 5.1), over a dense step's noise energy.
    """

    ranking: str
    ratio: float
    progress: NoisyEstimate
    gain: float


@final
@dataclass(frozen=True, slots=True)
class Advice:
    """What to do, why, and how sure that is.

    Attributes:
        recommendation: one sentence.
        confidence: the probability that its main claim is right as far as noise goes, corrected for the choice
            among the options; None where it rests on public numbers alone.
        sure: that in words.
        reasons: what was found, a sentence each.
        options: everything that was compared.
        caveats: what it does not say.
    """

    recommendation: str
    confidence: float | None
    sure: str | None
    reasons: tuple[str, ...]
    options: tuple[Option, ...]
    caveats: tuple[str, ...] = CAVEATS

    def to_json(self) -> dict[str, Any]:
        """As JSON values."""
        options = [
            {
                "ranking": o.ranking,
                "ratio": o.ratio,
                "progress": o.progress.value,
                "progress_std": o.progress.std,
                "gain": o.gain,
            }
            for o in self.options
        ]
        return {
            "recommendation": self.recommendation,
            "confidence": self.confidence,
            "sure": self.sure,
            "reasons": list(self.reasons),
            "caveats": list(self.caveats),
            "options": options,
        }

    def text(self) -> str:
        """In plain words."""
        reasons = "\n".join(f"- {reason}" for reason in self.reasons)
        how_sure = "" if self.sure is None else f" (As far as noise goes: {self.sure}.)"
        return f"{self.recommendation}{how_sure}\n\n{reasons}\n\n" + "\n".join(self.caveats) + "\n"


def advise_run(folder: Path | str) -> Advice:
    """Advice from a run's folder; from public numbers alone where it kept no warm-up statistics.

    Raises:
        DataError: there is no run, it is not private, its warm-up is not over, or a file is damaged.
    """
    run = Run.open(folder)
    if run.warmup is None and run.plan.is_private and not run.warming_up:
        return _without_scores(run)
    advice = advise(statistics_of(run), run.plan)
    if not run.plan.is_private:
        return advice
    return replace(advice, reasons=(_loudness(run.plan, run.layout, run.support), *advice.reasons))


def _without_scores(run: Run) -> Advice:
    """What r alone says, and why there is no more."""
    active = run.support.size
    ratio, words = noise_ratio(run.plan, active), meaning_of(run.plan, active, whole=run.support.is_full)
    recommendation = (
        f"Public numbers alone, on the {active:,} coordinates trained: r is {ratio:.2f}, {words}. Advice on scores "
        "needs a warm-up."
    )
    reasons = (_loudness(run.plan, run.layout, run.support), f"{why_nothing(run)}.")
    return Advice(recommendation, None, None, reasons, (), CAVEATS[1:])


def _loudness(plan: Plan, layout: Layout, support: Support) -> str:
    """How loud the noise is on parts of the model: public numbers, known before any data was touched."""
    sizes = part_sizes(layout) | {"support": support.size}
    parts = ", ".join(
        f"{noise_ratio(plan, size):.2f} on {name} ({size:,})" for name, size in sizes.items() if size
    )
    words = meaning_of(plan, layout.dimension, whole=True)
    return f"A step's noise over its clip norm, r: {parts}. For all of them that is {words}."


def advise(found: WarmupStatistics, plan: Plan) -> Advice:
    """Advice for the noise of the plan's last phase."""
    noise_std = noise_on_mean(plan, plan.phases[-1])
    options = tuple(_options(found, noise_std))
    split = next(iter(found.splits.values()))
    reasons = (
        _energy_against_noise(split, noise_std),
        *(_ranking_against_chance(name, found.splits[name]) for name in found.splits),
        _about_split(plan, noise_std),
        f"Seen: {found.steps} of {found.planned} warm-up steps.",
    )
    if not options:
        return Advice(_UNKNOWN, 0.0, in_words(0.0), reasons, options)
    best = max(options, key=lambda option: option.progress.value)
    pays = best.progress.value > 1
    confidence = _corrected(abs(best.progress.value - 1), best.progress.std, len(options))
    reasons = (*reasons[:-1], _one_step(best), reasons[-1])
    return Advice(_recommendation(best, confidence, pays), confidence, in_words(confidence), reasons, options)


def in_words(confidence: float) -> str:
    """How sure, for people."""
    for least, words in ((0.997, "very sure"), (0.95, "fairly sure"), (0.8, "leaning this way")):
        if confidence >= least:
            return words
    return "noise could have made this up"


def _options(found: WarmupStatistics, noise_std: float) -> Iterator[Option]:
    """Every ranking at every ratio; none when no energy stands out from the noise."""
    for name, split in found.splits.items():
        d = split.dimension
        for ratio in RATIOS:
            k = max(1, share_of(exact_ratio(ratio), d))
            progress = split.progress(k, noise_std)
            if progress is not None:
                noise = d * noise_std**2
                yield Option(name, k / d, progress, split.gain(k, noise_std).value / noise if noise else 0.0)


_UNKNOWN = (
    "The warm-up does not tell whether fewer coordinates suffice; keep what you have, or compare seeds."
)


def _recommendation(best: Option, confidence: float, pays: bool) -> str:
    if confidence < 0.8:
        return _UNKNOWN
    if not pays:
        return "Keep every coordinate: no ranking holds enough of the gradient in few coordinates to pay."
    share = f"{best.ratio:.0%} of them" + (", the least tried" if best.ratio <= RATIOS[0] else "")
    return (
        f"Fewer coordinates suffice: train {share}, ranked by {best.ranking}, and tune the "
        f"learning rate again; a step then makes about {best.progress.value:.1f} times the progress of a dense one."
    )


def _one_step(best: Option) -> str:
    change = "falls" if best.gain > 0 else "rises"
    return (
        f"By the one-step criterion (Prop. 5.1) the squared error {change} by {abs(best.gain):.0%} of the "
        f"dense noise with {best.ratio:.0%} of the coordinates."
    )


def _energy_against_noise(split: SplitEnergies, noise_std: float) -> str:
    total = split.energy(Support.full(split.dimension))
    noise = split.dimension * noise_std**2
    ratio, spread = (total.value / noise, total.std / noise) if noise else (math.inf, 0.0)
    return f"The gradient's energy is {ratio:.2g} of a dense step's noise energy (give or take {2 * spread:.1g})."


def _ranking_against_chance(name: str, split: SplitEnergies) -> str:
    k = max(1, split.dimension // 5)
    found = split_concentration(split, k)
    if found.share is None:
        return f"Ranking by {name}: too little energy stands out from the noise to say what it captures."
    share, std = found.share.value, found.share.std
    verdict = (
        "clearly better than chance"
        if share - 3 * std > found.active_ratio
        else "not told apart from chance"
        if share + 3 * std > found.active_ratio
        else "worse than chance"
    )
    return (
        f"Ranking by {name}: the best {found.active_ratio:.0%} hold {share:.0%} of the energy "
        f"(give or take {2 * std:.0%}), {verdict}."
    )


def _about_split(plan: Plan, noise_std: float) -> str:
    first = noise_on_mean(plan, looked_at(plan))
    if noise_std and first > 1.1 * noise_std:
        return (
            f"The warm-up was {first / noise_std:.1f} times as noisy as the main phase; with equal noise in both "
            "(the default) the ranking would be sharper."
        )
    if noise_std and first < 0.9 * noise_std:
        return (
            "The warm-up was quieter than the main phase: its ranking took budget that training then lacked."
        )
    return "Warm-up and main phase have the same noise, which is what we recommend."


def _corrected(gain: float, std: float, compared: int) -> float:
    """One-sided normal confidence, Bonferroni over what was compared."""
    if std == 0:
        return 1.0 if gain > 0 else 0.0
    return max(0.0, 1 - compared * float(special.ndtr(-gain / std)))
