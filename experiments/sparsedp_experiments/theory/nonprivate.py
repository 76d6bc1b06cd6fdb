"""The mark that every value derived from un-noised gradients wears, and how such values are written down."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Generic, Literal, TypeVar, final

from sparsedp.errors import SparseDPError
from sparsedp_experiments.theory.nonprivate_file import Diagnostics, write_diagnostics

T = TypeVar("T")
U = TypeVar("U")
V = TypeVar("V")


@final
@dataclass(frozen=True, slots=True)
class NonPrivate(Generic[T]):
    """A value that touched data without noise. Not for release, and not for choosing anything in a private run.

    Attributes:
        value: the value itself; taking it out is a deliberate act.
        touched: what it was computed from, in words.
    """

    value: T
    touched: str

    def __post_init__(self) -> None:
        if not self.touched.strip():
            raise SparseDPError("NonPrivate: say what the value touched, for example 'gradients of 512 rows'")

    @property
    def banner(self) -> str:
        """The sentence to show wherever the value is shown."""
        return f"Not private: computed from {self.touched}, without noise. Do not publish it or choose by it."

    def map(self, function: Callable[[T], U]) -> NonPrivate[U]:
        """What follows from the value, marked as it is."""
        return NonPrivate(function(self.value), self.touched)

    def join(self, other: NonPrivate[U], function: Callable[[T, U], V]) -> NonPrivate[V]:
        """What follows from two marked values; it touched what both touched."""
        touched = self.touched if self.touched == other.touched else f"{self.touched}; {other.touched}"
        return NonPrivate(function(self.value, other.value), touched)


@final
@dataclass(frozen=True, slots=True)
class Line:
    """One named line of a figure."""

    name: str
    x: Sequence[float]
    y: Sequence[float]

    def to_json(self) -> dict[str, Any]:
        """As the report reads it."""
        if len(self.x) != len(self.y) or not len(self.x):
            raise SparseDPError(
                f"line {self.name!r}: got {len(self.x)} x and {len(self.y)} y, expected as many"
            )
        return {"name": self.name, "x": _finite(self.x, self.name), "y": _finite(self.y, self.name)}


@final
@dataclass(frozen=True, slots=True)
class Figure:
    """Lines over one axis, or clouds of points, for the report's non-private section."""

    title: str
    x: str
    y: str
    lines: Sequence[Line] = field(repr=False)
    note: str = ""
    kind: Literal["lines", "points"] = "lines"


@final
@dataclass(frozen=True, slots=True)
class Findings:
    """What one part of a diagnosis found.

    Attributes:
        values: by name.
        figures: to draw.
        remarks: what could not be computed and why, or what a value leaves out. They hold no numbers from data.
    """

    values: Mapping[str, NonPrivate[float]] = field(default_factory=dict)
    figures: tuple[NonPrivate[Figure], ...] = ()
    remarks: tuple[str, ...] = ()

    def __or__(self, other: Findings) -> Findings:
        """Both parts."""
        return Findings(
            {**self.values, **other.values},
            (*self.figures, *other.figures),
            (*self.remarks, *other.remarks),
        )


def write_nonprivate(
    folder: Path | str,
    values: Mapping[str, NonPrivate[float]],
    figures: Sequence[NonPrivate[Figure]] = (),
    remarks: Sequence[str] = (),
) -> Path:
    """Write marked values to `nonprivate.json` in a run's folder, each with its banner; gives the file.

    **Privacy.** The file is not private and nothing else in the folder refers to it; delete it before sharing a run.
    **Edge cases.** An earlier file is replaced whole. A value that is not finite is an error.
    """
    shown = tuple(
        {"name": name, "value": _finite([marked.value], name)[0], "note": marked.banner}
        for name, marked in values.items()
    )
    drawn = tuple(_figure(marked) for marked in figures)
    return write_diagnostics(folder, Diagnostics(shown, drawn, tuple(remarks)))


def _figure(marked: NonPrivate[Figure]) -> dict[str, Any]:
    shown = marked.value
    return {
        "title": shown.title,
        "kind": shown.kind,
        "note": f"{shown.note} {marked.banner}".strip(),
        "x": shown.x,
        "y": shown.y,
        "series": [line.to_json() for line in shown.lines],
    }


def _finite(numbers: Sequence[float], name: str) -> list[float]:
    plain = [float(number) for number in numbers]
    if not all(map(math.isfinite, plain)):
        raise SparseDPError(f"{name!r} holds a number that is not finite; leave it out")
    return plain
