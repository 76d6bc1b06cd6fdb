"""Micro-batches: what the gradient engines eat."""

from __future__ import annotations

import copy
import functools
import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from sparsedp.errors import DataError, SparseDPError

Batch = Any
"""Tensors, or a tuple, list or dict of tensors, all with one leading axis of rows."""

LossFunction = Callable[[Callable[..., Any], Batch], Tensor]
"""`loss(model, rows)`: calls the model and returns one loss per row."""


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """Some rows of a logical batch, on their way to the engine. Private.

    `units` says which unit each row belongs to (0, 0, 1, 2, 2, ...; every unit whole and in order). Without it,
    each row is a unit. A unit's gradient is the mean over its rows, clipped once. `seed` is the secret of 32 bytes
    that what the model draws for these rows follows from; without it the global generators go on.
    """

    rows: Batch
    units: Tensor | None = None
    seed: bytes | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        size, units = example_count(self.rows), self.units
        if units is None:
            return
        if units.shape != (size,) or units.is_floating_point():
            raise DataError(
                f"units: got shape {tuple(units.shape)}, expected one integer for each of {size} rows"
            )
        steps = units.diff(prepend=units.new_zeros(1))
        if bool(((steps != 0) & (steps != 1)).any()) or bool(units[:1].any()):
            raise DataError(
                "units: expected 0, 0, 1, 2, 2, ...: rows of one unit together, numbered in order"
            )

    @property
    def example_count(self) -> int:
        """Number of rows."""
        return example_count(self.rows)


def tensors_of(rows: Batch) -> list[Tensor]:
    """All tensors of a batch; of the usual pair in a fraction of the time that any tree takes."""
    if type(rows) is tuple and all(isinstance(leaf, Tensor) for leaf in rows):
        return list(rows)
    return [leaf for leaf in pytree.tree_leaves(rows) if isinstance(leaf, Tensor)]


def example_count(rows: Batch) -> int:
    """The common leading length of all tensors in a batch."""
    leaves = tensors_of(rows)
    if not leaves:
        raise DataError("a batch holds no tensor; give tensors, or a tuple, list or dict of tensors")
    for leaf in leaves if type(rows) is tuple and len(leaves) == len(rows) else pytree.tree_leaves(rows):
        if not isinstance(leaf, (Tensor, bool, int, float, str, type(None))):
            raise DataError(
                f"a batch holds a {type(leaf).__name__}, which cannot be taken apart by example; give tensors, "
                "or a tuple, list or dict of tensors (of an array: torch.as_tensor, of a BatchEncoding: dict)"
            )
    counts = {leaf.shape[0] if leaf.dim() else None for leaf in leaves}
    if len(counts) != 1 or None in counts:
        shapes = [tuple(leaf.shape) for leaf in leaves]
        raise DataError(f"the tensors of a batch must share their first axis (the rows), got shapes {shapes}")
    return int(leaves[0].shape[0])


def slice_batch(rows: Batch, span: slice) -> Batch:
    """A slice of rows of every tensor of a batch."""
    return pytree.tree_map_only(Tensor, lambda leaf: leaf[span], rows)


def concat_batches(parts: Sequence[Batch]) -> Batch:
    """All rows of some parts of a batch, one part after the other; what is no tensor is the first's."""

    def joined(*leaves: Any) -> Any:
        return torch.cat(leaves) if isinstance(leaves[0], Tensor) else leaves[0]

    return pytree.tree_map(joined, *parts)


def to_device(rows: Batch, device: torch.device) -> Batch:
    """Every tensor of a batch on `device`."""
    if all(leaf.device == device for leaf in tensors_of(rows)):
        return rows
    return pytree.tree_map_only(Tensor, lambda leaf: leaf.to(device), rows)


def from_criterion(criterion: Callable[[Any, Tensor], Tensor]) -> LossFunction:
    """A per-example loss from a criterion on (output, target) that keeps one loss per example."""

    def loss(model: Callable[..., Any], rows: Batch) -> Tensor:
        if not isinstance(rows, (tuple, list)) or len(rows) != 2:
            raise DataError(
                f"got a batch of type {type(rows).__name__}, expected (inputs, targets); "
                "for other data pass criterion=PerExampleLoss(lambda model, batch: ...)"
            )
        inputs, targets = rows
        output = model(inputs)
        try:
            return criterion(output, targets)
        except (ValueError, RuntimeError, IndexError) as error:
            shapes = [tuple(part.shape) for part in (output, targets) if isinstance(part, Tensor)]
            if len(shapes) < 2 or shapes[0][:1] == shapes[1][:1]:
                raise
            raise SparseDPError(
                f"criterion: outputs of shape {shapes[0]} for targets of {shapes[1]}. Every example is computed "
                "as a batch of one, and a .squeeze() without an axis in the model's forward drops the axis of the "
                "examples there: write .squeeze(1), or .flatten(1)"
            ) from error

    return loss


