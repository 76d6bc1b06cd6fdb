"""Where a support pays: every sparse method beside the dense run of its place, and what `auto` would have chosen."""

from __future__ import annotations

import json
import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from scipy import stats

from sparsedp.methods.auto import MANY, MAX_NOISE_RATIO, MIN_NOISE_RATIO
from sparsedp_experiments.runs.claims import SEEDS, above
from sparsedp_experiments.runs.results import CONFIDENCE, Estimate, Record, estimate, sign_of
from sparsedp_experiments.runs.tables import Study, noise_ratio
from sparsedp_experiments.runs.text import NONE, markdown_table, settings_text

DENSE = "dp-sgd"
LEAST_RATIO = 0.2
"""Supports smaller than this are ablations of size, not the methods' settings."""
BANDS = ((0.0, 0.1), (0.1, 0.2), (0.2, 0.4), (0.4, math.inf))
AUTO = ("tp-topk", 0.4)
"""What `method="auto"` takes of a network where r is high: a method and its ratio."""
MARGIN = 0.5
"""Points that `method="auto"` may lose against dense training."""
SHOWN = 6
"""Gains and losses in the list."""


@dataclass(frozen=True, slots=True)
class Gain:
    """What one sparse method gained over dense training in one cell."""

    study: str  # the experiment
    task: str  # data set and model
    epsilon: float  # the budget
    place: str  # its labels on all axes of its experiment but epsilon
    arm: str  # method, ratio and options, as JSON
    r: float  # of the dense run: noise multiplier times sqrt(d) over the batch size
    d: int  # coordinates of the model
    seeds: tuple[float, ...]  # the paired differences, in points; above zero is better

    @property
    def mean(self) -> float:
        return float(np.mean(self.seeds))


Cells = dict[tuple[tuple[str, str], ...], dict[int, Record]]
"""Records by the labels of their cell, then by seed."""


def gains(studies: Iterable[Study]) -> list[Gain]:
    """Every sparse method beside the dense run of its place: the same epsilon, unit, data and model."""
    found: list[Gain] = []
    for study in studies:
        for cells in _places(study).values():
            dense = _dense(study, cells)
            if dense is not None:
                found += _compared(study, cells, dense)
    return sorted(found, key=lambda gain: (gain.r, gain.study, gain.arm))


def _places(study: Study) -> Mapping[str, Cells]:
    """The private records of a study by what runs to be compared must share, whatever they were tuned to."""
    axis = study.experiment.contrast.axis
    places: dict[str, Cells] = defaultdict(lambda: defaultdict(dict))
    for record in study.records:
        if record["private"] and record["target_epsilon"]:
            labels = {name: label for name, label in record["cell"].items() if name != axis}
            shared = [
                labels,
                *(record[name] for name in ("dataset", "model", "target_epsilon", "unit", "units")),
            ]
            places[json.dumps(shared, sort_keys=True)][tuple(record["cell"].items())][record["seed"]] = record
    return places


def _dense(study: Study, cells: Cells) -> tuple[tuple[str, str], ...] | None:
    """The cell to compare with: the study's baseline if that is dense, else the only dense DP-SGD, else none."""
    dense = {cell: next(iter(runs.values())) for cell, runs in cells.items() if _ratio(runs) == 1.0}
    contrast = study.experiment.contrast
    for cell in dense:
        if dict(cell).get(contrast.axis) == contrast.baseline:
            return cell
    plain = [cell for cell, record in dense.items() if record["method"] == DENSE]
    return plain[0] if len(plain) == 1 else None


def _ratio(runs: Mapping[int, Record]) -> float:
    """The share of coordinates asked for; where it was left to the method, the share there was."""
    record = next(iter(runs.values()))
    asked = record["settings"].get("active_ratio")
    return float(record["k"] / record["d"] if asked is None or isinstance(asked, str) else asked)


