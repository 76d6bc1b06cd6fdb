"""Embeddings: the per-sample gradient touches only the rows of the tokens a sample holds.

Index conventions: n sample, t and s positions, v vocabulary row, e embedding feature.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from sparsedp.gradients.blocks import Block, Metric
from sparsedp.gradients.layers.source import Family, Source, as_it_is, no_axes, one_plane, silence, working
from sparsedp.gradients.tape import Call
from sparsedp.gradients.workspace import Space


@dataclass(frozen=True, slots=True, eq=False)
class TokenRows:
    """Token ids [n, t] and gradients [n, t, e]: at each position its share of the gradient of its token's row.

    All places of a token in a sample carry the same share; `places` [n, t] is their number. Gradients as they come
    may nearly undo each other between places, and norms and sums in different orders would then disagree.
    """

    ids: Tensor
    b: Tensor
    places: Tensor
    rows: int

    to_planes = staticmethod(one_plane)
    from_planes = staticmethod(as_it_is)

    @property
    def block_size(self) -> int:
        """Scalars per sample."""
        return self.rows * self.b.shape[2]

    def explicit(self, span: slice) -> Tensor:
        """Dense per-sample gradients [n, v, e]."""
        ids, b = self.ids[span], self.b[span]
        dense = b.new_zeros(b.shape[0], self.rows, b.shape[2])
        return dense.scatter_add_(1, ids.unsqueeze(2).expand_as(b), b).flatten(1).unsqueeze(0)

    def squared_norms(self, metric: Metric) -> Tensor:
        """Every position counts for its share of its token's row."""
        weight, centre = metric.weight, metric.centre
        b = self.b if centre is None else self.b.double()
        if weight is None:
            return (b.square().sum(2) * self.places).sum(1)
        scale = weight[self.ids].to(b)
        if centre is None:
            return ((b * scale).square().sum(2) * self.places).sum(1)
        whole = b * self.places.unsqueeze(2)
        shift = centre[self.ids].to(b)
        change = ((whole - shift) * scale).square() - (shift * scale).square()
        return (change.sum(2) / self.places).sum(1) + metric.squared_constant()

    def add_weighted_sum(self, factors: Tensor, total: Tensor, metric: Metric) -> None:
        """Add every token's scaled gradient to its row."""
        scaled = silence(self.b, factors) * factors.to(self.b).reshape(-1, 1, 1)
        total.view(self.rows, -1).index_add_(0, self.ids.flatten(), scaled.flatten(0, 1).to(total.dtype))


def embedding_source(call: Call, parameter: str, block: Block, space: Space) -> Source:
    """Per-sample gradients of an Embedding's weight."""
    gradient = call.output_gradient
    module = call.module
    assert gradient is not None
    assert isinstance(module, nn.Embedding)
    ids = call.input.reshape(gradient.shape[0], -1)
    b = working(gradient).reshape(*ids.shape, -1)
    if module.padding_idx is not None:
        b = b.masked_fill((ids == module.padding_idx).unsqueeze(2), 0)
    same = (ids.unsqueeze(1) == ids.unsqueeze(2)).to(b)
    places = same.sum(2)
    return TokenRows(ids, torch.bmm(same, b) / places.unsqueeze(2), places, module.num_embeddings)


def _refuse(module: nn.Module) -> str | None:
    assert isinstance(module, nn.Embedding)
    if module.scale_grad_by_freq:
        return "scale_grad_by_freq=True weighs a sample's gradient by other samples' tokens; turn it off"
    if module.max_norm is not None:
        return "max_norm rewrites the weights by the tokens a batch holds, without noise; leave it out"
    return None


EMBEDDING = Family(frozenset({"weight"}), embedding_source, no_axes, _refuse)
