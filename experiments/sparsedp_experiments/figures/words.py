"""Numbers in the gallery's text: `{{name argument ...}}` stands for a value of the records."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

from sparsedp.errors import SparseDPError
from sparsedp.report.numbers import significant
from sparsedp_experiments.runs.results import estimate
from sparsedp_experiments.figures.config import record_name
from sparsedp_experiments.figures.plots.support import at_epsilon, at_ratio
from sparsedp_experiments.figures.store import Records

MISSING = "(not measured yet)"
_WORD = re.compile(r"\{\{(\w[\w-]*)((?: [^ {}]+)*)\}\}")


def filled(text: str, records: Records, more: Mapping[str, Callable[..., str]] = MappingProxyType({})) -> str:
    """A text with every `{{...}}` replaced.

    Raises:
        SparseDPError: it names a function that does not exist.
    """
    functions = {**FUNCTIONS, **more}

    def word(found: re.Match[str]) -> str:
        name, arguments = found[1], found[2].split()
        if name not in functions:
            raise SparseDPError(f"{found[0]}: there is no {name!r}; there are {', '.join(functions)}")
        return functions[name](records, *arguments)

    return _WORD.sub(word, text)


def with_interval(values: Sequence[float]) -> str:
    """A mean and its 95 % interval."""
    found = estimate(values)
    if found.low is None or found.high is None:
        return short(found.mean)
    return f"{short(found.mean)} ({short(found.low)} to {short(found.high)})"


def short(value: float) -> str:
    """Shares near 1 need their decimals, other numbers three digits."""
    return f"{value:.3f}" if 0.01 <= abs(value) < 1.5 else significant(value, 3)


def support(records: Records, study: str, epsilon: str, ratio: str, score: str, quantity: str) -> str:
    """`support STUDY EPSILON RATIO SCORE QUANTITY`: over seeds, with interval."""
    found = at_epsilon(records[study], float(epsilon))
    values = [at_ratio(record, float(ratio))["by"][score].get(quantity) for record in found]
    known = [value for value in values if value is not None]
    return with_interval(known) if known else MISSING


def top(records: Records, study: str, epsilon: str, kind: str, share: str) -> str:
    """`top STUDY EPSILON KIND SHARE`: energy in the largest coordinates; blanks of the kind are underscores."""
    found = [
        r for r in at_epsilon(records[study], float(epsilon)) if kind.replace("_", " ") in r["concentration"]
    ]
    if not found:
        return MISSING
    place = found[0]["shares"].index(float(share))
    return with_interval([r["concentration"][kind.replace("_", " ")][place] for r in found])


def field(records: Records, study: str, epsilon: str, name: str) -> str:
    """`field STUDY EPSILON NAME`: a plain number of a warm-up, over seeds."""
    values = [record[name] for record in at_epsilon(records[study], float(epsilon)) if name in record]
    return with_interval(values) if values else MISSING


def value(records: Records, study: str, point: str, path: str) -> str:
    """`value STUDY POINT a.b.0`: one number of one record; without a choice of points it is `all`."""
    for record in records[study]:
        if record_name(record["point"]) == point:
            found: Any = record
            for step in path.split("."):
                found = found[int(step)] if isinstance(found, list) else found[step]
            return short(found) if isinstance(found, float) else str(found)
    return MISSING


def mean(records: Records, study: str, name: str) -> str:
    """`mean STUDY NAME`: over all records of a study."""
    values = [record[name] for record in records[study]]
    return with_interval(values) if values else MISSING


def mse(records: Records, clipping: str, multiplier: str, ratio: str) -> str:
    """`mse CLIPPING NOISE RATIO`: of the inversion attack, over pictures."""
    wanted = (clipping, float(multiplier), float(ratio))
    values = [
        attack["mse"]
        for record in records["inversion"]
        for attack in record["attacks"]
        if (attack["clipping"], attack["noise_multiplier"], attack["ratio"]) == wanted
    ]
    return with_interval(values) if values else MISSING


FUNCTIONS: Mapping[str, Callable[..., str]] = MappingProxyType(
    {"support": support, "top": top, "field": field, "value": value, "mean": mean, "mse": mse}
)
