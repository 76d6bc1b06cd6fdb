"""Why method "auto" took what it took, in one line of public numbers."""

from __future__ import annotations

from dataclasses import replace

from sparsedp.methods.choice import ENOUGH_STEPS, LOUD, MANY, TOO_LOUD, method_beside, noise_ratio
from sparsedp.methods.spec import PlanSpec
from sparsedp.methods.table import get_method


def reason_of(spec: PlanSpec, dimension: int) -> str:
    """Why "auto" took the method of `spec` for a model of so many trained scalars."""
    bounds = spec.clip_norm
    main_bound = bounds[-1] if isinstance(bounds, tuple) else bounds
    dense = replace(spec, method=get_method("dp-sgd"), clip_norm=main_bound).plan()
    ratio, row = noise_ratio(dense, dimension), spec.method
    if row != method_beside(dense, dimension):
        return "a support, as what was said of one asks for it"
    what = "dense" if row.ranking is None else f"a learned support of ratio {row.active_ratio}"
    return (
        f"{what}, as the noise of a dense step on {dimension:,} coordinates is {ratio:.2f} of the clip norm; a "
        f"support is learned where that is {LOUD:g} to {TOO_LOUD:g}, of {MANY:,} coordinates or more "
        f"and in {ENOUGH_STEPS} steps or more"
    )
