"""Does a claim of a paper hold? By the interval of the contrast that decides it (`papers/claims.toml`).

A contrast is the mean of some cells less the mean of others, for every place and seed of its experiments. Over
several places the pooled number has one value per seed, the mean over places.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import Any

from sparsedp_experiments.runs.grid import label, read_toml
from sparsedp_experiments.runs.papers import PAPERS
from sparsedp_experiments.runs.partition import Partitions
from sparsedp_experiments.runs.results import CONFIDENCE, Estimate, Record, estimate, sign_of
from sparsedp_experiments.runs.tables import Study
from sparsedp_experiments.runs.text import Cell

SEEDS = 3
"""Fewer decide nothing."""
LEVEL = 0.005
"""Half a point of accuracy, or 0.005 AUC: what is nearer to zero does not matter, as in claims of equality."""

Labels = Mapping[str, str]
"""A label on some axes."""


Measured = Study | Partitions
"""What a claim can be tested on."""


class Ruling(Enum):
    """What the records say about a claim."""

    HOLDS = "holds"
    SLIGHT = "holds, by less than half a point"
    FAILS = "does not hold"
    LEVEL = "makes no difference"
    BLIND = "cannot be seen"
    OPEN = "not resolved"
    NOT_RUN = "not run"


@dataclass(frozen=True, slots=True)
class Evidence:
    """Where a claim is tested, and the contrast that is measured there."""

    experiment: str  # its name
    better: tuple[Labels, ...] = ()  # what the claim puts above
    worse: tuple[Labels, ...] = ()  # what it puts below
    at: Labels | None = None  # where the gap between them is taken; None for a plain gap
    less_at: Labels | None = None  # where a second gap is taken and subtracted; with `at`
    only: Mapping[str, tuple[str, ...]] = field(default_factory=dict)  # labels that count, by axis
    best: Labels = field(default_factory=dict)  # for the kind "best", what should be on top
    among: tuple[str, ...] = ()  # the axes on which its rivals lie

    @property
    def terms(self) -> tuple[tuple[float, Labels], ...]:
        """Weighted cells whose sum is the contrast."""
        gap = [(1 / len(self.better), one) for one in self.better]
        gap += [(-1 / len(self.worse), one) for one in self.worse]
        if self.at is None or self.less_at is None:
            return tuple(gap)
        first = [(weight, {**labels, **self.at}) for weight, labels in gap]
        return (*first, *((-weight, {**labels, **self.less_at}) for weight, labels in gap))

    def excludes(self, place: Cell) -> bool:
        return any(place.get(axis, wanted[0]) not in wanted for axis, wanted in self.only.items())


@dataclass(frozen=True, slots=True)
class Claim:
    """A sentence of a paper, and what decides it."""

    id: str  # its name
    paper: str  # whose it is
    where: str  # the place in the paper
    says: str  # the sentence in our words
    decides: str  # the contrast in words
    evidence: tuple[Evidence, ...]  # the experiments that test it
    kind: str = "above"  # "above", "equal", "no-loss" or "best"
    margin: float = 0.0  # for "equal" how far apart equal things may be, for "no-loss" how much no loss is
    metric: str = "accuracy"  # of the records
    beware: str = ""  # what must be said beside its verdict; empty for nothing


@dataclass(frozen=True, slots=True)
class Part:
    """A contrast in one place of one experiment: the experiment, the labels of the free axes, a value per seed."""

    study: str
    place: Cell
    values: Mapping[int, float]


@dataclass(frozen=True, slots=True)
class Verdict:
    """A claim, the ruling, the contrast pooled over parts and in each, and for "best" the strongest of the others."""

    claim: Claim
    ruling: Ruling
    pooled: Estimate | None = None
    parts: tuple[Part, ...] = ()
    used: int = 0
    rival: str | None = None


def read_claims(file: Path = PAPERS / "claims.toml") -> tuple[Claim, ...]:
    """Every claim, in the file's order."""
    return tuple(
        Claim(**{**content, "evidence": tuple(map(_evidence, content["evidence"]))})
        for content in read_toml(file)["claim"]
    )


def judge(claim: Claim, studies: Mapping[str, Measured]) -> Verdict:
    """The verdict of the records there are."""
    if claim.kind == "best":
        return _judge_best(claim, studies)
    parts = tuple(
        part
        for one in claim.evidence
        if one.experiment in studies
        for part in parts_of(one, studies[one.experiment], claim.metric)
    )
    found = pooled(parts)
    if found is None:
        return Verdict(claim, Ruling.NOT_RUN)
    return Verdict(claim, _RULES[claim.kind](found[0], claim.margin), found[0], parts, found[1])


def parts_of(evidence: Evidence, study: Measured, metric: str) -> tuple[Part, ...]:
    """The contrast at every combination of the free axes where all its cells share a seed; better is above zero."""
    scores, sign = _scores(study.records, metric), sign_of(metric)
    named = {axis for _, labels in evidence.terms for axis in labels}
    free = [axis for axis in study.axes if axis not in named]
    parts = []
    for labels in itertools.product(*(study.axes[axis] for axis in free)):
        place = dict(zip(free, labels, strict=True))
        terms = [(w, scores.get(frozenset({**place, **own}.items()), {})) for w, own in evidence.terms]
        common = sorted(set.intersection(*(set(values) for _, values in terms)))
        if common and not evidence.excludes(place):
            values = {seed: sign * sum(w * values[seed] for w, values in terms) for seed in common}
            parts.append(Part(study.name, place, values))
    return tuple(parts)


