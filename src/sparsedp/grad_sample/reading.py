"""What two graphs of the same model, for two rows and for three, tell: where parameters meet the samples, and how.

Above such a meeting everything is the same for all samples: a parameter, or something computed from parameters alone.
At the meeting the output holds every sample's own part, so its gradient does too.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from torch.autograd.graph import Node

from sparsedp.grad_sample.graph import CannotBookError, Claims, Graph, Leaf
from sparsedp.grad_sample.rowaxis import RowAxis, Shape, varying_axis

VIEWS = frozenset(
    {
        "ViewBackward0",
        "UnsafeViewBackward0",
        "ReshapeAliasBackward0",
        "UnsqueezeBackward0",
        "SqueezeBackward1",
    }
)
WRITTEN_IN_PLACE = "torch::autograd::CopySlices"
"""What a tensor goes through when a view of it is written to; the views are then made anew."""


@dataclass(frozen=True, slots=True)
class Meeting:
    """A node (by number) where the samples meet what they share: its outputs, and the inputs that are shared."""

    node: int
    outputs: tuple[tuple[int, RowAxis], ...]
    shared: tuple[int, ...]


@dataclass(frozen=True, slots=True, eq=False)
class Reading:
    """All meetings, and the graph they were found in, to tell whether another graph is of the same form."""

    meetings: tuple[Meeting, ...]
    names: list[str]
    above: list[tuple[tuple[int, int] | None, ...]]
    claimed: frozenset[int]

    def fits(self, graph: Graph, claimed: Claims) -> bool:
        """Whether a graph has the form this was read from."""
        return self.claimed == claimed.nodes and self.above == graph.above and self.names == graph.names()


def read(two: Graph, three: Graph, claimed: Claims, leaves: Mapping[Node, Leaf]) -> Reading:
    """Find every meeting outside the recorded calls.

    Raises:
        CannotBookError: the graphs differ, samples are mixed, or it cannot be told where they lie.
    """
    names = three.names()
    if two.above != three.above or two.names() != names:
        raise CannotBookError("what it computes depends on the number of rows")
    if any(
        len(a._input_metadata) != len(b._input_metadata) for a, b in zip(two.nodes, three.nodes, strict=True)
    ):
        raise CannotBookError("it takes the rows apart one by one")
    finder = _Finder(two, three, names, leaves)
    meetings = tuple(finder.meetings(claimed))
    return Reading(meetings, names, three.above, claimed.nodes)


class _Finder:
    def __init__(self, two: Graph, three: Graph, names: list[str], leaves: Mapping[Node, Leaf]) -> None:
        self._graph = three
        self._names = names
        self._shapes = [_shapes(node) for node in three.nodes]
        self._axes: list[list[tuple[int, int] | str | None]] = [
            [_varying(a, b) for a, b in zip(_shapes(small), large, strict=True)]
            for small, large in zip(two.nodes, self._shapes, strict=True)
        ]
        self._shared: list[bool] = []
        self._active: list[bool] = []
        for number, inputs in enumerate(three.above):
            leaf = leaves.get(three.nodes[number])
            above = [spot[0] for spot in inputs if spot is not None]
            same = not any(self._axes[number])
            self._shared.append(same and all(self._shared[x] for x in above))
            self._active.append((leaf is not None and leaf.active) or any(self._active[x] for x in above))
        self._below: dict[tuple[int, int], list[int]] = {}
        for number, inputs in enumerate(three.above):
            for spot in inputs:
                if spot is not None:
                    self._below.setdefault(spot, []).append(number)
        self._found: dict[tuple[int, int], RowAxis | None] = {}

    def meetings(self, claimed: Claims) -> list[Meeting]:
        found = []
        for number, inputs in enumerate(self._graph.above):
            if number in claimed.nodes or self._shared[number]:
                continue
            if self._active[number] and not any(self._axes[number]):
                raise CannotBookError(f"{self._names[number]} mixes samples")
            shared = tuple(
                slot
                for slot, spot in enumerate(inputs)
                if spot is not None and self._shared[spot[0]] and self._active[spot[0]]
            )
            if shared:
                found.append(Meeting(number, self._outputs(number), shared))
        return found

    def _outputs(self, number: int) -> tuple[tuple[int, RowAxis], ...]:
        used = [place for place in range(len(self._shapes[number])) if self._is_used((number, place))]
        outputs = []
        for place in used:
            axis = self._row_axis((number, place))
            if axis is None:
                shape = self._shapes[number][place]
                followers = {self._names[x] for x in self._below.get((number, place), [])}
                remedy = "; use nn.ReLU(inplace=False) and its like" if WRITTEN_IN_PLACE in followers else ""
                raise CannotBookError(
                    f"it cannot be told where the samples lie in {self._names[number]}'s {shape}{remedy}"
                )
            outputs.append((place, axis))
        return tuple(outputs)

    def _is_used(self, spot: tuple[int, int]) -> bool:
        return spot in self._below or spot == (len(self._names) - 1, 0)

    def _row_axis(self, spot: tuple[int, int]) -> RowAxis | None:
        """Where the samples lie in one output.

        An axis as long as the samples is theirs. A longer one holds something besides, and how the two are laid out
        is told by a view that takes them apart later on.
        """
        varying = self._axes[spot[0]][spot[1]]
        if varying is None or isinstance(varying, str):
            return None
        axis, each = varying
        if each == 1:
            return RowAxis(axis)
        if spot not in self._found:
            self._found[spot] = None
            candidates = {
                self._by_what_follows(spot, follower, axis) for follower in self._below.get(spot, [])
            }
            candidates.discard(None)
            self._found[spot] = candidates.pop() if len(candidates) == 1 else None
        return self._found[spot]

    def _by_what_follows(self, spot: tuple[int, int], follower: int, axis: int) -> RowAxis | None:
        shape = self._shapes[spot[0]][spot[1]]
        for place, followed in enumerate(self._shapes[follower]):
            there = self._row_axis((follower, place))
            if there is None:
                continue
            if self._names[follower] in VIEWS or _is_made_anew(self._graph.nodes[follower]):
                return there.before_view(followed, shape, axis)
            if followed[there.axis] == shape[axis]:
                return RowAxis(axis, there.before, there.after)
        return None


def _shapes(node: Node) -> list[Shape]:
    return [tuple(output.shape) for output in node._input_metadata]


def _is_made_anew(node: Node) -> bool:
    """Whether it is a view of a tensor's numbers in the order they have, as in-place operations leave behind."""
    if node.name() != "AsStridedBackward0":
        return False
    sizes, strides, start = (getattr(node, f"_saved_{what}") for what in ("size", "stride", "storage_offset"))
    in_order = tuple(math.prod(sizes[axis + 1 :]) for axis in range(len(sizes)))
    return not start and tuple(strides) == in_order


def _varying(two: Shape, three: Shape) -> tuple[int, int] | str | None:
    try:
        return varying_axis(two, three)
    except ValueError:
        return "several"
