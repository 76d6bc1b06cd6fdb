"""The rule's rate against the best of the tuned ones, on test data: which settings, and the table of it."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping
from typing import Any

from sparsedp.methods.plan_config import PlanSpec
from sparsedp.optimizers.factory import rate_for_table
from sparsedp_experiments.comparison.statistics import Estimate, estimate
from sparsedp_experiments.pages import words
from sparsedp_experiments.rates.records import DELTA, EPOCHS, usual_batch
from sparsedp_experiments.rates.simulate import Setting

Key = tuple[str, bool, float]
"""Table, whether records have length one, and epsilon."""
CLIP = 1.0
MARGIN = 0.002


def key_of(record: Mapping[str, Any]) -> Key:
    """What a record is of."""
    return record["table"], record["unit_norm"], record["epsilon"]


def tuned(found: Iterable[Mapping[str, Any]], clip: float | None) -> dict[Key, Setting]:
    """The dense setting with the best mean on the validation split, at the usual batch size and this clip norm."""
    sums: dict[Key, dict[Setting, list[float]]] = defaultdict(lambda: defaultdict(list))
    for record in found:
        if record["stage"] == "tune" and record["batch_size"] == usual_batch(record["units"]):
            for (step, bound, ratio), score in zip(record["settings"], record["auc"], strict=True):
                if ratio is None and clip in (None, bound):
                    sums[key_of(record)][Setting(step, bound)].append(score)
    return {
        key: max(scores, key=lambda one: sum(scores[one]) / len(scores[one])) for key, scores in sums.items()
    }


def rule(units: int, coordinates: int, unit_norm: bool, epsilon: float) -> Setting:
    """What the classifier takes by itself."""
    batch = usual_batch(units)
    plan = PlanSpec.asked(
        "dp-sgd",
        units=units,
        epsilon=epsilon,
        delta=DELTA,
        epochs=EPOCHS,
        batch_size=batch,
        max_grad_norm=CLIP,
    ).plan()
    return Setting(rate_for_table(coordinates, coordinates - 1, unit_norm=unit_norm)(plan), CLIP)


def before(units: int) -> Setting:
    """What it took until version 0.2."""
    return Setting(0.2 * math.sqrt(usual_batch(units) / 128), CLIP)


def final_table(found: Iterable[Mapping[str, Any]]) -> list[str]:
    """A row for each table and budget: rates, and what the rule loses against the tuned ones, by test AUC."""
    groups: dict[Key, list[Mapping[str, Any]]] = defaultdict(list)
    for record in found:
        if record["stage"] == "final":
            groups[key_of(record)].append(record)
    headings = ["table", "records", "epsilon", "rate: rule", "tuned", "AUC: rule", "tuned less rule",
                "rate and clip tuned less rule", "old rule less rule"]  # fmt: skip
    rows = []
    for (table, unit_norm, epsilon), records in sorted(groups.items()):
        own, at_clip = (records[0]["settings"][place][0] for place in (0, 1))
        scores = [estimate([record["auc"][0] for record in records])]
        scores += [
            estimate([record["auc"][place] - record["auc"][0] for record in records]) for place in (1, 2, 3)
        ]
        rows.append(
            [f"`{table}`", "length one" if unit_norm else "as encoded", f"{epsilon:g}", f"{own:.2g}",
             f"{at_clip:.2g}", f"{scores[0].mean:.4f}", *map(_difference, scores[1:])]
        )  # fmt: skip
    return words.markdown_table(headings, rows)


def _difference(found: Estimate) -> str:
    if found.low is None or found.high is None:
        return f"{found.mean:+.4f}"
    return f"{found.mean:+.4f} ({found.low:+.4f} to {found.high:+.4f})"
