"""The learning rate of a private logistic regression on a table, from public numbers."""

from __future__ import annotations

import math
from collections.abc import Callable

from sparsedp.privacy.plan import Plan

_SCALE = 0.0047
_STABLE = 30.0
"""Times the square of a record's length, the rate from which on momentum overshoots the loss's curvature."""


def rate_for_table(coordinates: int, features: int, *, unit_norm: bool) -> Callable[[Plan], float]:
    """`table_rate` of a plan, for records of so many features, scaled to length one (`unit_norm`) or as they are."""
    length = typical_length(features, unit_norm=unit_norm)
    return lambda plan: table_rate(plan, coordinates, length)


def typical_length(features: int, *, unit_norm: bool = False) -> float:
    """A record's length: one if it is scaled to that, else a guess between one feature present and all of them.

    Features lie between -1 and 1, so a record's length is at most sqrt(p), and about 1 if one of them is present.
    The guess is in the middle on a logarithmic scale; one-hot tables of 100 to 2,000 features have lengths of 3 to 5.
    """
    return 1.0 if unit_norm else math.sqrt(math.sqrt(features))


def table_rate(plan: Plan, coordinates: int, length: float) -> float:
    """`0.0047 B / (C sqrt(s) R^(3/4))` with `s = z sqrt(d E / B)`, for SGD with momentum 0.9; at most `30 / (C R^2)`.

    B is the batch size, C the clip norm, z the noise multiplier of the last phase, d the number of coordinates, E the
    passes over the data, and `R^2 = 1 + length^2` the squared length of a record with its intercept. Noise that
    gathers over a run asks for a rate of 1/s, records without noise for a constant one; the rule is halfway, and its
    numbers were found by simulation on four public tables at epsilon 0.5, 1 and 3 (docs/tables.md).

    Args:
        plan: of the run.
        coordinates: number of trainable scalars.
        length: L2 norm of a typical record's features; public.

    **Privacy.** Public numbers alone.
    """
    last = plan.phases[-1]
    batch, clip = plan.expected_batch_size(last), last.clip_norm or 1.0
    passes = sum(phase.steps * phase.sampling_rate for phase in plan.phases if phase.trains)
    noise = max(last.noise_multiplier, 0.1) * math.sqrt(coordinates * passes / batch)
    record = math.sqrt(1 + length**2)
    return min(_SCALE * batch / (math.sqrt(noise) * math.pow(record, 0.75)), _STABLE / record**2) / clip
