"""ICD-9-CM diagnosis codes to slots, from the public code ranges alone."""

from __future__ import annotations

import re
from dataclasses import dataclass

_CODE = re.compile(r"([VE]?)0*(\d{1,3})(?:\.(\d{0,2}))?")


@dataclass(frozen=True, slots=True)
class CodeRange:
    """Consecutive three-digit classes with one prefix."""

    prefix: str
    first: int
    last: int

    @property
    def size(self) -> int:
        """Number of classes."""
        return self.last - self.first + 1


RANGES = (CodeRange("", 1, 999), CodeRange("V", 1, 91), CodeRange("E", 0, 30), CodeRange("E", 800, 999))
"""The classification: diseases and injuries, supplementary factors (V), external causes (E)."""

_DIABETES = 250
_DIABETES_KINDS = 10
_DIABETES_TYPES = 4
_DIABETES_START = sum(part.size for part in RANGES)

OTHER = _DIABETES_START + _DIABETES_KINDS * _DIABETES_TYPES
"""The slot of everything that is not a code."""

SLOTS = OTHER + 1
"""One slot for each three-digit class, for each of the 40 diabetes codes 250.00 to 250.93, and for anything else."""


def slot(code: str) -> int:
    """The slot of a code: its three-digit class, or for diabetes with digits after the point, the full code."""
    match = _CODE.fullmatch(code.strip().upper())
    if match is None:
        return OTHER
    prefix, number, detail = match[1], int(match[2]), match[3]
    if prefix == "" and number == _DIABETES and detail:
        kind, type_ = int(detail[0]), int(detail[1:] or 0)
        return _DIABETES_START + _DIABETES_TYPES * kind + type_ if type_ < _DIABETES_TYPES else OTHER
    start = 0
    for part in RANGES:
        if part.prefix == prefix and part.first <= number <= part.last:
            return start + number - part.first
        start += part.size
    return OTHER


def name(place: int) -> str:
    """The code a slot stands for."""
    start = 0
    for part in RANGES:
        if place < start + part.size:
            return f"{part.prefix}{part.first + place - start:0{2 if part.prefix == 'V' else 3}d}"
        start += part.size
    if place < OTHER:
        kind, type_ = divmod(place - _DIABETES_START, _DIABETES_TYPES)
        return f"{_DIABETES}.{kind}{type_}"
    return "other"
