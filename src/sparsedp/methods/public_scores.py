"""Scores that a user gives: what is known of a model without looking at the data."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, final

import torch
from torch import Tensor

from sparsedp.errors import SparseDPError
from sparsedp.methods.ranking import find
from sparsedp.parameters import ParameterLayout

NEVER = float("-inf")
"""The score of what is never active."""


@final
@dataclass(frozen=True, slots=True, eq=False)
class PublicScores:
    """Scores that a user knows without looking at the data: counts of a public corpus, magnitudes, names, a mask.

    Built by `of`: a value for each pattern of parameter names or word for structure (`methods.scope`), which is one
    number for whole parameters, one number for each row, or one for each entry. Larger is better. A mask counts as 1
    where it is true; where it is false, where a score is -inf, and what no name means is never active. Where rows are
    ranked, one with such an entry comes last.

    Formal guarantees: Not charged: scores must not come from the protected records.
    """

    values: Mapping[str, Tensor] = field(repr=False)

    @classmethod
    def of(cls, given: Mapping[str, Any]) -> PublicScores:
        """Scores from real numbers, tensors or arrays by names of parameters, at least one."""
        if not isinstance(given, Mapping) or not given or not all(isinstance(name, str) for name in given):
            raise SparseDPError(
                f"public_scores: got {given!r}, expected a mapping from names of parameters to scores, such as "
                '{"embedding.weight": counts} or {"bias": 1.0}'
            )
        return cls({name: _as_scores(name, value) for name, value in given.items()})

    @property
    def checksum(self) -> str:
        """SHA-256 of names, shapes and values: plan and record name the scores by it."""
        digest = hashlib.sha256()
        for name in sorted(self.values):
            value = self.values[name].contiguous()
            digest.update(f"{name} {list(value.shape)} ".encode())
            digest.update(value.numpy().astype("<f8").tobytes())
        return digest.hexdigest()

    def by_coordinate(self, layout: ParameterLayout) -> Tensor:
        """One score for each of the d coordinates; of several names that mean a parameter the last counts."""
        found = torch.full((layout.dimension,), NEVER, dtype=torch.float64)
        for name, value in self.values.items():
            for slot in find(layout, (name,), "public_scores"):
                if value.dim() and value.shape not in (slot.shape, slot.shape[:1]):
                    raise SparseDPError(
                        f"public_scores: got shape {tuple(value.shape)} for {name!r}, expected one number, one for "
                        f"each row of {slot.name!r} ({slot.shape[:1]}) or one for each entry ({slot.shape})"
                    )
                by_row = value.dim() == 1 and len(slot.shape) > 1
                shaped = value.reshape(-1, *[1] * (len(slot.shape) - 1)) if by_row else value
                found[slot.span] = shaped.expand(slot.shape).reshape(-1)
        return found


@final
@dataclass(frozen=True, slots=True, eq=False)
class Knowledge:
    """What is public when a ranking is made.

    Attributes:
        weights: gives the d weights as they are now: the initial ones, or what releases alone have made of them.
        scores: the user's, if any.
    """

    weights: Callable[[], Tensor] | None = None
    scores: PublicScores | None = None

    def magnitudes(self) -> Tensor:
        """The size of each weight as it is now."""
        if self.weights is None:
            raise SparseDPError(
                "a ranking by the weights' magnitude needs them: give SupportScheduler(..., "
                "known=Knowledge(weights=...))"
            )
        return self.weights().detach().abs().to("cpu", torch.float64)


def _as_scores(name: str, value: Any) -> Tensor:
    try:
        scores = torch.as_tensor(value).detach().to("cpu")
        wide = torch.where(scores, 1.0, NEVER) if scores.dtype == torch.bool else scores
    except (TypeError, ValueError, RuntimeError) as error:
        raise SparseDPError(
            f"public_scores: got {type(value).__name__} for {name!r}, expected numbers"
        ) from error
    if wide.is_complex() or bool(wide.isnan().any()):
        raise SparseDPError(f"public_scores: got a complex number or NaN for {name!r}, expected real numbers")
    return wide.double()
