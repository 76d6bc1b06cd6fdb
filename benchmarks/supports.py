"""The supports the benchmark times: random coordinates, or whole rows of every parameter."""

from __future__ import annotations

import torch

from benchmarks.table_workloads import frequent_rows
from sparsedp.parameters import ParameterLayout, Support
from sparsedp.randomness import PublicRandomness


def random_support(layout: ParameterLayout, active_ratio: float) -> Support:
    """floor(ratio * d) coordinates, uniformly at random (the same in every process)."""
    order = PublicRandomness(0).permutation(layout.dimension, key=(0,))
    return Support(order[: int(active_ratio * layout.dimension)], layout.dimension)


def clustered_support(layout: ParameterLayout, active_ratio: float) -> Support:
    """floor(ratio * d) coordinates in whole rows: the last floor(ratio * n) of every parameter's n rows.

    What the rounding leaves is filled from the end of the network upwards, so at most one row is cut.
    """
    mask = torch.zeros(layout.dimension, dtype=torch.bool)
    for slot in layout:
        rows = int(active_ratio * slot.shape[0])
        mask[slot.span.stop - rows * (slot.size // slot.shape[0]) : slot.span.stop] = True
    missing = int(active_ratio * layout.dimension) - int(mask.sum())
    unused = (~mask).nonzero().reshape(-1)
    mask[unused[unused.numel() - missing :]] = True
    return Support(mask.nonzero().flatten(), len(mask))


SUPPORTS = {
    "full": lambda layout, active_ratio: Support.full(layout.dimension),
    "random": random_support,
    "clustered": clustered_support,
}


def support_of(kind: str, layout: ParameterLayout, active_ratio: float) -> Support:
    """A support by its kind; `frequent:N` are the rows of an embedding table's N most frequent words."""
    if kind.startswith("frequent:"):
        return frequent_rows(layout, int(kind.partition(":")[2]))
    return SUPPORTS[kind](layout, active_ratio)
