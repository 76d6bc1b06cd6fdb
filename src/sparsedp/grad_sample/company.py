"""Rows to try a model with: some of the user's in new company, shuffled, jittered, cut, scaled, not even finite."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from sparsedp.batch import Rows, row_count
from sparsedp.randomness import PublicRandomness

Change = Callable[[Tensor, int], Tensor]


def as_many(rows: Rows, count: int, turn: int) -> Rows:
    """`count` rows in an order that `turn` shuffles, each as often as needed."""
    have = row_count(rows)
    order = PublicRandomness(turn).permutation(have, (count,))
    places = order[torch.arange(count) % have]
    return pytree.tree_map_only(Tensor, lambda leaf: leaf[places.to(leaf.device)], rows)


def in_other_company(rows: Rows, stay: Tensor, turn: int, changes: Sequence[Change]) -> Rows:
    """The same rows where `stay` is true, and others around them: in another order, and changed in these ways."""
    leaves, tree = pytree.tree_flatten(rows)
    others = (~stay).nonzero().reshape(-1)
    shifted = others.roll(1) if len(others) > 1 else (others + 1) % len(stay)
    changed = []
    for place, leaf in enumerate(leaves):
        if isinstance(leaf, Tensor):
            leaf = leaf.clone()
            company = leaf[shifted.to(leaf.device)]
            for number, change in enumerate(changes):
                mine = slice(number, None, len(changes))
                company[mine] = change(company[mine], 1000 * turn + place)
            leaf[others.to(leaf.device)] = company
        changed.append(leaf)
    return pytree.tree_unflatten(changed, tree)


def _jittered(leaf: Tensor, key: int) -> Tensor:
    if not leaf.is_floating_point() or leaf.numel() == 0:
        return leaf
    move = PublicRandomness(0).normal(leaf.numel(), key=(key,)).reshape(leaf.shape)
    return leaf + move.to(leaf)


def _zeroed(leaf: Tensor, key: int) -> Tensor:
    return torch.zeros_like(leaf) if leaf.dim() > 1 else leaf


def _cut_short(leaf: Tensor, key: int) -> Tensor:
    """The first part of a row, and zeros (padding) after it."""
    cut = leaf.clone()
    if leaf.dim() > 1:
        cut[:, max(1, leaf.shape[1] // 3) :] = 0
    return cut


def _scaled(leaf: Tensor, key: int) -> Tensor:
    return leaf * 30 if leaf.is_floating_point() and leaf.dim() > 1 else leaf


def _missing(leaf: Tensor, key: int) -> Tensor:
    return _filled(leaf, torch.nan)


def _infinite(leaf: Tensor, key: int) -> Tensor:
    return _filled(leaf, torch.inf)


def _huge(leaf: Tensor, key: int) -> Tensor:
    return _filled(leaf, min(1e30, torch.finfo(leaf.dtype).max)) if leaf.is_floating_point() else leaf


def _filled(leaf: Tensor, value: float) -> Tensor:
    return torch.full_like(leaf, value) if leaf.is_floating_point() and leaf.dim() > 1 else leaf


def _unchanged(leaf: Tensor, key: int) -> Tensor:
    return leaf


ORDINARY: tuple[Change, ...] = (_scaled, _jittered, _cut_short, _unchanged, _zeroed)
"""Each for every fifth of the rows around; labels and lengths (integers on one axis) stay what they were."""
CHANGES: tuple[Change, ...] = (
    _scaled,
    _jittered,
    _missing,
    _cut_short,
    _infinite,
    _huge,
    _unchanged,
    _zeroed,
)
"""With rows that some models will not take. Those that a few rows may show as well come first."""
