"""What tuning chose: for each method and task, the cell with the best mean on the validation split."""

from __future__ import annotations

from collections.abc import Mapping

from sparsedp_experiments.pages import words
from sparsedp_experiments.pages.paper import label
from sparsedp_experiments.pages.study import Cell, Study
from sparsedp_experiments.runs.table import Row

KEYS = ("dataset", "model", "epsilon", "method")
"""Settings that are not tuned: a choice is made for each combination of them."""

Key = tuple[str, ...]


def tuning_section(study: Study) -> list[str]:
    """The grid, and the best choice for each task and method."""
    metric = study.experiment.metric
    axes = "; ".join(
        f"{axis.name}: {', '.join(level.label for level in axis.levels)}" for axis in study.experiment.axes
    )
    done = f"{len(study.records)} of {study.asked} runs, {words.hours_text(study)}"
    jpeg = f" {words.JPEG}" if words.is_cifar(study) else ""
    lines = [
        f"### {study.experiment.title}",
        "",
        f"{study.experiment.description} Grid: {axes}; {words.seeds_text(len(study.experiment.seeds))}; "
        "on a validation split of the training data. Below, the best by mean "
        f"{words.metric_title(metric)}. None of it is in epsilon. "
        f"Config `configs/{study.name}.toml`, records in `results/{study.name}/records` ({done}).{jpeg}".strip(),
        "",
    ]
    if study.rows:
        shown = [name for name in KEYS if len({_key(study, cell, (name,)) for cell in study.cells}) > 1]
        best = best_choices(study, shown)
        headings = [*shown, "best of", "chosen", words.metric_title(metric), "seeds"]
        rows = [
            [
                *key,
                str(count),
                words.place_text(_rest(row.cell, shown)),
                words.mean_text(row.score, metric),
                str(row.score.count),
            ]
            for key, (row, count) in best.items()
        ]
        lines += [*words.markdown_table(headings, rows), ""]
        lines += shared_choices(study)
    if not study.is_complete:
        lines += [f"**Partly run.** {sum(study.missing().values())} runs are missing.", ""]
    return lines


def best_choices(study: Study, names: list[str]) -> Mapping[Key, tuple[Row, int]]:
    """The row with the highest mean for every combination of some settings, and among how many it is."""
    best: dict[Key, tuple[Row, int]] = {}
    for row in study.rows:
        key = _key(study, row.cell, names)
        rival, count = best.get(key, (row, 0))
        best[key] = (row if row.score.mean > rival.score.mean else rival, count + 1)
    return best


def shared_choices(study: Study) -> list[str]:
    """The choice with the best mean over methods, for each task: what one setting for all methods would be."""
    if "method" not in study.axes:
        return []
    scores: dict[Key, dict[Key, list[float]]] = {}
    shown = [name for name in KEYS[:-1] if len({_key(study, cell, (name,)) for cell in study.cells}) > 1]
    for row in study.rows:
        rest = {axis: found for axis, found in row.cell.items() if axis not in (*shown, "method")}
        choices = scores.setdefault(_key(study, row.cell, shown), {})
        choices.setdefault((words.place_text(rest),), []).append(row.score.mean)
    rows = []
    for key, choices in scores.items():
        most = max(map(len, choices.values()))
        means = {choice[0]: sum(found) / most for choice, found in choices.items() if len(found) == most}
        best = max(means, key=lambda choice: means[choice])
        rows.append([*key, best, words.value_text(means[best], study.experiment.metric), str(most)])
    headings = [
        *shown,
        "best for all methods together",
        words.metric_title(study.experiment.metric),
        "methods",
    ]
    return [*words.markdown_table(headings, rows), ""]


def _key(study: Study, cell: Cell, names: list[str] | tuple[str, ...]) -> Key:
    settings = study.settings_of(cell)
    return tuple(label(settings.get(name)) for name in names)


def _rest(cell: Cell, shown: list[str]) -> Cell:
    return {axis: found for axis, found in cell.items() if axis not in shown}
