"""The first page of the results: what holds, what does not, where sparsity pays."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence

from scipy import stats

from sparsedp_experiments.comparison.statistics import CONFIDENCE, Estimate, estimate, half_width
from sparsedp_experiments.pages import words
from sparsedp_experiments.pages.loudness import LEAST_RATIO, Gain
from sparsedp_experiments.pages.section import TEXTS
from sparsedp_experiments.pages.verdicts import SEEDS, Ruling, Verdict

SHOWN = 6
"""Gains and losses in the list."""
MANY = 100
"""Seeds that nobody runs."""
Judged = tuple[Gain, Estimate]


def summary(verdicts: Sequence[Verdict], found: Sequence[Gain]) -> list[str]:
    """A page that can be read in five minutes."""
    count = {ruling: sum(verdict.ruling is ruling for verdict in verdicts) for ruling in Ruling}
    lines = [
        (TEXTS / "one-page.md").read_text(encoding="utf-8").strip(),
        "",
        f"Of {len(verdicts)} claims, by the papers and by us, {count[Ruling.HOLDS] + count[Ruling.SLIGHT]} hold "
        f"({count[Ruling.SLIGHT]} of them by less than half a point), {count[Ruling.FAILS]} do not, "
        f"{count[Ruling.LEVEL]} are about a difference that is smaller than half a point, "
        f"{count[Ruling.BLIND]} about one that cannot be seen with the number it names, {count[Ruling.OPEN]} are not "
        f"resolved, and {count[Ruling.NOT_RUN]} are not run.",
        "",
    ]
    titles = {
        Ruling.HOLDS: "What holds",
        Ruling.SLIGHT: "What holds, and nobody would notice (less than half a point, or 0.005 AUC)",
        Ruling.FAILS: "What does not hold",
        Ruling.LEVEL: "What makes no difference (half a point, or 0.005 AUC, either way)",
    }
    for ruling, title in titles.items():
        own = [verdict for verdict in verdicts if verdict.ruling is ruling]
        lines += [f"**{title}.**", "", *(f"- {_said(verdict)}" for verdict in own), ""] if own else []
    return [*lines, *_unresolved(verdicts), *_where_it_pays(found)]


def _said(verdict: Verdict) -> str:
    claim = verdict.claim
    beware = f" *{claim.beware}*" if claim.beware else ""
    return f"{claim.says} ({claim.paper}; {words.difference_text(verdict.pooled, claim.metric)}){beware}"


def _unresolved(verdicts: Sequence[Verdict]) -> list[str]:
    """Every claim that is open, with the reason."""
    own = [verdict for verdict in verdicts if verdict.ruling is Ruling.OPEN]
    if not own:
        return []
    rows = [
        [
            f"{verdict.claim.says} ({verdict.claim.paper})",
            words.difference_text(verdict.pooled, verdict.claim.metric),
            " ".join(part for part in (_reason(verdict), verdict.claim.beware) if part),
        ]
        for verdict in own
    ]
    return [
        "**What is not resolved, and why.**",
        "",
        *words.markdown_table(["claim", "so far", "why"], rows),
        "",
    ]


def _reason(verdict: Verdict) -> str:
    """What the interval lacks, and about how many seeds would settle it if mean and spread stay as they are."""
    seen = verdict.pooled
    if seen is None or seen.std is None or seen.low is None or seen.high is None or seen.count < SEEDS:
        return "Fewer than three seeds."
    if seen.low > 0 or seen.high < 0:
        return f"With {seen.count} seeds it is not zero, and it may be on either side of the margin."
    needed = _seeds_needed(abs(seen.mean), seen.std)
    if needed > MANY:
        return f"The difference is so small beside its spread that {MANY} seeds would not tell its sign."
    return f"{seen.count} seeds; at this spread about {needed} would tell the sign."


def _seeds_needed(mean: float, std: float) -> int:
    """The fewest seeds whose interval leaves zero out, were mean and spread to stay."""
    for count in range(SEEDS, MANY + 1):
        if half_width(std, count) < mean:
            return count
    return MANY + 1


def _where_it_pays(found: Sequence[Gain]) -> list[str]:
    """The cells in which the interval of sparse less dense training leaves zero out, the clearest first."""
    judged: list[Judged] = [(gain, estimate(gain.seeds)) for gain in found if len(gain.seeds) >= SEEDS]
    if not judged:
        return []
    better = sorted((one for one in judged if _low(one) > 0), key=lambda one: -_low(one))
    worse = sorted((one for one in judged if _high(one) < 0), key=_high)
    sure = surviving(judged)
    rows = [
        [
            gain.task,
            f"{gain.epsilon:g}",
            _arm(gain),
            f"{gain.r:.2f}",
            f"{own.mean:+.2f} ({own.low:+.2f} to {own.high:+.2f})",
        ]
        for gain, own in (*better[:SHOWN], *worse[:SHOWN])
    ]
    headings = ["task", "epsilon", "sparse method", "r", "less dense DP-SGD, points"]
    by_chance = round((1 - CONFIDENCE) / 2 * len(judged))
    return [
        f"**Where sparsity pays.** In {len(judged)} places a sparse method (ratio {LEAST_RATIO:g} and more) stands "
        f"beside dense DP-SGD with three seeds or more. The interval by itself is above zero in {len(better)} and "
        f"below it in {len(worse)}; of {len(judged)} looks at nothing, {by_chance} would be on each side. Correcting "
        f"for the number of looks (Holm) leaves {sum(one in better for one in sure)} gains and "
        f"{sum(one in worse for one in sure)} losses. The clearest of both, each by itself:",
        "",
        *words.markdown_table(headings, rows),
        "",
        (TEXTS / "where-sparsity-pays.md").read_text(encoding="utf-8").strip(),
        "",
    ]


def surviving(judged: Sequence[Judged]) -> list[Judged]:
    """Those that differ from zero when all looks are to be right together 95 times in 100 (Holm's correction)."""
    values = {place: _chance(found) for place, (_, found) in enumerate(judged)}
    kept = []
    for rank, place in enumerate(sorted(values, key=values.__getitem__)):
        if not values[place] <= (1 - CONFIDENCE) / (len(judged) - rank):
            break
        kept.append(judged[place])
    return kept


def _chance(found: Estimate) -> float:
    """The p-value of Student's two-sided test against zero."""
    if not found.std:
        return 0.0 if found.mean else 1.0
    return float(2 * stats.t.sf(abs(found.mean) * math.sqrt(found.count) / found.std, found.count - 1))


def _low(one: Judged) -> float:
    return one[1].low or 0.0


def _high(one: Judged) -> float:
    return one[1].high or 0.0


def _arm(gain: Gain) -> str:
    method, ratio, options = json.loads(gain.arm)
    more = f", {words.settings_text({'options': options}, ['options'])}" if options else ""
    return f"{method}{'' if ratio is None else f' {ratio:g}'}{more}"
