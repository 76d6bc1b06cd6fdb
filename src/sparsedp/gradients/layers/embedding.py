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
    """Token ids [n, t] and output gradients [n, t, e]; padding tokens already carry a zero gradient."""

    ids: Tensor
    b: Tensor
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
        """Sum over pairs of equal tokens of the weighted product of their gradients (equal tokens share a row)."""
        b, weight, centre = self.b, metric.weight, metric.centre
        if centre is not None:
            b = b.double()
        weighted = b
        if weight is not None:
            weighted = b * weight.to(b).square()[self.ids]
        same = (self.ids.unsqueeze(1) == self.ids.unsqueeze(2)).to(b)
        square = (torch.bmm(weighted, b.transpose(1, 2)) * same).sum((1, 2))
        if centre is None:
            return square.clamp(min=0)
        cross = (weighted * centre.to(b)[self.ids]).sum((1, 2))
        return (square - 2 * cross + metric.squared_constant()).clamp(min=0)

    def weighted_sum(self, factors: Tensor) -> Tensor:
        """Add every token's scaled gradient to its row."""
        scaled = silence(self.b, factors) * factors.to(self.b).reshape(-1, 1, 1)
        total = self.b.new_zeros(self.rows, self.b.shape[2])
        return total.index_add_(0, self.ids.flatten(), scaled.flatten(0, 1))


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
    return TokenRows(ids, b, module.num_embeddings)


def _refuse(module: nn.Module) -> str | None:
    assert isinstance(module, nn.Embedding)
    if module.scale_grad_by_freq:
        return "scale_grad_by_freq=True weighs a sample's gradient by other samples' tokens; turn it off"
    if module.max_norm is not None:
        return "max_norm rewrites the weights by the tokens a batch holds, without noise; leave it out"
    return None


EMBEDDING = Family(frozenset({"weight"}), embedding_source, no_axes, _refuse)