def pooled(parts: Sequence[Part], confidence: float = CONFIDENCE) -> tuple[Estimate, int] | None:
    """One value per seed, the mean over parts, and how many parts went in; None without any.

    A part with a single seed waits for its second where others have more; seeds are those all parts share.
    """
    enough = [part for part in parts if len(part.values) > 1] or list(parts)
    common = sorted(set.intersection(*(set(part.values) for part in enough))) if enough else []
    if not common:
        return None
    means = [sum(part.values[seed] for part in enough) / len(enough) for seed in common]
    return estimate(means, confidence), len(enough)


def above(found: Estimate, margin: float = 0.0) -> Ruling:
    """Holds if the whole interval is above zero, fails if all of it is below.

    One between zero and `LEVEL` holds, and nobody would notice. One that covers zero and stays within `LEVEL` of it
    says that there is no difference to speak of; one that is nothing but zero, that the metric cannot tell the two
    apart.
    """
    if found.low is None or found.high is None or found.count < SEEDS:
        return Ruling.OPEN
    if found.low > 0:
        return Ruling.HOLDS if found.high > LEVEL else Ruling.SLIGHT
    if found.high < 0:
        return Ruling.FAILS
    if found.low == found.high == 0:
        return Ruling.BLIND
    return Ruling.LEVEL if max(-found.low, found.high) <= LEVEL else Ruling.OPEN


def equal(found: Estimate, margin: float) -> Ruling:
    """Holds if the whole interval is within the margin, fails if all of it is outside on one side."""
    if found.low is None or found.high is None or found.count < SEEDS:
        return Ruling.OPEN
    if -margin <= found.low and found.high <= margin:
        return Ruling.HOLDS
    return Ruling.FAILS if found.low > margin or found.high < -margin else Ruling.OPEN


def no_loss(found: Estimate, margin: float) -> Ruling:
    """Holds if the whole interval is above a loss of the margin, fails if all of it is below."""
    few = found.count < SEEDS
    if few or found.low is None or found.high is None or found.low <= -margin <= found.high:
        return Ruling.OPEN
    return Ruling.HOLDS if found.low > -margin else Ruling.FAILS


_RULES: Mapping[str, Callable[[Estimate, float], Ruling]] = {
    "above": above,
    "equal": equal,
    "no-loss": no_loss,
}


def _judge_best(claim: Claim, studies: Mapping[str, Measured]) -> Verdict:
    """Holds if the intervals of the lead over all others are above zero, fails if one is all below.

    With m others every interval has the confidence 1 - 0.05/m, so that all of them hold together 95 times in 100.
    The number shown is the lead over the strongest other. While some other is not run, the claim cannot hold.
    """
    by_rival: dict[str, list[Part]] = {}
    for one in claim.evidence:
        if one.experiment in studies:
            for rival, parts in _against_all(one, studies[one.experiment], claim.metric).items():
                by_rival.setdefault(rival, []).extend(parts)
    confidence = 1 - (1 - CONFIDENCE) / max(1, len(by_rival))
    pools = ((rival, pooled(parts, confidence)) for rival, parts in by_rival.items())
    leads = {rival: lead for rival, lead in pools if lead is not None}
    if not leads:
        return Verdict(claim, Ruling.NOT_RUN)
    rulings = {rival: above(lead) for rival, (lead, _) in leads.items()}
    failed = [rival for rival, ruling in rulings.items() if ruling is Ruling.FAILS]
    strongest = min(failed or leads, key=lambda rival: leads[rival][0].mean)
    complete = len(leads) == len(by_rival) and set(rulings.values()) <= {Ruling.HOLDS, Ruling.SLIGHT}
    ruling = Ruling.FAILS if failed else Ruling.HOLDS if complete else Ruling.OPEN
    shown, used = leads[strongest]
    return Verdict(claim, ruling, shown, tuple(by_rival[strongest]), used, strongest)


def _against_all(evidence: Evidence, study: Measured, metric: str) -> dict[str, tuple[Part, ...]]:
    """The lead of the claimed best over every other choice; empty for those not run."""
    found: dict[str, tuple[Part, ...]] = {}
    best = evidence.best
    for labels in itertools.product(*(study.axes.get(axis, []) for axis in evidence.among)):
        rival = dict(zip(evidence.among, labels, strict=True))
        if all(best.get(axis) == value for axis, value in rival.items()) or evidence.excludes(rival):
            continue
        contrast = Evidence(evidence.experiment, (best,), ({**best, **rival},), only=evidence.only)
        name = ", ".join(f"{axis} {value}" for axis, value in rival.items())
        found[name] = parts_of(contrast, study, metric)
    return found


def _scores(records: Iterable[Record], metric: str) -> dict[frozenset[tuple[str, str]], dict[int, float]]:
    """The metric of every cell by seed."""
    found: dict[frozenset[tuple[str, str]], dict[int, float]] = {}
    for record in records:
        value = record["metrics"].get(metric)
        if value is not None:
            found.setdefault(frozenset(record["cell"].items()), {})[record["seed"]] = float(value)
    return found


def _evidence(content: Mapping[str, Any]) -> Evidence:
    found = {**content, "among": tuple(content.get("among", ()))}
    for key in ("better", "worse"):
        given = content.get(key, [])
        found[key] = tuple(map(_labels, given if isinstance(given, list) else [given]))
    found |= {key: _labels(content[key]) for key in ("at", "less_at", "best") if key in content}
    found["only"] = {axis: tuple(map(label, values)) for axis, values in content.get("only", {}).items()}
    return Evidence(**found)


def _labels(value: Mapping[str, Any]) -> Labels:
    return {axis: label(found) for axis, found in value.items()}
