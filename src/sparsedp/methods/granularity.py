"""Granularity: rank single coordinates, or rows; always as an order of the d coordinates.

A group's score is the mean of its members'. Groups come in the order of their scores and, inside a group, members in
the order of theirs; ties go to the lower index. The support is the first k of that order, so groups are taken whole
from the best until one no longer fits, and what is left of k goes to the best members of that one: k is exact, and a
smaller support is always part of a larger one.
"""

from __future__ import annotations

from enum import Enum

import torch
from torch import Tensor

from sparsedp.errors import SparseDPError
from sparsedp.parameters import Layout, Slot
from sparsedp.randomness import PublicRandomness


class Granularity(Enum):
    """What is ranked."""

    COORDINATES = "coordinates"
    ROWS = "rows"


_MEMBER_ORDER, _GROUP_ORDER = 0, 1


def order_by_score(scores: Tensor, layout: Layout, granularity: Granularity) -> Tensor:
    """All coordinates, best first.

    Raises:
        SparseDPError: a score is NaN.
    """
    if scores.shape != (layout.dimension,):
        raise SparseDPError(f"scores: got shape {tuple(scores.shape)}, expected d={layout.dimension} numbers")
    if bool(scores.isnan().any()):
        raise SparseDPError("a score is NaN, so there is no ranking; look for diverged training")
    members = _descending(scores)
    groups = group_ids(layout, granularity)
    if groups is None:
        return members
    totals = torch.zeros(int(groups[-1]) + 1, dtype=torch.float64).index_add_(0, groups, scores.double())
    means = totals / torch.bincount(groups)
    return _by_group(members, groups, _descending(means))


def random_order(
    public: PublicRandomness, key: tuple[int, ...], layout: Layout, granularity: Granularity
) -> Tensor:
    """All coordinates in random order, group by group; every order of the groups is equally likely."""
    members = public.permutation(layout.dimension, (_MEMBER_ORDER, *key))
    groups = group_ids(layout, granularity)
    if groups is None:
        return members
    return _by_group(members, groups, public.permutation(int(groups[-1]) + 1, (_GROUP_ORDER, *key)))


def group_ids(layout: Layout, granularity: Granularity) -> Tensor | None:
    """The group 0, 1, ... of each coordinate, in layout order; None when each is its own group."""
    if granularity is Granularity.COORDINATES:
        return None
    sizes: list[int] = []
    for slot in layout:
        if slot.size:
            rows = _row_count(slot)
            sizes.extend([slot.size // rows] * rows)
    return torch.repeat_interleave(torch.arange(len(sizes)), torch.tensor(sizes))


def _row_count(slot: Slot) -> int:
    """The length of the first axis: output units, filters, embedding rows, the entries of a bias."""
    return slot.shape[0] if slot.shape else 1


def _by_group(members: Tensor, groups: Tensor, group_order: Tensor) -> Tensor:
    """Members sorted by their group's place, keeping their own order inside a group."""
    place = torch.empty_like(group_order)
    place[group_order] = torch.arange(group_order.numel())
    return members[torch.sort(place[groups[members]], stable=True).indices]


def _descending(values: Tensor) -> Tensor:
    return torch.sort(values, descending=True, stable=True).indices
