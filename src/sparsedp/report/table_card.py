"""The table behind an estimator's run: what was declared of it, and which of its features the model uses."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from sparsedp.report.figure import folded
from sparsedp.report.markup import Child, Html
from sparsedp.report.numbers import count
from sparsedp.report.rendering import part
from sparsedp.report.run import ReportedRun

MOST_NAMES = 60
"""Names of kept features shown at once; more are folded away."""

MOST_BOUNDS = 8


def table_card(run: ReportedRun) -> Html | None:
    """Classes, bounds and the features kept, by name; nothing for a run that declared no features."""
    schema = run.record.get("schema") or {}
    features = schema.get("features")
    if features is None:
        return None
    kept = run.support.inputs(run.layout, features)
    names = schema.get("feature_names") or [f"feature {i}" for i in range(features)]
    facts = [("classes", _classes(schema)), ("scaling", _scaling(schema))]
    if schema.get("support"):
        facts.append(("support", str(schema["support"])))
    told = f"{count(len(kept))} of {count(features)}" if len(kept) < features else f"all {count(features)}"
    return part("table_card", facts, told, _named([str(names[i]) for i in kept]))


def _classes(schema: Mapping[str, Any]) -> str:
    classes = schema.get("classes")
    return "read off the labels, not declared" if classes is None else ", ".join(map(str, classes))


def _scaling(schema: Mapping[str, Any]) -> str:
    bounds = schema.get("feature_bounds")
    said = [] if bounds is None else [f"clamped to {_range(bounds[0])} .. {_range(bounds[1])}"]
    if schema.get("normalize"):
        said.append(f"each {schema['normalize']} to length one")
    return ", then ".join(said) or "as given"


def _range(side: Any) -> str:
    values = side if isinstance(side, Sequence) else [side]
    if len(set(values)) == 1:
        return f"{values[0]:g}"
    return f"({', '.join(f'{one:g}' for one in values[:MOST_BOUNDS])}{', ...' if len(values) > MOST_BOUNDS else ''})"


def _named(names: Sequence[str]) -> Child:
    shown = ", ".join(names[:MOST_NAMES]) or "none but the bias"
    if len(names) <= MOST_NAMES:
        return shown
    return [shown, folded(f"{count(len(names) - MOST_NAMES)} more", ", ".join(names[MOST_NAMES:]))]
