"""A method as JSON values: for plans, records and checkpoints."""

from __future__ import annotations

from dataclasses import fields, is_dataclass
from enum import Enum
from typing import Any

from sparsedp.methods.method import Method

_PROSE = ("summary", "paper")
_SUPPORT_RULE = ("schedule", "active_ratio", "refresh", "clock", "granularity")


def describe(method: Method) -> dict[str, Any]:
    """Everything that decides what the method does."""
    return {name: value for name, value in _plain(method).items() if name not in _PROSE}


def support_rule(method: Method) -> dict[str, Any]:
    """How the main phase chooses its support, as a plan states it."""
    if method.ranking is None:
        return {"rule": "full"}
    row = describe(method)
    return {"rule": row["ranking"], **{name: row[name] for name in _SUPPORT_RULE}}


def _plain(value: Any) -> Any:
    if isinstance(value, Enum):
        return value.value
    if is_dataclass(value):
        return {item.name: _plain(getattr(value, item.name)) for item in fields(value)}
    if isinstance(value, tuple):
        return [_plain(item) for item in value]
    return value
