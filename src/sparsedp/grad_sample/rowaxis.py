"""Where the samples lie in a tensor: told from its shapes for two and three rows, and from the views made of it."""

from __future__ import annotations

import math
from dataclasses import dataclass

from torch import Tensor

Shape = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class RowAxis:
    """The samples lie along `axis`, which runs over [before, samples, after], flattened."""

    axis: int
    before: int = 1
    after: int = 1

    @property
    def first(self) -> bool:
        """Whether the first axis is the samples and nothing else."""
        return self == RowAxis(0)

    def samples(self, shape: Shape) -> int | None:
        """The number of samples in a tensor of this shape; None where it does not fit."""
        if self.axis >= len(shape):
            return None
        count, rest = divmod(shape[self.axis], self.before * self.after)
        return None if rest else count

    def to_front(self, tensor: Tensor, samples: int) -> Tensor:
        """[samples, *shape], where what else lay along the axis stays in its place."""
        if self.before == self.after == 1:
            return tensor.movedim(self.axis, 0).unsqueeze(self.axis + 1)
        split = self._split(tensor, samples)
        return split.movedim(self.axis + 1, 0).flatten(self.axis + 1, self.axis + 2)

    def only(self, tensor: Tensor, sample: int, samples: int) -> Tensor:
        """A copy with every other sample's entries set to zero."""
        kept = tensor.new_zeros(tensor.shape)
        here = self._split(tensor, samples).select(self.axis + 1, sample)
        self._split(kept, samples).select(self.axis + 1, sample).copy_(here)
        return kept

    def _split(self, tensor: Tensor, samples: int) -> Tensor:
        shape = tensor.shape
        return tensor.view(*shape[: self.axis], self.before, samples, self.after, *shape[self.axis + 1 :])

    def before_view(self, viewed: Shape, original: Shape, axis: int) -> RowAxis | None:
        """This axis of a view, in the tensor it is a view of, where the samples are known to lie along `axis`."""
        outside = math.prod(viewed[: self.axis]) * self.before
        before, rest = divmod(outside, math.prod(original[:axis]))
        inside = math.prod(viewed[self.axis + 1 :]) * self.after
        after, more = divmod(inside, math.prod(original[axis + 1 :]))
        return None if rest or more else RowAxis(axis, before, after)


def varying_axis(two: Shape, three: Shape) -> tuple[int, int] | None:
    """The axis whose length goes with the number of rows, and its length per row; None if no axis changes.

    Raises:
        ValueError: several axes change, or not in proportion to the rows.
    """
    if two == three:
        return None
    changed = [axis for axis, (a, b) in enumerate(zip(two, three, strict=False)) if a != b]
    if len(two) != len(three) or len(changed) != 1:
        raise ValueError
    each, rest = divmod(two[changed[0]], 2)
    if rest or three[changed[0]] != 3 * each:
        raise ValueError
    return changed[0], each