def _compared(study: Study, cells: Cells, dense: tuple[tuple[str, str], ...]) -> Iterator[Gain]:
    known, metric = cells[dense], study.experiment.metric
    for cell, runs in cells.items():
        both = sorted(set(known) & set(runs))
        if not both or not LEAST_RATIO <= _ratio(runs) < 1.0:
            continue
        one, other = known[both[0]], runs[both[0]]
        r, settings = noise_ratio(one), other["settings"]
        if r is None:
            continue
        pairs = ((runs[seed]["metrics"][metric], known[seed]["metrics"][metric]) for seed in both)
        arm = [other["method"], settings.get("active_ratio"), settings.get("options")]
        yield Gain(
            study=study.name,
            task=f"{one['dataset']}, {one['model']}{' (JPEG)' if study.is_jpeg else ''}",
            epsilon=one["target_epsilon"],
            place=json.dumps([pair for pair in cell if pair[0] != "epsilon"]),
            arm=json.dumps(arm, sort_keys=True),
            r=r,
            d=one["d"],
            seeds=tuple(100 * sign_of(metric) * (sparse - full) for sparse, full in pairs),
        )


def where_it_pays(found: Sequence[Gain]) -> list[str]:
    """The cells in which the interval of sparse less dense training leaves zero out, the clearest first."""
    judged = [(gain, estimate(gain.seeds)) for gain in found if len(gain.seeds) >= SEEDS]
    better = sorted((one for one in judged if (one[1].low or 0) > 0), key=lambda one: -(one[1].low or 0))
    worse = sorted((one for one in judged if (one[1].high or 0) < 0), key=lambda one: one[1].high or 0)
    sure = surviving(judged)
    rows = [
        [gain.task, f"{gain.epsilon:g}", _arm(gain), f"{gain.r:.2f}", _points(own)]
        for gain, own in (*better[:SHOWN], *worse[:SHOWN])
    ]
    by_chance = round((1 - CONFIDENCE) / 2 * len(judged))
    headings = ["task", "epsilon", "sparse method", "r", "less dense DP-SGD, points"]
    return [
        f"**Where sparsity pays.** In {len(judged)} places a sparse method (ratio {LEAST_RATIO:g} and more) stands "
        f"beside dense DP-SGD with three seeds or more. The interval by itself is above zero in {len(better)} and "
        f"below it in {len(worse)}; of {len(judged)} looks at nothing, {by_chance} would be on each side. Correcting "
        f"for the number of looks (Holm) leaves {sum(one in better for one in sure)} gains and "
        f"{sum(one in worse for one in sure)} losses. The clearest of both, each by itself:",
        "",
        *markdown_table(headings, rows),
        "",
    ]


def surviving(judged: Sequence[tuple[Gain, Estimate]]) -> list[tuple[Gain, Estimate]]:
    """Those that differ from zero when all looks are to be right together 95 times in 100 (Holm's correction)."""
    values = {place: _p_value(found) for place, (_, found) in enumerate(judged)}
    kept = []
    for rank, place in enumerate(sorted(values, key=values.__getitem__)):
        if not values[place] <= (1 - CONFIDENCE) / (len(judged) - rank):
            break
        kept.append(judged[place])
    return kept


def _p_value(found: Estimate) -> float:
    """Of Student's two-sided test against zero."""
    if not found.std:
        return 0.0 if found.mean else 1.0
    return float(2 * stats.t.sf(abs(found.mean) * math.sqrt(found.count) / found.std, found.count - 1))


def _arm(gain: Gain) -> str:
    method, ratio, options = json.loads(gain.arm)
    more = f", {settings_text({'options': options}, ['options'])}" if options else ""
    return f"{method}{'' if ratio is None else f' {ratio:g}'}{more}"


def _points(found: Estimate) -> str:
    return f"{found.mean:+.2f} ({found.low:+.2f} to {found.high:+.2f})"


def r_section(found: Sequence[Gain], note: str) -> list[str]:
    """Does r, the norm of a step's noise over the clip norm, predict what sparsity gains? A table by bands of r."""
    rows = []
    for low, high in BANDS:
        own = [gain for gain in found if low <= gain.r < high]
        name = f"{low:g} to {high:g}" if math.isfinite(high) else f"{low:g} and more"
        mean = f"{np.mean([gain.mean for gain in own]):+.2f}" if own else "-"
        up = f"{sum(gain.mean > 0 for gain in own)} of {len(own)}"
        rows.append([name, str(len(own)), str(len({gain.task for gain in own})), mean, up])
    columns = [
        "r of a dense step",
        "cells",
        "tasks",
        "mean gain of sparse over dense, points",
        "cells above zero",
    ]
    table = markdown_table(columns, rows)
    return ["### Does r predict what sparsity gains?", "", note, "", *table, "", r_verdict(found), ""]


