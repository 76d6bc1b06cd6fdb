"""What one operation adds to the per-sample gradients of a tensor that all samples share, in the cheapest form.

Index conventions: n sample, t position, i and o the two axes of a matrix.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor, nn

from sparsedp.grad_sample.blocks import Block
from sparsedp.grad_sample.layers.conv import ConvWeight
from sparsedp.grad_sample.layers.embedding import embedding_source
from sparsedp.grad_sample.layers.linear import Outer, SequenceOuter
from sparsedp.grad_sample.layers.source import Explicit, Source, in_block_order, keep
from sparsedp.grad_sample.rowaxis import RowAxis
from sparsedp.grad_sample.tape import Call
from sparsedp.grad_sample.workspace import Space


class Contribution(Protocol):
    """Per-sample gradients of a shared tensor. Private."""

    def dense(self, space: Space) -> Tensor:
        """The gradients themselves, [samples, *shape of the tensor]."""
        ...

    def source(self, block: Block, space: Space) -> Source:
        """The gradients of a parameter's block, where the tensor is the parameter."""
        ...


@dataclass(frozen=True, slots=True, eq=False)
class Whole:
    """The gradients themselves."""

    values: Tensor

    def dense(self, space: Space) -> Tensor:
        """[samples, *shape]."""
        return self.values

    def source(self, block: Block, space: Space) -> Source:
        """The block's rows and columns of them."""
        values = keep(self.values, 1, block.rows)
        return Explicit(keep(values, 2, block.columns) if block.columns is not None else values)


@dataclass(frozen=True, slots=True, eq=False)
class Product:
    """A matrix [i, o] whose gradient is a^T b: a is [n, t, i], b is [n, t, o]."""

    a: Tensor
    b: Tensor

    def transposed(self) -> Product:
        """The same for the matrix [o, i]."""
        return Product(self.b, self.a)

    def dense(self, space: Space) -> Tensor:
        """One product per sample."""
        return torch.bmm(self.a.transpose(1, 2), self.b)

    def source(self, block: Block, space: Space) -> Source:
        """Formulas where there is one position, products else."""
        rows, columns = keep(self.a, -1, block.rows), keep(self.b, -1, block.columns)
        if rows.shape[1] == 1:
            return Outer(columns.squeeze(1), rows.squeeze(1), space)
        return SequenceOuter(columns, rows, space)


@dataclass(frozen=True, slots=True, eq=False)
class Tokens:
    """Rows of a table: `ids` [n, t] say which, `b` [n, t, e] holds the gradients of what was read."""

    ids: Tensor
    b: Tensor
    rows: int

    def dense(self, space: Space) -> Tensor:
        """The whole table's gradients."""
        values = self.b.new_zeros(self.b.shape[0], self.rows, self.b.shape[2])
        return values.scatter_add_(1, self.ids.unsqueeze(2).expand_as(self.b), self.b)

    def source(self, block: Block, space: Space) -> Source:
        """As an embedding layer's."""
        b = keep(self.b, 2, block.columns)
        table = nn.Embedding(self.rows, b.shape[2], device="meta")
        return embedding_source(Call.of(table, self.ids, b), "weight", block, space)


@dataclass(frozen=True, slots=True, eq=False)
class Patches:
    """A convolution's weight [o, c, *kernel]: `a` is the padded input, `b` the output's gradient.

    For a transposed convolution the two change places.
    """

    a: Tensor
    b: Tensor
    kernel: tuple[int, ...]
    stride: tuple[int, ...]
    dilation: tuple[int, ...]
    groups: int

    def dense(self, space: Space) -> Tensor:
        """Products with patches of the input."""
        weight = self._weight(self.a, self.b, space)
        shape = (self.b.shape[1], self.a.shape[1] // self.groups, *self.kernel)
        return in_block_order(weight, slice(None)).reshape(-1, *shape).clone()

    def source(self, block: Block, space: Space) -> Source:
        """As a convolution's."""
        if self.groups > 1:
            return Whole(self.dense(space)).source(block, space)
        return self._weight(keep(self.a, 1, block.columns), keep(self.b, 1, block.rows), space)

    def _weight(self, a: Tensor, b: Tensor, space: Space) -> ConvWeight:
        return ConvWeight(
            a.contiguous(), b.contiguous(), self.kernel, self.stride, self.dilation, self.groups, space
        )


@dataclass(frozen=True, slots=True, eq=False)
class Folded:
    """Contributions of rows of which every sample has several, laid out along one axis with the samples."""

    parts: Patches
    rows: RowAxis
    samples: int

    def dense(self, space: Space) -> Tensor:
        """Every sample's rows added up."""
        return self.rows.to_front(self.parts.dense(space), self.samples).sum(1)

    def source(self, block: Block, space: Space) -> Source:
        """The block's rows and columns of that."""
        return Whole(self.dense(space)).source(block, space)


def added(parts: Sequence[Contribution], space: Space) -> list[Contribution]:
    """Contributions to one tensor, merged where that is cheaper: products become one along the positions."""
    products = [part for part in parts if isinstance(part, Product)]
    dense = [part for part in parts if isinstance(part, Whole)]
    rest = [part for part in parts if not isinstance(part, Product | Whole)]
    merged: list[Contribution] = list(rest)
    if len(products) > 1:
        a, b = (torch.cat([getattr(p, name) for p in products], 1) for name in ("a", "b"))
        products = [Product(a, b)]
    merged += products
    if dense:
        values = dense[0].values
        for part in dense[1:]:
            values = values + part.values
        merged.append(Whole(values))
    return merged
