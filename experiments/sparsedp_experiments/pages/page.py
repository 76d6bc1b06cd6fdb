"""experiments/RESULTS.md: the verdicts, then every experiment."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from sparsedp._validate import NONE
from sparsedp_experiments.comparison.statistics import Estimate
from sparsedp_experiments.pages import words
from sparsedp_experiments.pages.auto import auto_section, with_auto_table
from sparsedp_experiments.pages.chart import panels_of
from sparsedp_experiments.pages.contrast import pooled
from sparsedp_experiments.pages.grids import with_grids
from sparsedp_experiments.pages.loudness import Gain, gains, loudness_section
from sparsedp_experiments.pages.noise import noise_table
from sparsedp_experiments.pages.paper import FILES, Paper, label, read_paper, text_lines
from sparsedp_experiments.pages.partition import price_table, read_partitions, trained_table
from sparsedp_experiments.pages.section import TEXTS, incomplete, section
from sparsedp_experiments.pages.study import TUNING, Study
from sparsedp_experiments.pages.summary import summary
from sparsedp_experiments.pages.tuning import tuning_section
from sparsedp_experiments.pages.verdicts import Ruling, Verdict, judge, read_claims
from sparsedp_experiments.partition.__main__ import read_config, trainings

HIDDEN = ("demo",)
"""Experiments that are not results: what `make demo` runs."""
CHAPTERS: Mapping[str, str] = {
    "tp-topk": "TP-TopK: When Do Fewer Coordinates Suffice in DP-SGD?",
    "rs": "RS: Random Sparsification",
    "adadpigu": "AdaDPIGU",
    "": "Ours",
}


def page(studies: Mapping[str, Study], root: Path) -> str:
    """The whole page."""
    shown = {name: study for name, study in studies.items() if not name.startswith(HIDDEN)}
    partitions = read_partitions(root)
    verdicts = [judge(claim, {**shown, partitions.name: partitions}) for claim in read_claims()]
    compared = _compared(studies)
    lines = [_text("introduction"), "", "## In one page", "", *summary(verdicts, compared)]
    lines += ["## Verdicts", "", _text("reading-verdicts"), ""]
    lines += [*verdict_table(verdicts), ""]
    asked = sum(1 for _ in trainings(read_config()))
    lacking = incomplete(
        [
            *((s.name, len(s.records), s.asked) for s in shown.values()),
            (partitions.name, len(partitions.records), asked),
        ]
    )
    if lacking:
        lines += ["## Not run, or partly run", "", *lacking, ""]
    for prefix, title in CHAPTERS.items():
        lines += _chapter(prefix, title, shown, verdicts, root)
    lines += loudness_section(compared)
    lines += auto_section(compared)
    lines += ["## Claims, cell by cell", "", *details(verdicts)]
    tuning = [study for study in shown.values() if study.is_tuning and study.records]
    if tuning:
        lines += ["## Tuning", ""]
        for study in tuning:
            lines += tuning_section(study)
    return "\n".join(lines).rstrip() + "\n"


def verdict_table(verdicts: Sequence[Verdict]) -> list[str]:
    """Every claim with its ruling and interval."""
    rows = []
    for verdict in verdicts:
        claim = verdict.claim
        rows.append(
            [
                f"{claim.says} *{claim.beware}*" if claim.beware else claim.says,
                f"{claim.paper}, {claim.where}",
                f"**{verdict.ruling.value}**",
                _interval(verdict),
                _basis(verdict),
            ]
        )
    return words.markdown_table(["claim", "whose", "verdict", "interval", "decided by"], rows)


def details(verdicts: Sequence[Verdict]) -> list[str]:
    """The contrast of every claim in every place it was measured."""
    lines = []
    for verdict in verdicts:
        if verdict.ruling is Ruling.NOT_RUN:
            continue
        claim = verdict.claim
        versus = f" Strongest rival: {verdict.rival}." if verdict.rival else ""
        lines += [f"**{claim.says}** {_capital(claim.decides)}.{versus}", ""]
        rows = [
            [
                f"`{part.study}`",
                words.place_text(part.place) or NONE,
                str(len(part.values)),
                words.difference_text(part.estimate, claim.metric),
            ]
            for part in verdict.parts
        ]
        lines += [*words.markdown_table(["experiment", "where", "seeds", "difference"], rows), ""]
    return lines


def context_tables(paper: Paper) -> list[str]:
    """What a paper reports of methods that are not here: a row for each, a column for each epsilon."""
    lines: list[str] = []
    for table in paper.tables:
        if table.context:
            place = table.keys.index("epsilon")
            columns = list(dict.fromkeys(key[place] for key in table.rows))
            rests = list(dict.fromkeys((*key[:place], *key[place + 1 :]) for key in table.rows))
            found = {
                rest: [table.rows.get((*rest[:place], one, *rest[place:])) for one in columns]
                for rest in rests
            }
            rows = [
                [*rest, *(words.paper_text(number, "accuracy") for number in found[rest])] for rest in rests
            ]
            names = [key for key in table.keys if key != "epsilon"]
            headings = [*names, *(f"epsilon {label(one)}" for one in columns)]
            lines += [f"{table.where}, {table.what}:", "", *words.markdown_table(headings, rows), ""]
    return lines


def guide(text: str, studies: Mapping[str, Study]) -> str:
    """docs/fine-tuning.md with its experiments' tables, and what `method="auto"` would have done."""
    return with_grids(with_auto_table(text, _compared(studies)), studies)


