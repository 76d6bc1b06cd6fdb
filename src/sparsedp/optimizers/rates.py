"""Different learning rates for different parts of a model, by factors on the optimizer's one rate."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from torch import nn
from torch.optim import Optimizer

from sparsedp.core.errors import SparseDPError
from sparsedp.core.layout import Layout
from sparsedp.methods.scope import check_fits, find
from sparsedp.optimizers.rule import OptimizerChoice, make_optimizer

RateFactors = Mapping[str, float]
"""What to multiply the rate by, for patterns of parameter names and words for structure, as in a scope."""


def grouped_optimizer(
    choice: OptimizerChoice, model: nn.Module, layout: Layout, factors: RateFactors
) -> Optimizer:
    """The optimizer with a parameter group for each factor; without factors, as it was asked for.

    A parameter that no name fits has the whole rate, in the first group. The order of the names means nothing.

    **Privacy.** Names and factors are public, and rates are post-processing.

    Raises:
        SparseDPError: a name that fits nothing, two for one parameter, a factor that is no positive number, or an
            optimizer that is made already.
    """
    if not factors:
        return make_optimizer(choice, model)
    if isinstance(choice, Optimizer):
        raise SparseDPError(
            "lr_factors: got an optimizer that is made already; give a function that makes it from parameters, or "
            "give it parameter groups of your own and no lr_factors"
        )
    groups = _groups(model, layout, factors)
    wanted: Any = [group for _, group in groups]
    made = make_optimizer(lambda _: choice(wanted), model)
    for group, (factor, _) in zip(made.param_groups, groups, strict=True):
        group["lr"] = group["lr"] * factor
    return made


def _groups(model: nn.Module, layout: Layout, factors: RateFactors) -> list[tuple[float, dict[str, Any]]]:
    """Factor and parameters of every group that has any."""
    parameters = dict(zip((slot.name for slot in layout), layout.parameters(model), strict=True))
    chosen: dict[str, str] = {}
    for name, factor in factors.items():
        if isinstance(factor, bool) or not isinstance(factor, (int, float)) or not 0 < factor < math.inf:
            raise SparseDPError(f"lr_factors: got {factor!r} for {name!r}, expected a number > 0")
        fits = find(layout, (name,), "lr_factors")
        check_fits(layout, fits, f"lr_factors: got {name!r}")
        for slot in fits:
            if slot.name in chosen:
                raise SparseDPError(
                    f"lr_factors: got {chosen[slot.name]!r} and {name!r}, which both fit {slot.name}; expected one "
                    "name for each parameter"
                )
            chosen[slot.name] = name
    found = []
    for group in (None, *sorted(factors)):
        members = [parameter for slot, parameter in parameters.items() if chosen.get(slot) == group]
        if members:
            found.append((1.0 if group is None else float(factors[group]), {"params": members}))
    return found
