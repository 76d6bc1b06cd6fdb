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
from sparsedp.parameters import ParameterLayout, ParameterSlice

NEVER = float("-inf")
"""The score of what is never active."""


@final
@dataclass(frozen=True, slots=True, eq=False)
class PublicScores:
    """Scores that a user knows without looking at the data: counts of a public corpus, magnitudes, names, a mask.

    Built by `of`: a value for each pattern of parameter names or word for structure (`methods.scope`), which is one
    number for whole parameters, one number for each row, or one for each entry. Larger is better. A mask counts as 1
    where it is true; where it is false, where a score is -inf, and what no name means is never active.

    Formal guarantees: Not charged: scores must not come from the protected records.
    """

    values: Mapping[str, Tensor] = field(repr=False)

    @classmethod
    def of(cls, given: Mapping[str, Any]) -> PublicScores:
        """Scores from numbers, tensors or arrays.

        Raises:
            SparseDPError: no score at all, one that is no real number, or scores without the names of parameters.
        """
        _check_names(given)
        if not given:
            raise SparseDPError("public_scores: got nothing, expected a score for some parameters")
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

    def by_row(self, layout: ParameterLayout, slots: tuple[ParameterSlice, ...]) -> Tensor:
        """One score for each row of some parameters, numbered through: the mean over the row's entries.

        Raises:
            SparseDPError: some entries of a row are never active, and others are.
        """
        found = self._by_slot(layout)
        return torch.cat([torch.empty(0, dtype=torch.float64), *(_rows(slot, found) for slot in slots)])

    def by_coordinate(self, layout: ParameterLayout) -> Tensor:
        """One score for each of the d coordinates."""
        found = self._by_slot(layout)
        return torch.cat([_entries(slot, found) for slot in layout])

    def _by_slot(self, layout: ParameterLayout) -> dict[str, Tensor]:
        """The score of each parameter that some name means; of several names the last counts."""
        found = {}
        for name, value in self.values.items():
            for slot in find(layout, (name,), "public_scores"):
                if value.dim() and value.shape not in (slot.shape, slot.shape[:1]):
                    raise SparseDPError(
                        f"public_scores: got shape {tuple(value.shape)} for {name!r}, expected one number, one for "
                        f"each row of {slot.name!r} ({slot.shape[:1]}) or one for each entry ({slot.shape})"
                    )
                found[slot.name] = value
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
        """The size of each weight as it is now.

        Raises:
            SparseDPError: nobody gave the weights.
        """
        if self.weights is None:
            raise SparseDPError(
                "a ranking by the weights' magnitude needs them: give SupportScheduler(..., "
                "known=Knowledge(weights=...))"
            )
        return self.weights().detach().abs().to("cpu", torch.float64)


def _check_names(given: object) -> None:
    example = '{"embedding.weight": counts} or {"bias": 1.0}'
    if not isinstance(given, Mapping):
        raise SparseDPError(
            f"public_scores: got {type(given).__name__}, expected a mapping from names of parameters to scores, "
            f"such as {example}"
        )
    for name in given:
        if not isinstance(name, str):
            raise SparseDPError(
                f"public_scores: got the key {name!r} of type {type(name).__name__}, expected the name of a "
                f"parameter as text, such as {example}"
            )


def _as_scores(name: str, value: Any) -> Tensor:
    try:
        scores = torch.as_tensor(value).detach().to("cpu")
    except (TypeError, ValueError, RuntimeError) as error:
        raise SparseDPError(
            f"public_scores: got {type(value).__name__} for {name!r}, expected numbers"
        ) from error
    if scores.is_complex():
        raise SparseDPError(
            f"public_scores: got complex numbers for {name!r}, expected real ones; give their sizes, scores.abs()"
        )
    wide = torch.where(scores, 1.0, NEVER).double() if scores.dtype == torch.bool else scores.double()
    if bool(wide.isnan().any()):
        raise SparseDPError(f"public_scores: a score for {name!r} is NaN, expected numbers")
    return wide


def _rows(slot: ParameterSlice, found: Mapping[str, Tensor]) -> Tensor:
    count = slot.shape[0] if slot.shape else 1
    value = found.get(slot.name)
    if value is None or value.dim() == 0:
        return torch.full((count,), NEVER if value is None else float(value), dtype=torch.float64)
    if value.dim() == 1:
        return value
    by_row = value.reshape(count, -1)
    never = by_row == NEVER
    partly = int((never.any(1) & ~never.all(1)).sum())
    if partly:
        raise SparseDPError(
            f"public_scores: {partly} of the {count} rows of {slot.name!r} are false or -inf in some entries and not "
            "in others, and rows are ranked whole; mask whole rows, or use granularity=Granularity.COORDINATES"
        )
    return by_row.mean(1)


def _entries(slot: ParameterSlice, found: Mapping[str, Tensor]) -> Tensor:
    value = found.get(slot.name, torch.tensor(NEVER, dtype=torch.float64))
    by_row = value.dim() == 1 and len(slot.shape) > 1
    shaped = value.reshape(-1, *[1] * (len(slot.shape) - 1)) if by_row else value
    return shaped.expand(slot.shape).reshape(-1)