def _compared(studies: Mapping[str, Study]) -> list[Gain]:
    """Sparse methods beside dense training, in every experiment that is a result."""
    return gains(s for name, s in studies.items() if not s.is_tuning and not name.startswith(HIDDEN))


def claims_of(study: Study, verdicts: Sequence[Verdict]) -> list[str]:
    """What an experiment says about the claims it helps to decide, as a list."""
    lines = []
    for verdict in verdicts:
        own = [part for part in verdict.parts if part.study == study.name]
        found = pooled(own) if len(own) < len(verdict.parts) else None
        if own:
            here = "" if found is None else f"; here alone {_difference(found[0], verdict.claim.metric)}"
            lines.append(
                f"- {verdict.claim.says} **{_capital(verdict.ruling.value)}**, {_interval(verdict)} "
                f"({verdict.claim.decides}){here}."
            )
    return ["What it says about the claims:", "", *lines, ""] if lines else []


def _chapter(
    prefix: str, title: str, studies: Mapping[str, Study], verdicts: Sequence[Verdict], root: Path
) -> list[str]:
    own = [
        study
        for name, study in sorted(studies.items())
        if study.records and not study.is_tuning and _prefix(name) == prefix
    ]
    lines = [f"## {title}", ""]
    if prefix:
        paper = read_paper(prefix)
        lines += [f"{paper.reference}.", "", *text_lines(paper), ""]
        lines += context_tables(paper)
    lines += _COMPUTED[prefix](root) if prefix in _COMPUTED else []
    if not own:
        return [*lines, "No experiment of this part has records yet.", ""]
    for study in own:
        drawn = f"../results/{study.name}/figure.svg" if panels_of(study) else None
        tuning = [name for name in studies if name.startswith(study.name) and name.endswith(TUNING)]
        lines += section(study, tuning, drawn, claims_of(study, verdicts))
    return lines


def _noise_section(root: Path) -> list[str]:
    heading = "### AdaDPIGU Table 3: the noise for its epsilons"
    return [heading, "", *noise_table(root), "", _text("adadpigu-table3"), ""]


def _partition_section(root: Path) -> list[str]:
    heading = "### RS Table 3: Poisson sampling against partitions"
    return [heading, "", *price_table(), "", *trained_table(read_partitions(root)), _text("rs-table3"), ""]


_COMPUTED: Mapping[str, Callable[[Path], list[str]]] = {"adadpigu": _noise_section, "rs": _partition_section}
"""What needs no training, by paper."""


def _text(name: str) -> str:
    return (TEXTS / f"{name}.md").read_text(encoding="utf-8").strip()


def _prefix(name: str) -> str:
    return next((prefix for prefix in FILES if name.startswith(f"{prefix}-")), "")


def _interval(verdict: Verdict) -> str:
    return NONE if verdict.pooled is None else _difference(verdict.pooled, verdict.claim.metric)


def _difference(found: Estimate, metric: str) -> str:
    return f"{words.difference_text(found, metric)} {words.unit_text(metric)}".strip()


def _capital(text: str) -> str:
    return text[0].upper() + text[1:]


def _basis(verdict: Verdict) -> str:
    names = ", ".join(f"`{one}`" for one in dict.fromkeys(e.experiment for e in verdict.claim.evidence))
    if verdict.pooled is None:
        return f"{verdict.claim.decides}; {names}"
    cells = f"{verdict.used} cell{'s' * (verdict.used > 1)}, {words.seeds_text(verdict.pooled.count)}"
    used = ", ".join(f"`{name}`" for name in dict.fromkeys(part.study for part in verdict.parts))
    return f"{verdict.claim.decides}; {used}, {cells}"
