"""How many coordinates a method trains in the end, as far as public sizes tell."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, final

from sparsedp._validate import exact_ratio
from sparsedp.errors import SparseDPError
from sparsedp.methods.method import Method
from sparsedp.methods.rankings import RankedBy
from sparsedp.methods.schedules import active_count
from sparsedp.methods.scope import Names, Parts, part_sizes, size_of
from sparsedp.parameters import Layout

ALL = "all"
"""What the number of all trained scalars is called among the parts."""


@final
@dataclass(frozen=True, slots=True)
class ModelSize:
    """What is known of a model's size.

    Attributes:
        parts: number of scalars by part: "all", and words for structure such as "head"; not known ones are left out.
        layout: the parameters themselves, where there is a model. Then every part can be counted.
    """

    parts: Mapping[str, int]
    layout: Layout | None = None

    def __post_init__(self) -> None:
        most = self.parts.get(ALL)
        for part, count in self.parts.items():
            if most is not None and count > most:
                raise SparseDPError(
                    f"{part}: got {count:,} parameters of a model that has {most:,}; expected at most all of them; "
                    "correct one of the two numbers"
                )

    @classmethod
    def of(cls, layout: Layout) -> ModelSize:
        """The size of a model whose parameters are known."""
        return cls(part_sizes(layout), layout)

    def unknown(self, names: Names) -> Names:
        """Those of the parts whose size is not known."""
        return () if self.layout is not None else tuple(name for name in names if name not in self.parts)


@final
@dataclass(frozen=True, slots=True)
class ActiveCount:
    """How many coordinates are active in the end.

    Attributes:
        count: None where it is not known.
        at_most: whether it is a bound: two parts of known sizes may overlap.
        missing: the parts whose sizes would have to be known. None are missing where training itself decides.
    """

    count: int | None = None
    at_most: bool = False
    missing: Names = ()

    def to_json(self) -> dict[str, Any]:
        """As JSON values."""
        return {"count": self.count, "at_most": self.at_most, "missing": list(self.missing)}


def count_active(method: Method, size: ModelSize) -> ActiveCount:
    """How many coordinates a method has active in its last period."""
    if method.ranking is not None and method.ranking.source is RankedBy.STEP_ROWS:
        return ActiveCount()
    scope = method.scope or (ALL,)
    missing = size.unknown((*scope, *method.always))
    if missing:
        return ActiveCount(missing=missing)
    if size.layout is not None:
        parts = Parts.of(size.layout, method.scope, method.always)
        always, ranked, at_most = size_of(parts.always), parts.ranked_size, False
    else:
        together = sum(size.parts[name] for name in scope)
        inside = min(together, size.parts.get(ALL, together))
        always = min(sum(size.parts[name] for name in method.always), inside)
        ranked, at_most = inside - always, len(scope) > 1 or len(method.always) > 1
    best = active_count(exact_ratio(method.active_ratio), ranked) if ranked else 0
    return ActiveCount(always + best, at_most)
