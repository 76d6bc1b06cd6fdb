"""The first page of the results: what holds, what does not, where sparsity pays."""

from __future__ import annotations

import json
from collections.abc import Sequence

from sparsedp.report.statistics import estimate
from studies.tables import words
from studies.tables.loudness import Gain
from studies.tables.section import TEXTS
from studies.tables.verdicts import SEEDS, Ruling, Verdict, above

SHOWN = 6
"""Gains and losses in the list."""


def summary(verdicts: Sequence[Verdict], found: Sequence[Gain]) -> list[str]:
    """A page that can be read in five minutes."""
    count = {ruling: sum(verdict.ruling is ruling for verdict in verdicts) for ruling in Ruling}
    lines = [
        f"Of {len(verdicts)} claims, by the papers and by us, {count[Ruling.HOLDS]} hold, {count[Ruling.FAILS]} "
        f"do not, {count[Ruling.LEVEL]} are about a difference that is smaller than half a point, "
        f"{count[Ruling.BLIND]} about one that cannot be seen with the number it names, {count[Ruling.OPEN]} are not "
        f"resolved with the seeds there are, and {count[Ruling.NOT_RUN]} are not run.",
        "",
    ]
    titles = {
        Ruling.HOLDS: "What holds",
        Ruling.FAILS: "What does not hold",
        Ruling.LEVEL: "What makes no difference (half a point, or 0.005 AUC, either way)",
    }
    for ruling, title in titles.items():
        own = [verdict for verdict in verdicts if verdict.ruling is ruling]
        lines += [f"**{title}.**", "", *(f"- {_said(verdict)}" for verdict in own), ""] if own else []
    return [*lines, *_where_it_pays(found)]


def _said(verdict: Verdict) -> str:
    claim = verdict.claim
    return f"{claim.says} ({claim.paper}; {words.difference_text(verdict.pooled, claim.metric)})"


def _where_it_pays(found: Sequence[Gain]) -> list[str]:
    """The cells in which a sparse method is above or below dense training beyond doubt, the clearest first."""
    judged = [(gain, estimate(gain.seeds)) for gain in found if len(gain.seeds) >= SEEDS]
    better = sorted((j for j in judged if above(j[1]) is Ruling.HOLDS), key=lambda j: -(j[1].low or 0))
    worse = sorted((j for j in judged if above(j[1]) is Ruling.FAILS), key=lambda j: j[1].high or 0)
    if not judged:
        return []
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
    return [
        f"**Where sparsity pays.** Of {len(judged)} comparisons of a sparse method with dense DP-SGD (three seeds "
        f"and more, each interval by itself), sparse is above beyond doubt in {len(better)}, below in {len(worse)}. "
        "The clearest of both:",
        "",
        *words.markdown_table(headings, rows),
        "",
        (TEXTS / "where-sparsity-pays.md").read_text(encoding="utf-8").strip(),
        "",
    ]


def _arm(gain: Gain) -> str:
    method, ratio, options = json.loads(gain.arm)
    more = f", {words.settings_text({'options': options}, ['options'])}" if options else ""
    return f"{method}{'' if ratio is None else f' {ratio:g}'}{more}"
