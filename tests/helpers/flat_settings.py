"""Settings of `fit` told flat, as tables of cases have them, put where `fit` takes them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from sparsedp import DataConfig, RunConfig
from sparsedp.methods.method import OF_THE_PLAN
from sparsedp.training.planning import changed_method

_DATA = ("unit_name", "rows_per_unit", "max_physical_batch", "num_workers", "collate_fn", "sharded")
_RUN = ("total_epsilon", "continue_from", "engine", "metadata")


def placed(settings: dict[str, Any]) -> dict[str, Any]:
    """The settings with those of the method in `method`, and those of loading in `data`, of the run in `run`."""
    rest = dict(settings)
    changes = rest.pop("options", {}) | {
        name: rest.pop(name) for name in ("active_ratio", *OF_THE_PLAN) if name in rest
    }
    loading = {name: rest.pop(name) for name in _DATA if name in rest}
    run = {name: rest.pop(name) for name in _RUN if name in rest}
    if changes:
        rest["method"] = changed_method(rest.get("method", "auto"), **changes)
    if loading:
        rest["data"] = replace(rest.get("data", DataConfig()), **loading)
    if run:
        rest["run"] = RunConfig(**run)
    return rest
