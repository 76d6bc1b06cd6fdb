"""README's results: TP-TopK's main table beside ours, the hospital table, and how many claims hold."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from pathlib import Path

from sparsedp._validate import NONE, epsilon_text
from sparsedp_experiments.pages import words
from sparsedp_experiments.pages.paper import number_for
from sparsedp_experiments.pages.partition import read_partitions
from sparsedp_experiments.pages.study import Measured, Study, read_studies
from sparsedp_experiments.pages.verdicts import Ruling, judge, read_claims
from sparsedp_experiments.runs.table import Row

TABLE2 = ("tp-topk-table2-mnist", "tp-topk-table2-fashion-mnist", "tp-topk-table2-exact-cifar10")
TITLES = dict(zip(TABLE2, ("MNIST", "Fashion-MNIST", "CIFAR-10"), strict=True))
TWO = ("dp-sgd", "tp-topk")
HOSPITAL = "hospital-patient"
NOTHING = "Results on real data are on the way: no record is committed yet, so there is no number to show.\n"


def results(root: Path) -> str:
    """README's part on results, from the configs and records there are."""
    studies = read_studies(root)
    parts = [part for part in (_table2(studies), _hospital(studies)) if part]
    if not parts:
        return NOTHING
    partitions = read_partitions(root)
    return "\n".join(
        [*(f"{part}\n" for part in parts), _claims({**studies, partitions.name: partitions}), ""]
    )


def _table2(studies: Mapping[str, Study]) -> str:
    rows: list[list[str]] = []
    seeds: set[int] = set()
    for name in TABLE2:
        if name in studies:
            rows += _comparison(studies[name], seeds)
    if not rows:
        return ""
    count = words.seeds_text(max(seeds)) if len(seeds) == 1 else f"{min(seeds)} to {max(seeds)} seeds"
    jpeg = (
        f" {words.JPEG}" if any(words.is_cifar(studies[name]) for name in TABLE2 if name in studies) else ""
    )
    head = (
        "TP-TopK's main table (its Table 2), test accuracy in percent, delta 1e-5, the paper's numbers beside ours:\n"
        f"final epoch, mean ± standard deviation over {count}, settings tuned on a validation split (not in\n"
        f"epsilon).{jpeg}"
    )
    headings = [
        "data set",
        "epsilon",
        "DP-SGD: paper",
        "ours",
        "TP-TopK: paper",
        "ours",
        "ours: TP-TopK less DP-SGD",
    ]
    return "\n".join([head, "", *words.markdown_table(headings, rows)])


def _comparison(study: Study, seeds: set[int]) -> list[list[str]]:
    """A row for every epsilon: dense and two-phase, the paper's and ours."""
    metric = study.experiment.metric
    by_epsilon: dict[str, dict[str, Row]] = {}
    for row in study.rows:
        settings = study.settings_of(row.cell)
        if settings["method"] in TWO:
            by_epsilon.setdefault(epsilon_text(settings["epsilon"]), {})[settings["method"]] = row
    seeds |= {row.score.count for found in by_epsilon.values() for row in found.values()}
    lines = []
    for epsilon, found in by_epsilon.items():
        sparse = found.get(TWO[1])
        gain = NONE if sparse is None else words.difference_text(sparse.difference, metric)
        pairs = [_paper_and_ours(study, found.get(method)) for method in TWO]
        lines.append([TITLES[study.name], epsilon, *pairs[0], *pairs[1], gain])
    return lines


def _paper_and_ours(study: Study, row: Row | None) -> tuple[str, str]:
    if row is None:
        return NONE, NONE
    metric = study.experiment.metric
    number = number_for(study.name, row.cell, study.settings_of(row.cell), metric)
    return words.paper_text(number, metric), words.mean_text(row.score, metric)


def _hospital(studies: Mapping[str, Study]) -> str:
    study = studies.get(HOSPITAL)
    if study is None or not study.rows:
        return ""
    metric = study.experiment.metric
    unit = " or ".join(sorted({record["unit"] for record in study.records}))
    counts = {row.score.count for row in study.rows}
    head = (
        f"Hospital table (readmission within 30 days, epsilon per {unit}), test {words.metric_title(metric)}, "
        f"{words.seeds_text(max(counts))}, all arms tuned alike:"
    )
    axes = [axis.name for axis in study.experiment.axes]
    rows = [
        [
            *(row.cell[axis] for axis in axes),
            words.mean_text(row.score, metric),
            words.difference_text(row.difference, metric),
        ]
        for row in study.rows
    ]
    headings = [
        *axes,
        words.metric_title(metric),
        f"less {study.experiment.contrast.baseline} (95 % interval)",
    ]
    return "\n".join([head, "", *words.markdown_table(headings, rows)])


def _claims(studies: Mapping[str, Measured]) -> str:
    counts = Counter(judge(claim, studies).ruling for claim in read_claims())
    said = ", ".join(f"{counts[ruling]} {_SAID[ruling]}" for ruling in Ruling if counts[ruling])
    return (
        f"Of {sum(counts.values())} claims, the papers' and ours, tested by paired differences with 95 % intervals:\n"
        f"{said}. All tables, verdicts and what does not agree: [results](docs/results.md)."
    )


_SAID = {
    Ruling.HOLDS: "hold",
    Ruling.SLIGHT: "hold by less than half a point",
    Ruling.FAILS: "do not hold",
    Ruling.LEVEL: "are about differences under half a point",
    Ruling.BLIND: "cannot be seen with the number they name",
    Ruling.OPEN: "are not resolved by the seeds run",
    Ruling.NOT_RUN: "are not run",
}