def r_verdict(found: Sequence[Gain]) -> str:
    """Whether the gain rises with r: over all cells, and within experiments, where task and settings are the same."""
    rank = stats.spearmanr([gain.r for gain in found], [gain.mean for gain in found])
    rises = _rises(found)
    within = estimate(rises)
    up = sum(rise > 0 for rise in rises)
    return (
        f"Over all {len(found)} cells the rank correlation of r and gain is {float(rank.statistic):+.2f}. Within an "
        f"experiment, from its smallest r to its largest, the gain rises in {up} of {len(rises)} experiments, by "
        f"{within.mean:+.2f} points on average ({within.low:+.2f} to {within.high:+.2f}, one value an experiment). "
        f"That louder noise makes sparsity pay more: **{above(within).value}**; where the gain turns positive "
        "differs from task to task, so r tells when to try it, not that it will help."
    )


def _rises(found: Sequence[Gain]) -> list[float]:
    """Of each experiment, the mean over its methods of the gain at the largest r less that at the smallest."""
    by_place: dict[tuple[str, str, str], list[Gain]] = defaultdict(list)
    for gain in found:
        by_place[gain.study, gain.task, gain.place].append(gain)
    by_study: dict[str, list[float]] = defaultdict(list)
    for (study, _, _), own in by_place.items():
        if len({gain.epsilon for gain in own}) > 1:
            by_study[study].append(max(own, key=lambda g: g.r).mean - min(own, key=lambda g: g.r).mean)
    return [float(np.mean(values)) for values in by_study.values()]


def auto_section(found: Sequence[Gain]) -> list[str]:
    """What `method="auto"` would have chosen in every cell there is, and what that gained or lost against dense."""
    cells: dict[tuple[str, str, float, float, int], dict[tuple[str, float | None], Gain]] = defaultdict(dict)
    for gain in found:
        method, ratio, options = json.loads(gain.arm)
        own = cells[gain.study, gain.task, gain.epsilon, gain.r, gain.d]
        if not options:
            own[method, ratio] = gain
    answered = {cell[1:] for cell, arms in cells.items() if AUTO in arms}
    kept = {cell: arms for cell, arms in cells.items() if AUTO in arms or cell[1:] not in answered}
    loud = {
        cell: arms
        for cell, arms in kept.items()
        if MIN_NOISE_RATIO <= cell[3] < MAX_NOISE_RATIO and cell[4] >= MANY
    }
    quiet, tasks = len(kept) - len(loud), len({cell[1] for cell in kept if cell not in loud})
    rows = []
    for (study, task, epsilon, r, _), arms in sorted(loud.items(), key=lambda item: item[0][3]):
        answer = _auto_answer(arms.get(AUTO))
        rows.append([f"`{study}`", task, f"{epsilon:g}", f"{r:.2f}", *answer])
    headings = [
        "experiment", "task", "epsilon", "r", "auto less dense, points", f"loses more than {MARGIN:g}?",
    ]  # fmt: skip
    return [
        '### What `method="auto"` would have done',
        "",
        f"From public numbers alone, auto takes {AUTO[0]} at ratio {AUTO[1]:g} where r is {MIN_NOISE_RATIO:g} to "
        f"{MAX_NOISE_RATIO:g} and the model has {MANY:,} coordinates or more (since these runs it has another rule "
        "for "
        f"linear models, which docs/wide.md tests). In {quiet} of the {len(kept)} cells "
        f"({tasks} tasks) that were measured this is not so: there it trains all coordinates, and is the baseline "
        f"itself. In the others a loss of more than {MARGIN:g} points would break its promise.",
        "",
        *markdown_table(headings, rows),
        "",
    ]


def _auto_answer(gain: Gain | None) -> tuple[str, str]:
    if gain is None:
        return NONE, "not run"
    seen = estimate(gain.seeds)
    if seen.low is None or seen.high is None:
        return f"{seen.mean:+.2f} (one seed)", "not resolved"
    return _points(seen), "no" if seen.low > -MARGIN else "**yes**" if seen.high < -MARGIN else "not resolved"
