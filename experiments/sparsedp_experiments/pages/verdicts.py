"""Verdicts: does a claim hold, by the interval of the contrast that decides it."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from types import MappingProxyType
from typing import Any

from sparsedp.errors import SparseDPError
from sparsedp_experiments.comparison.statistics import CONFIDENCE, Estimate
from sparsedp_experiments.pages.contrast import Contrast, Labels, Part, parts_of, pooled
from sparsedp_experiments.pages.paper import CLAIMS, PAPERS, label
from sparsedp_experiments.pages.study import Measured
from sparsedp_experiments.runs.config import read_toml

_KEYS = {"id", "paper", "where", "says", "decides", "kind", "margin", "metric", "evidence", "beware"}
_EVIDENCE = {"experiment", "better", "worse", "at", "less_at", "best", "among", "only"}


SEEDS = 3
"""Fewer decide nothing."""
LEVEL = 0.005
"""Half a point of accuracy, or 0.005 AUC: what is nearer to zero does not matter, as in claims of equality."""


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
    """Where a claim is tested.

    Attributes:
        experiment: its name.
        contrast: what is measured; for "best" against the first rival.
        best: for "best", the labels that should be on top.
        among: for "best", the axes on which the rivals lie.
    """

    experiment: str
    contrast: Contrast | None
    best: Labels
    among: tuple[str, ...]
    only: Mapping[str, tuple[str, ...]]


@dataclass(frozen=True, slots=True)
class Claim:
    """A sentence of a paper, and what decides it.

    Attributes:
        id: its name.
        paper: whose it is.
        where: the place in the paper.
        says: the sentence in our words.
        decides: the contrast in words.
        kind: "above", "equal", "no-loss" or "best".
        margin: for "equal" how far apart equal things may be, for "no-loss" how much no loss is.
        metric: of the records.
        evidence: the experiments that test it.
        beware: what must be said beside its verdict; empty for nothing.
    """

    id: str
    paper: str
    where: str
    says: str
    decides: str
    kind: str
    margin: float
    metric: str
    evidence: tuple[Evidence, ...]
    beware: str = ""


@dataclass(frozen=True, slots=True)
class Verdict:
    """A claim, the ruling, and the numbers behind it.

    Attributes:
        claim: what was tested.
        ruling: what the records say.
        pooled: the contrast over all parts; None if nothing was run.
        parts: the contrast in every place.
        used: how many parts are in the pooled number.
        rival: for "best", the strongest of the others.
    """

    claim: Claim
    ruling: Ruling
    pooled: Estimate | None
    parts: tuple[Part, ...]
    used: int
    rival: str | None = None


def read_claims(file: Path = PAPERS / f"{CLAIMS}.toml") -> tuple[Claim, ...]:
    """Every claim, in the file's order.

    Raises:
        SparseDPError: a claim that cannot be read, or an id twice.
    """
    claims = tuple(_claim(content) for content in read_toml(file)["claim"])
    names = [claim.id for claim in claims]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise SparseDPError(f"{file.name}: {twice} are there twice; give every claim an id of its own")
    return claims


def judge(claim: Claim, studies: Mapping[str, Measured]) -> Verdict:
    """The verdict of the records there are."""
    if claim.kind == "best":
        return _judge_best(claim, studies)
    parts = tuple(
        part
        for one in claim.evidence
        if one.contrast is not None and one.experiment in studies
        for part in parts_of(one.contrast, studies[one.experiment], claim.metric)
    )
    found = pooled(parts)
    if found is None:
        return Verdict(claim, Ruling.NOT_RUN, None, (), 0)
    whole, used = found
    return Verdict(claim, _RULES[claim.kind](whole, claim.margin), whole, parts, used)


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
    leads = {
        rival: lead for rival, parts in by_rival.items() if (lead := pooled(parts, confidence)) is not None
    }
    if not leads:
        return Verdict(claim, Ruling.NOT_RUN, None, (), 0)
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
    for labels in itertools.product(*(study.axes.get(axis, []) for axis in evidence.among)):
        rival = dict(zip(evidence.among, labels, strict=True))
        if all(evidence.best.get(axis) == value for axis, value in rival.items()):
            continue
        if any(rival.get(axis, wanted[0]) not in wanted for axis, wanted in evidence.only.items()):
            continue
        contrast = Contrast((evidence.best,), ({**evidence.best, **rival},), None, None, evidence.only)
        name = ", ".join(f"{axis} {value}" for axis, value in rival.items())
        found[name] = parts_of(contrast, study, metric)
    return found


def _claim(content: Mapping[str, Any]) -> Claim:
    if not set(content) <= _KEYS or content.get("kind", "above") not in (*_RULES, "best"):
        raise SparseDPError(
            f"claim {content.get('id')}: got {sorted(content)}, expected some of {sorted(_KEYS)}"
        )
    kind = content.get("kind", "above")
    return Claim(
        content["id"],
        content["paper"],
        content["where"],
        content["says"],
        content["decides"],
        kind,
        float(content.get("margin", 0.0)),
        content.get("metric", "accuracy"),
        tuple(_evidence(one, kind) for one in content["evidence"]),
        content.get("beware", ""),
    )


def _evidence(content: Mapping[str, Any], kind: str) -> Evidence:
    if not set(content) <= _EVIDENCE:
        raise SparseDPError(f"evidence: got {sorted(content)}, expected some of {sorted(_EVIDENCE)}")
    only = {axis: tuple(map(label, values)) for axis, values in content.get("only", {}).items()}
    if kind == "best":
        best = _labels(content["best"])
        return Evidence(content["experiment"], None, best, tuple(content["among"]), only)
    at, less_at = (_labels(content[key]) if key in content else None for key in ("at", "less_at"))
    contrast = Contrast(_several(content["better"]), _several(content["worse"]), at, less_at, only)
    return Evidence(content["experiment"], contrast, {}, (), only)


def _several(value: Any) -> tuple[Labels, ...]:
    return tuple(map(_labels, value if isinstance(value, list) else [value]))


def _labels(value: Mapping[str, Any]) -> Labels:
    return {axis: label(found) for axis, found in value.items()}


_RULES: Mapping[str, Callable[[Estimate, float], Ruling]] = MappingProxyType(
    {"above": above, "equal": equal, "no-loss": no_loss}
)