@dataclass(frozen=True, slots=True)
class PerExampleLoss:
    """A loss of the general form `loss(model, batch)`, one number per example, that calls the model itself.

    >>> PerExampleLoss(lambda model, batch: (model(batch["x"]) - batch["y"]).square().mean(1))  # doctest: +ELLIPSIS
    PerExampleLoss(loss=...)
    """

    loss: LossFunction

    def __call__(self, model: Callable[..., Any], batch: Batch) -> Tensor:
        """One loss per example of a batch."""
        return self.loss(model, batch)


def per_sample_loss(criterion: Callable[[Any, Tensor], Tensor] | PerExampleLoss) -> LossFunction:
    """The per-example loss a user means: `PerExampleLoss` as it is, a criterion taken apart by `unreduced`."""
    if isinstance(criterion, PerExampleLoss):
        return criterion.loss
    if isinstance(criterion, type) or not callable(criterion):
        raise SparseDPError(
            f"criterion: got {criterion!r}, expected a criterion on (output, target), such as nn.CrossEntropyLoss(), "
            "or PerExampleLoss(lambda model, batch: ...)"
        )
    return from_criterion(unreduced(criterion))


_OVER_AN_EXAMPLE = {"none": torch.mean, "mean": torch.mean, "sum": torch.sum, "batchmean": torch.sum}
"""What a reduction of the whole batch does to the numbers of one example."""


def unreduced(criterion: Callable[[Any, Tensor], Tensor]) -> Callable[[Any, Tensor], Tensor]:
    """The criterion with one loss per example, whatever its reduction: a copy of it that does not reduce.

    Numbers of one example (tokens, pixels, outputs) are averaged, or added up where the criterion adds up.

    Edge cases: Class weights multiply an example's loss and are not divided by their sum; an ignored target
    counts as a loss of zero. A criterion without `reduction` is taken as it is.

    Raises:
        SparseDPError: it reduces in a way that cannot be taken apart.
    """
    reduction = _reduction_of(criterion)
    if reduction not in _OVER_AN_EXAMPLE:
        raise SparseDPError(
            f"criterion: got reduction={reduction!r}, expected 'mean', 'sum' or 'none': gradients are clipped "
            "example by example, so the loss of one example must be told from the batch's. Give "
            "PerExampleLoss(lambda model, batch: ...)"
        )
    keeping: Any = criterion
    reduce = _OVER_AN_EXAMPLE[reduction]
    if reduction != "none" and hasattr(criterion, "reduction"):
        keeping = copy.copy(criterion)
        keeping.reduction = "none"
    elif reduction != "none":
        keeping = functools.partial(keeping, reduction="none")

    def losses(output: Any, target: Tensor) -> Tensor:
        found: Tensor = keeping(output, target)
        if not isinstance(found, Tensor) or found.dim() < 2:
            return found
        _refuse_broadcast(found, output, target)
        return reduce(found.flatten(1), dim=1)

    return losses


def _reduction_of(criterion: Callable[..., Any]) -> object:
    """What a criterion's attribute or its argument `reduction` says; "none" where it has neither."""
    if hasattr(criterion, "reduction"):
        return criterion.reduction
    try:
        argument = inspect.signature(criterion).parameters.get("reduction")
    except (TypeError, ValueError):  # builtin functions have no signature
        return "none"
    return "none" if argument is None or isinstance(criterion, torch.nn.Module) else argument.default


def _refuse_broadcast(losses: Tensor, output: Any, target: Any) -> None:
    """Refuse (n, 1) outputs against (n,) targets: every example is compared with every target."""
    if (
        isinstance(output, Tensor)
        and isinstance(target, Tensor)
        and losses.numel() > max(output.numel(), target.numel())
    ):
        raise SparseDPError(
            f"criterion: got outputs of {output.dim()} axes and targets of {target.dim()}, which are broadcast "
            "against each other, so that every example is compared with every target. Give both the same shape, such "
            "as output.squeeze(1) in the model's forward, or targets of shape (1,) in the data set"
        )


def validate_losses(losses: Tensor, rows: int) -> Tensor:
    """Refuse a loss that is not one number per row, and say how to fix it."""
    shape = tuple(losses.shape) if isinstance(losses, Tensor) else type(losses).__name__
    if shape == (rows, 1):
        return losses.squeeze(1)
    if shape != (rows,):
        raise SparseDPError(
            f"the loss returned {shape} for {rows} rows, expected ({rows},): one loss per row. "
            'Per-sample clipping cannot undo a mean or sum: use reduction="none", and average over all other axes'
        )
    return losses
