"""A comparison as an experiment: methods by budgets by seeds, everything else equal."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from sparsedp._files import read_json, write_json
from sparsedp.errors import SparseDPError
from sparsedp.methods import get_method
from sparsedp_experiments.runs.config import Experiment, parse_experiment

BASELINE = "dp-sgd"
_CLAIM = "comparison.json"


def comparison(
    name: str,
    base: Mapping[str, Any],
    methods: Sequence[str],
    epsilons: Sequence[float],
    seeds: int,
    metric: str,
) -> Experiment:
    """The grid of a comparison. The dense method takes no active ratio, so it gets none.

    Raises:
        SparseDPError: an unknown method, one that is not private and so has no budget to match, or a budget that is
            none.
    """
    for method in methods:
        if not get_method(method).private:
            raise SparseDPError(
                f"{method} is not private, so there is no privacy to match; use `sparsedp sweep`"
            )
    shared = {key: value for key, value in base.items() if key != "active_ratio"}
    ratio = base.get("active_ratio")
    sparse = [method for method in methods if get_method(method).ranking is not None]
    override = (
        [{"where": {"method": sparse}, "set": {"active_ratio": ratio}}]
        if ratio is not None and sparse
        else []
    )
    return parse_experiment(
        {
            "title": f"{base['dataset']}: methods at matched privacy",
            "seeds": seeds,
            "metric": metric,
            "base": shared,
            "grid": {"epsilon": list(epsilons), "method": list(methods)},
            "override": override,
        },
        name,
    )


def claim(out: Path, experiment: Experiment) -> None:
    """Make a folder this comparison's, or check that it is: two with different settings in one folder mislead.

    Raises:
        SparseDPError: it holds another comparison, or something else, or cannot be written.
    """
    file = out / _CLAIM
    mine = {"base": dict(experiment.base), "rules": [_rule(rule) for rule in experiment.rules]}
    if file.exists():
        if read_json(file) != mine:
            raise SparseDPError(
                f"out: {out} holds a comparison with other settings; give another folder, or the same settings"
            )
        return
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise SparseDPError(f"out: there is something at {out} already; give another folder")
    try:
        out.mkdir(parents=True, exist_ok=True)
        write_json(file, mine)
    except OSError as error:
        raise SparseDPError(f"out: cannot write to {out} ({error}); give another folder") from error


def _rule(rule: Any) -> dict[str, Any]:
    where = {axis: list(labels) for axis, labels in rule.where.items()}
    return {"where": where, "set": None if rule.change is None else dict(rule.change)}
