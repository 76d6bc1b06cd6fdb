"""Micro-batches: what the gradient engines eat."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from sparsedp.core.chance import Chance
from sparsedp.core.errors import DataError, SparseDPError

Rows = Any
"""Tensors, or a tuple, list or dict of tensors, all with one leading axis of rows."""

PerSampleLoss = Callable[[Callable[..., Any], Rows], Tensor]
"""`loss(model, rows)`: calls the model and returns one loss per row."""


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """Some rows of a logical batch, on their way to the engine. Private.

    `units` says which unit each row belongs to (0, 0, 1, 2, 2, ...; every unit whole and in order). Without it,
    each row is a unit. A unit's gradient is the mean over its rows, clipped once. `chance` says where random numbers
    come from while the rows are at work, and whose they are; only models that draw some need it.
    """

    rows: Rows
    units: Tensor | None = None
    chance: Chance | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        size = row_count(self.rows)
        if self.chance is not None and self.chance.rows.shape != (size,):
            raise DataError(f"chance: got {len(self.chance.rows)} names of rows for {size} rows")
        if self.units is None:
            return
        units = self.units
        if units.shape != (size,) or units.is_floating_point():
            raise DataError(
                f"units: got shape {tuple(units.shape)}, expected one integer for each of {size} rows"
            )
        if size:
            steps = units[1:] - units[:-1]
            if int(units[0]) != 0 or bool(((steps != 0) & (steps != 1)).any()):
                raise DataError(
                    "units: expected 0, 0, 1, 2, 2, ...: rows of one unit together, numbered in order"
                )

    @property
    def row_count(self) -> int:
        """Number of rows."""
        return row_count(self.rows)


def tensors_of(rows: Rows) -> list[Tensor]:
    """All tensors of a batch; of the usual pair in a fraction of the time that any tree takes."""
    if type(rows) is tuple and all(isinstance(leaf, Tensor) for leaf in rows):
        return list(rows)
    return [leaf for leaf in pytree.tree_leaves(rows) if isinstance(leaf, Tensor)]


def row_count(rows: Rows) -> int:
    """The common leading length of all tensors in a batch."""
    leaves = tensors_of(rows)
    if not leaves:
        raise DataError("a batch holds no tensor; give tensors, or a tuple, list or dict of tensors")
    counts = {leaf.shape[0] if leaf.dim() else None for leaf in leaves}
    if len(counts) != 1 or None in counts:
        shapes = [tuple(leaf.shape) for leaf in leaves]
        raise DataError(f"the tensors of a batch must share their first axis (the rows), got shapes {shapes}")
    return int(leaves[0].shape[0])


def select_rows(rows: Rows, span: slice) -> Rows:
    """A slice of rows of every tensor of a batch."""
    return pytree.tree_map_only(Tensor, lambda leaf: leaf[span], rows)


def join_rows(parts: Sequence[Rows]) -> Rows:
    """All rows of some parts of a batch, one part after the other; what is no tensor is the first's."""

    def joined(*leaves: Any) -> Any:
        return torch.cat(leaves) if isinstance(leaves[0], Tensor) else leaves[0]

    return pytree.tree_map(joined, *parts)


def to_device(rows: Rows, device: torch.device) -> Rows:
    """Every tensor of a batch on `device`."""
    if all(leaf.device == device for leaf in tensors_of(rows)):
        return rows
    return pytree.tree_map_only(Tensor, lambda leaf: leaf.to(device), rows)


def supervised(criterion: Callable[[Any, Tensor], Tensor]) -> PerSampleLoss:
    """A per-sample loss from a criterion on (output, target), for data sets of (input, target) pairs.

    The criterion must keep one loss per row: `nn.CrossEntropyLoss(reduction="none")`, not its default mean.
    """

    def loss(model: Callable[..., Any], rows: Rows) -> Tensor:
        if not isinstance(rows, (tuple, list)) or len(rows) != 2:
            raise DataError(
                f"got a batch of type {type(rows).__name__}, expected (inputs, targets); "
                "for other data pass loss_fn=PerExampleLoss(lambda model, rows: ...)"
            )
        inputs, targets = rows
        return criterion(model(inputs), targets)

    return loss


@dataclass(frozen=True, slots=True)
class PerExampleLoss:
    """Marks a loss of the general form `loss(model, rows)`, which calls the model itself on whatever a batch is.

    >>> PerExampleLoss(lambda model, rows: (model(rows["x"]) - rows["y"]).square().mean(dim=1))  # doctest: +ELLIPSIS
    PerExampleLoss(loss=...)
    """

    loss: PerSampleLoss


def per_sample_loss(loss_fn: Callable[[Any, Tensor], Tensor] | PerExampleLoss) -> PerSampleLoss:
    """The per-sample loss a user means: `PerExampleLoss` as it is, a criterion on (output, target) by `supervised`.

    Raises:
        SparseDPError: the criterion averages or sums over rows.
    """
    if isinstance(loss_fn, PerExampleLoss):
        return loss_fn.loss
    if isinstance(loss_fn, type):
        raise SparseDPError(
            f'loss_fn: got the class {loss_fn.__name__}, expected an instance: {loss_fn.__name__}(reduction="none")'
        )
    if not callable(loss_fn):
        raise SparseDPError(
            f"loss_fn: got {loss_fn!r}, expected a criterion on (output, target), such as "
            'nn.CrossEntropyLoss(reduction="none"), or PerExampleLoss(lambda model, rows: ...)'
        )
    reduction = getattr(loss_fn, "reduction", "none")
    if reduction != "none":
        raise SparseDPError(
            f'loss_fn: got {type(loss_fn).__name__}(reduction={reduction!r}), expected reduction="none": '
            "gradients are clipped sample by sample, which a mean or sum over rows does not allow"
        )
    return supervised(loss_fn)


def check_losses(losses: Tensor, rows: int) -> Tensor:
    """Refuse a loss that is not one number per row, and say how to fix it."""
    if not isinstance(losses, Tensor):
        raise SparseDPError(
            f"the loss returned {type(losses).__name__}, expected a tensor of one loss per row"
        )
    if losses.shape == (rows, 1):
        return losses.squeeze(1)
    if losses.shape != (rows,):
        raise SparseDPError(
            f"the loss returned shape {tuple(losses.shape)} for {rows} rows, expected ({rows},): one loss per row. "
            'Per-sample clipping cannot undo a mean or sum: use reduction="none", and average over all other axes'
        )
    return losses
