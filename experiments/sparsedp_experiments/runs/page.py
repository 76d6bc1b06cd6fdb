"""experiments/RESULTS.md from the records: verdicts on claims, every experiment, where a support pays, tuning."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from sparsedp_experiments.runs.claims import SEEDS, Ruling, Verdict, judge, read_claims
from sparsedp_experiments.runs.gains import auto_section, gains, r_section, where_it_pays
from sparsedp_experiments.runs.grid import LABORATORY, label
from sparsedp_experiments.runs.papers import PAPERS, context_tables, read_paper
from sparsedp_experiments.runs.partition import (
    noise_table,
    price_table,
    read_config,
    read_partitions,
    trained_table,
)
from sparsedp_experiments.runs.partition import trainings as partition_trainings
from sparsedp_experiments.runs.results import Estimate, Row, estimate, half_width, sign_of
from sparsedp_experiments.runs.tables import JPEG, TUNING, Study, hours_text, read_studies, section
from sparsedp_experiments.runs.text import (
    NONE,
    Cell,
    difference_text,
    markdown_table,
    mean_text,
    metric_title,
    place_text,
    seeds_text,
    unit_text,
    value_text,
)

PAGE = LABORATORY / "RESULTS.md"
NOTES = PAPERS / "notes.md"
HIDDEN = ("demo",)
"""Experiments that are not results: what `make demo` runs."""
CHAPTERS: Mapping[str, str] = {
    "tp-topk": "TP-TopK: When Do Fewer Coordinates Suffice in DP-SGD?",
    "rs": "RS: Random Sparsification",
    "adadpigu": "AdaDPIGU",
    "": "Ours",
}
MANY_SEEDS = 100
"""Seeds that nobody runs."""
TUNED_FOR = ("dataset", "model", "epsilon", "method")
"""Settings that are not tuned: a choice is made for each combination of them."""


def write_page(path: Path = PAGE) -> str:
    """Make the page from the records; gives what should be known of records that are not used."""
    studies = read_studies()
    text = page(studies)
    path.write_text(text, encoding="utf-8")
    stale = {name: len(study.stale) for name, study in studies.items() if study.stale}
    return "".join(
        f"{name}: {count} records are of no run of its config; not used\n" for name, count in stale.items()
    )


def read_notes(file: Path = NOTES) -> dict[str, str]:
    """What we say by hand, by the name of the experiment or of the section."""
    parts = file.read_text(encoding="utf-8").split("\n## ")[1:]
    return {name.strip(): text.strip() for name, _, text in (part.partition("\n") for part in parts)}


def page(studies: Mapping[str, Study]) -> str:
    """The whole page."""
    notes = read_notes()
    shown = {name: study for name, study in studies.items() if not name.startswith(HIDDEN)}
    partitions = read_partitions()
    verdicts = [judge(claim, {**shown, partitions.name: partitions}) for claim in read_claims()]
    compared = gains(study for study in shown.values() if not study.is_tuning)
    asked = sum(1 for _ in partition_trainings(read_config()))
    counts = [(study.name, len(study.records), study.asked) for study in shown.values()]
    lacking = incomplete([*counts, (partitions.name, len(partitions.records), asked)])
    lines = ["# Results", "", notes["introduction"], "", "## In one page", "", notes["one-page"], ""]
    lines += [*summary(verdicts), *where_it_pays(compared), notes["where-sparsity-pays"], ""]
    lines += ["## Verdicts", "", notes["reading-verdicts"], "", *verdict_table(verdicts), ""]
    lines += ["## Not run, or partly run", "", *lacking, ""] if lacking else []
    for prefix, title in CHAPTERS.items():
        lines += _chapter(prefix, title, shown, notes)
    lines += [*r_section(compared, notes["loudness"]), *auto_section(compared)]
    lines += ["## Claims, cell by cell", "", *details(verdicts), "## Tuning", ""]
    for study in shown.values():
        lines += tuning_section(study) if study.is_tuning and study.records else []
    return "\n".join(lines).rstrip() + "\n"


def _chapter(prefix: str, title: str, studies: Mapping[str, Study], notes: Mapping[str, str]) -> list[str]:
    lines = [f"## {title}", ""]
    if prefix:
        paper = read_paper(prefix)
        lines += [
            f"{paper.reference}.",
            "",
            *(f"- {note}" for note in paper.notes),
            "",
            *context_tables(paper),
        ]
    if prefix == "adadpigu":
        lines += ["### AdaDPIGU Table 3: the noise for its epsilons", "", *noise_table(), ""]
        lines += [notes["adadpigu-table3"], ""]
    if prefix == "rs":
        lines += ["### RS Table 3: Poisson sampling against partitions", "", *price_table(), ""]
        lines += [*trained_table(read_partitions()), notes["rs-table3"], ""]
    for name, study in sorted(studies.items()):
        own = next((one for one in CHAPTERS if one and name.startswith(f"{one}-")), "")
        if own == prefix and study.records and not study.is_tuning:
            tuning = [other for other in studies if other.startswith(name) and other.endswith(TUNING)]
            lines += section(study, tuning, notes.get(name, ""))
    return lines


def incomplete(counts: Sequence[tuple[str, int, int]]) -> list[str]:
    """Experiments not run or partly run, from their name, the runs done and the runs asked for."""
    rows = [
        [f"`{name}`", f"{done} of {asked}", "partly run" if done else "not run"]
        for name, done, asked in counts
        if done < asked
    ]
    return markdown_table(["experiment", "runs done", ""], rows) if rows else []


def summary(verdicts: Sequence[Verdict]) -> list[str]:
    """How many claims hold, and the open ones with the reason."""
    count = {ruling: sum(verdict.ruling is ruling for verdict in verdicts) for ruling in Ruling}
    lines = [
        f"Of {len(verdicts)} claims, by the papers and by us, {count[Ruling.HOLDS] + count[Ruling.SLIGHT]} hold "
        f"({count[Ruling.SLIGHT]} of them by less than half a point), {count[Ruling.FAILS]} do not, "
        f"{count[Ruling.LEVEL]} are about a difference that is smaller than half a point, "
        f"{count[Ruling.BLIND]} about one that cannot be seen with the number it names, {count[Ruling.OPEN]} are not "
        f"resolved, and {count[Ruling.NOT_RUN]} are not run.",
        "",
    ]
    rows = [
        [
            f"{verdict.claim.says} ({verdict.claim.paper})",
            difference_text(verdict.pooled, verdict.claim.metric),
            " ".join(part for part in (_reason(verdict), verdict.claim.beware) if part),
        ]
        for verdict in verdicts
        if verdict.ruling is Ruling.OPEN
    ]
    head = ["**What is not resolved, and why.**", ""]
    return [*lines, *head, *markdown_table(["claim", "so far", "why"], rows), ""] if rows else lines


def _reason(verdict: Verdict) -> str:
    """What the interval lacks, and about how many seeds would settle it if mean and spread stay as they are."""
    seen = verdict.pooled
    if seen is None or seen.std is None or seen.low is None or seen.high is None or seen.count < SEEDS:
        return "Fewer than three seeds."
    if seen.low > 0 or seen.high < 0:
        return f"With {seen.count} seeds it is not zero, and it may be on either side of the margin."
    enough = (n for n in range(SEEDS, MANY_SEEDS + 1) if half_width(seen.std or 0.0, n) < abs(seen.mean))
    needed = next(enough, None)
    if needed is None:
        return (
            f"The difference is so small beside its spread that {MANY_SEEDS} seeds would not tell its sign."
        )
    return f"{seen.count} seeds; at this spread about {needed} would tell the sign."


def verdict_table(verdicts: Sequence[Verdict]) -> list[str]:
    """Every claim with its ruling and interval."""
    rows = [
        [
            f"{verdict.claim.says} *{verdict.claim.beware}*" if verdict.claim.beware else verdict.claim.says,
            f"{verdict.claim.paper}, {verdict.claim.where}",
            f"**{verdict.ruling.value}**",
            NONE if verdict.pooled is None else _with_unit(verdict.pooled, verdict.claim.metric),
            _basis(verdict),
        ]
        for verdict in verdicts
    ]
    return markdown_table(["claim", "whose", "verdict", "interval", "decided by"], rows)


def details(verdicts: Sequence[Verdict]) -> list[str]:
    """The contrast of every claim in every place it was measured."""
    lines = []
    for verdict in (one for one in verdicts if one.ruling is not Ruling.NOT_RUN):
        claim = verdict.claim
        versus = f" Strongest rival: {verdict.rival}." if verdict.rival else ""
        lines += [f"**{claim.says}** {claim.decides[0].upper()}{claim.decides[1:]}.{versus}", ""]
        rows = []
        for part in verdict.parts:
            values = [part.values[seed] for seed in sorted(part.values)]
            difference = difference_text(estimate(values), claim.metric)
            rows.append([f"`{part.study}`", place_text(part.place) or NONE, str(len(values)), difference])
        lines += [*markdown_table(["experiment", "where", "seeds", "difference"], rows), ""]
    return lines


def _basis(verdict: Verdict) -> str:
    names = ", ".join(f"`{one}`" for one in dict.fromkeys(e.experiment for e in verdict.claim.evidence))
    if verdict.pooled is None:
        return f"{verdict.claim.decides}; {names}"
    cells = f"{verdict.used} cell{'s' * (verdict.used > 1)}, {seeds_text(verdict.pooled.count)}"
    used = ", ".join(f"`{name}`" for name in dict.fromkeys(part.study for part in verdict.parts))
    return f"{verdict.claim.decides}; {used}, {cells}"


def _with_unit(found: Estimate, metric: str) -> str:
    return f"{difference_text(found, metric)} {unit_text(metric)}".strip()


def tuning_section(study: Study) -> list[str]:
    """The grid, and the best choice by mean on the validation split for each task and method."""
    metric = study.experiment.metric
    grid = "; ".join(
        f"{axis.name}: {', '.join(v.label for v in axis.levels)}" for axis in study.experiment.axes
    )
    done = f"{len(study.records)} of {study.asked} runs, {hours_text(study)}"
    said = (
        f"{study.experiment.description} Grid: {grid}; {seeds_text(len(study.experiment.seeds))}; "
        f"`sweep {study.name}` ({done}).{f' {JPEG}' if study.is_jpeg else ''}"
    )
    lines = [f"### {study.experiment.title}", "", said.strip(), ""]
    if study.rows:
        shown = [name for name in TUNED_FOR if len({_key(study, cell, [name]) for cell in study.cells}) > 1]
        rows = []
        for key, (row, count) in best_choices(study, shown).items():
            rest = {axis: found for axis, found in row.cell.items() if axis not in shown}
            score = mean_text(row.score, metric)
            rows.append([*key, str(count), place_text(rest), score, str(row.score.count)])
        headings = [*shown, "best of", "chosen", metric_title(metric), "seeds"]
        lines += [*markdown_table(headings, rows), "", *shared_choices(study)]
    if missing := study.missing():
        lines += [f"**Partly run.** {sum(missing.values())} runs are missing.", ""]
    return lines


def best_choices(study: Study, names: Sequence[str]) -> Mapping[tuple[str, ...], tuple[Row, int]]:
    """The row with the best mean for every combination of some settings, and among how many it is."""
    best: dict[tuple[str, ...], tuple[Row, int]] = {}
    sign = sign_of(study.experiment.metric)
    for row in study.rows:
        key = _key(study, row.cell, names)
        rival, count = best.get(key, (row, 0))
        best[key] = (row if sign * row.score.mean > sign * rival.score.mean else rival, count + 1)
    return best


def shared_choices(study: Study) -> list[str]:
    """The choice with the best mean over methods, for each task: what one setting for all methods would be."""
    if "method" not in study.axes:
        return []
    metric, sign = study.experiment.metric, sign_of(study.experiment.metric)
    scores: dict[tuple[str, ...], dict[str, list[float]]] = {}
    shown = [name for name in TUNED_FOR[:-1] if len({_key(study, cell, [name]) for cell in study.cells}) > 1]
    for row in study.rows:
        rest = {axis: found for axis, found in row.cell.items() if axis not in (*shown, "method")}
        choices = scores.setdefault(_key(study, row.cell, shown), {})
        choices.setdefault(place_text(rest), []).append(row.score.mean)
    rows = []
    for key, choices in scores.items():
        most = max(map(len, choices.values()))
        means = {choice: sum(found) / most for choice, found in choices.items() if len(found) == most}
        best = max(means, key=lambda choice: sign * means[choice])
        rows.append([*key, best, value_text(means[best], metric), str(most)])
    headings = [*shown, "best for all methods together", metric_title(metric), "methods"]
    return [*markdown_table(headings, rows), ""]


def _key(study: Study, cell: Cell, names: Sequence[str]) -> tuple[str, ...]:
    settings = study.settings_of(cell)
    return tuple(label(settings.get(name)) for name in names)
