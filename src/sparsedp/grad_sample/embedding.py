"""Embeddings: the per-example gradient touches only the rows of the tokens an example holds.

Index conventions: n example, t position, m entry (one active token of one example), r active row, e embedding
feature.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sparsedp.grad_sample.sampler import Block, GradSampler, Metric, UnitPlaces, Workspace, squared_norms_of


@dataclass(frozen=True, slots=True, eq=False)
class Pairs:
    """The gradient [p, e] of every pair of an active row and an owner whose tokens touch it, each once, by row."""

    rows: Tensor
    owners: Tensor
    gradients: Tensor


@dataclass(frozen=True, eq=False)
class TokenRows(GradSampler):
    """Entries: an active row's place in the block [m], the example that holds the token [m], the gradient [m, e].

    The gradients lie in `vectors`, where `kept` says (None: there are no others). Everything costs the number of
    entries and of active rows; tokens whose row is not active have no entry.
    """

    places: Tensor
    owners: Tensor
    vectors: Tensor
    kept: Tensor | None
    examples: int
    rows: int
    space: Workspace

    @property
    def block_size(self) -> int:
        return self.rows * self.vectors.shape[1]

    @functools.cached_property
    def gradients(self) -> Tensor:
        return self.vectors if self.kept is None else self.vectors.index_select(0, self.kept)

    def explicit(self, span: slice) -> Tensor:
        start, stop, _ = span.indices(self.examples)
        within = ((self.owners >= start) & (self.owners < stop)).nonzero().squeeze(1)
        where = (self.owners[within] - start) * self.rows + self.places[within]
        dense = self.gradients.new_zeros((stop - start) * self.rows, self.gradients.shape[1])
        return dense.index_add_(0, where, self.gradients[within]).reshape(stop - start, -1)

    def by_unit(self, units: Tensor, places: UnitPlaces | None) -> GradSampler | None:
        return replace(self, owners=units[self.owners], examples=int(units[-1]) + 1)

    @functools.cached_property
    def pairs(self) -> Pairs:
        """A row's tokens in an example, added up before anything is measured.

        Gradients may nearly undo each other between places; norms and sums in different orders would then disagree.
        """
        owner_bits = max(0, self.examples - 1).bit_length()
        keys, order = _sorted(self.places << owner_bits | self.owners, most=self.rows << owner_bits)
        starts = _starts(keys)
        found = keys.index_select(0, starts)
        taken = order if self.kept is None else self.kept.index_select(0, order)
        total = F.embedding_bag(taken, self.vectors, starts, mode="sum")
        return Pairs(found >> owner_bits, found & ((1 << owner_bits) - 1), total)

    def has_ghost_norm(self, metric: Metric) -> bool:
        return True

    def squared_norms(self, metric: Metric) -> Tensor:
        pairs, weight, centre = self.pairs, metric.weight, metric.centre
        if weight is None:
            squares = squared_norms_of(pairs.gradients)
        elif centre is None:
            squares = squared_norms_of(pairs.gradients * weight[pairs.rows].to(pairs.gradients))
        else:
            scale, shift = weight[pairs.rows].double(), centre[pairs.rows].double()
            whole = pairs.gradients.double()
            squares = (((whole - shift) * scale).square() - (shift * scale).square()).sum(1)
            # What is too extreme for its own dtype counts as not finite, in every geometry.
            squares.masked_fill_(~squared_norms_of(pairs.gradients).isfinite(), torch.inf)
        start = metric.squared_constant()
        norms = torch.full((self.examples,), start, dtype=torch.float64, device=squares.device)
        return norms.index_add_(0, pairs.owners, squares)

    def add_weighted_sum(self, factors: Tensor, total: Tensor, metric: Metric) -> None:
        pairs, weights = self.pairs, factors.index_select(0, self.pairs.owners)
        if bool((factors == 0).any()):
            kept = _where(weights != 0)
            pairs = Pairs(pairs.rows[kept], pairs.owners[kept], pairs.gradients[kept])
            weights = weights[kept]
        wide = pairs.gradients if metric.centre is None else pairs.gradients.double()
        room = self.space.part("scaled", tuple(wide.shape), wide)
        scaled = torch.mul(wide, weights.to(wide).unsqueeze(1), out=room)
        starts = _starts(pairs.rows)  # of every row touched, once and sorted
        every = torch.arange(pairs.rows.numel(), device=pairs.rows.device)
        sums = F.embedding_bag(every, scaled, starts, mode="sum")
        total.view(self.rows, -1).index_add_(0, pairs.rows[starts], sums.to(total.dtype))


def token_rows(ids: Tensor, b: Tensor, padding: int, block: Block, space: Workspace) -> TokenRows:
    """Gradients `b` [n, t, e] of what was read from rows `ids` [n, t], on active rows; the row `padding` has none."""
    examples, each = ids.shape
    ids = ids.reshape(-1)
    lookup = block.place_of_row
    places = ids.long() if lookup is None else lookup.index_select(0, ids).long()
    active = places >= 0
    if 0 <= padding < block.row_count:
        active &= ids != padding
    owners = torch.arange(examples, device=ids.device).unsqueeze(1).expand(-1, each).reshape(-1)
    vectors, kept = b.reshape(ids.numel(), b.shape[-1]), _where(active)
    if kept.numel() == ids.numel():
        return TokenRows(places, owners, vectors, None, examples, block.shape[0], space)
    places, owners = places.index_select(0, kept), owners.index_select(0, kept)
    return TokenRows(places, owners, vectors, kept, examples, block.shape[0], space)


def _sorted(keys: Tensor, most: int) -> tuple[Tensor, Tensor]:
    """Whole numbers from 0 to `most` in order, and where each stood; equal ones in the order they had."""
    place_bits = max(1, keys.numel() - 1).bit_length()
    if keys.device.type != "cpu" or most.bit_length() + place_bits > 62:
        in_order, order = torch.sort(keys, stable=True)
        return in_order, order
    # NumPy sorts plain numbers several times as fast as PyTorch does numbers with their places.
    packed = (keys << place_bits).bitwise_or_(torch.arange(keys.numel())).numpy()
    packed.sort()
    both = torch.from_numpy(packed)
    return both >> place_bits, both & ((1 << place_bits) - 1)


def _starts(in_order: Tensor) -> Tensor:
    """Where a new value begins among sorted ones."""
    first = torch.ones_like(in_order, dtype=torch.bool)
    torch.ne(in_order[1:], in_order[:-1], out=first[1:])
    return _where(first)


def _where(mask: Tensor) -> Tensor:
    """The places at which a mask of one axis is true; NumPy finds them several times as fast as PyTorch."""
    if mask.device.type != "cpu":
        return mask.nonzero().squeeze(1)
    return torch.from_numpy(np.flatnonzero(mask.numpy()))


def refuse_embedding(module: nn.Module) -> str | None:
    """Say why a table's gradients depend on other examples, or its weights on a batch; None if they do not."""
    if not isinstance(module, nn.Embedding | nn.EmbeddingBag):
        return None
    if module.scale_grad_by_freq:
        return "scale_grad_by_freq=True weighs an example's gradient by other examples' tokens; turn it off"
    if module.max_norm is not None:
        return "max_norm rewrites the weights by the tokens a batch holds, without noise; leave it out"
    return None
