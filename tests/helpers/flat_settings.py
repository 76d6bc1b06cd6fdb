"""Settings of `fit` told flat, as tables of cases have them, put where `fit` takes them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from sparsedp import DataConfig
from sparsedp.methods.method import OF_THE_PLAN
from sparsedp.training.planning import changed_method

_DATA = ("rows_per_unit", "max_physical_batch", "num_workers", "collate_fn", "sharded")


def placed(settings: dict[str, Any]) -> dict[str, Any]:
    """The settings with those of the method in `method`, and those of loading in `data`."""
    rest = dict(settings)
    changes = rest.pop("options", {}) | {
        name: rest.pop(name) for name in ("active_ratio", *OF_THE_PLAN) if name in rest
    }
    loading = {name: rest.pop(name) for name in _DATA if name in rest}
    if changes:
        rest["method"] = changed_method(rest.get("method", "auto"), **changes)
    if loading:
        rest["data"] = replace(rest.get("data", DataConfig()), **loading)
    return rest
