"""The autograd graph of the losses: where parameters meet the examples, and along which axis the examples lie.

The losses come from `isolated_losses`: the model ran on one example at a time, vectorised, and autograd recorded the
batched operations underneath. So no node mixes examples, and the graph's form depends on shapes alone. Two
graphs, for two and for three examples, tell the axis of the examples in every node: the one whose length changes.

Above a meeting everything is the same for all examples: a parameter, or something computed from parameters alone. At
the meeting the output holds every example's own part, so its gradient does too.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import Node, get_gradient_edge

from sparsedp.errors import ModelError

Shape = tuple[int, ...]
Place = tuple[Node, int]
"""One output of one node."""
Spot = tuple[int, int]
"""The same, the node by its number in the graph."""

VIEWS = frozenset(
    {
        "ViewBackward0",
        "UnsafeViewBackward0",
        "ReshapeAliasBackward0",
        "UnsqueezeBackward0",
        "SqueezeBackward1",
    }
)


class FallbackError(ModelError):
    """The book-keeping engine has no formulas for this model; the reference engine needs none."""


@dataclass(frozen=True, slots=True)
class ExampleAxis:
    """The examples lie along `axis`, which runs over [before, examples, after], flattened."""

    axis: int
    before: int = 1
    after: int = 1

    def examples(self, shape: Shape) -> int | None:
        if self.axis >= len(shape):
            return None
        count, rest = divmod(shape[self.axis], self.before * self.after)
        return None if rest else count

    def to_front(self, tensor: Tensor, examples: int) -> Tensor:
        """[examples, *shape], where what else lay along the axis stays in its place."""
        if self.before == self.after == 1:
            return tensor.movedim(self.axis, 0).unsqueeze(self.axis + 1)
        split = self._split(tensor, examples)
        return split.movedim(self.axis + 1, 0).flatten(self.axis + 1, self.axis + 2)

    def only(self, tensor: Tensor, example: int, examples: int) -> Tensor:
        """A copy with every other example's entries set to zero."""
        kept = tensor.new_zeros(tensor.shape)
        here = self._split(tensor, examples).select(self.axis + 1, example)
        self._split(kept, examples).select(self.axis + 1, example).copy_(here)
        return kept

    def _split(self, tensor: Tensor, examples: int) -> Tensor:
        shape = tensor.shape
        return tensor.reshape(*shape[: self.axis], self.before, examples, self.after, *shape[self.axis + 1 :])

    def before_view(self, viewed: Shape, original: Shape, axis: int) -> ExampleAxis | None:
        """This axis of a view, in the tensor it is a view of, where the examples are known to lie along `axis`."""
        outside = math.prod(viewed[: self.axis]) * self.before
        before, rest = divmod(outside, math.prod(original[:axis]))
        inside = math.prod(viewed[self.axis + 1 :]) * self.after
        after, more = divmod(inside, math.prod(original[axis + 1 :]))
        return None if rest or more else ExampleAxis(axis, before, after)


@dataclass(frozen=True, slots=True, eq=False)
class Graph:
    """All nodes, each after those it leads to, and `above`: where its inputs come from (None: no gradient)."""

    nodes: list[Node]
    above: list[tuple[Spot | None, ...]]

    @classmethod
    def of(cls, losses: Tensor) -> Graph:
        graph, numbers = cls([], []), dict[Node, int]()
        if not losses.requires_grad:
            return graph
        start = get_gradient_edge(losses).node
        open_nodes = {start}
        stack = [(start, iter(start.next_functions))]
        while stack:
            node, rest = stack[-1]
            for following, _ in rest:
                if following is not None and following not in open_nodes:
                    open_nodes.add(following)
                    stack.append((following, iter(following.next_functions)))
                    break
            else:
                stack.pop()
                numbers[node] = len(graph.nodes)
                graph.nodes.append(node)
                inputs = ((x, place) for x, place in node.next_functions)
                graph.above.append(tuple(None if x is None else (numbers[x], place) for x, place in inputs))
        return graph

    def names(self) -> list[str]:
        return [node.name() for node in self.nodes]


@dataclass(frozen=True, slots=True)
class Meeting:
    """A node (by number) where examples meet what they share: its outputs, and the inputs that are shared."""

    node: int
    outputs: tuple[tuple[int, ExampleAxis], ...]
    shared: tuple[int, ...]


@dataclass(frozen=True, slots=True, eq=False)
class Trace:
    """All meetings, and the graph they were found in, to tell whether another graph is of the same form."""

    meetings: tuple[Meeting, ...]
    names: list[str]
    above: list[tuple[Spot | None, ...]]

    def fits(self, graph: Graph) -> bool:
        return self.above == graph.above and self.names == graph.names()


def trace(two: Graph, three: Graph, leaves: Mapping[Node, str]) -> Trace:
    """Find every meeting with the parameters that end in `leaves`, from graphs for two and for three examples."""
    names = three.names()
    for node in three.nodes:
        if isinstance(node, BackwardCFunction):
            raise FallbackError(f"its graph holds a backward of its own ({node.name()})")
    if two.above != three.above or two.names() != names:
        raise FallbackError("what it computes depends on the number of examples")
    return Trace(tuple(_Finder(two, three, names, leaves).meetings()), names, three.above)


class _Finder:
    def __init__(self, two: Graph, three: Graph, names: list[str], leaves: Mapping[Node, str]) -> None:
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
            above = [spot[0] for spot in inputs if spot is not None]
            self._shared.append(not any(self._axes[number]) and all(self._shared[x] for x in above))
            self._active.append(three.nodes[number] in leaves or any(self._active[x] for x in above))
        self._below: dict[Spot, list[int]] = {}
        for number, inputs in enumerate(three.above):
            for spot in inputs:
                if spot is not None:
                    self._below.setdefault(spot, []).append(number)
        self._found: dict[Spot, ExampleAxis | None] = {}

    def meetings(self) -> list[Meeting]:
        found = []
        for number, inputs in enumerate(self._graph.above):
            if self._shared[number]:
                continue
            if self._active[number] and not any(self._axes[number]):
                raise FallbackError(f"{self._names[number]} has no axis of examples")
            shared = tuple(
                slot
                for slot, spot in enumerate(inputs)
                if spot is not None and self._shared[spot[0]] and self._active[spot[0]]
            )
            if shared:
                found.append(Meeting(number, self._outputs(number), shared))
        return found

    def _outputs(self, number: int) -> tuple[tuple[int, ExampleAxis], ...]:
        name, outputs = self._names[number], []
        for place, shape in enumerate(self._shapes[number]):
            spot = (number, place)
            if spot in self._below or spot == (len(self._names) - 1, 0):
                axis = self._example_axis(spot)
                if axis is None:
                    raise FallbackError(f"it cannot be told where the examples lie in {name}'s {shape}")
                outputs.append((place, axis))
        return tuple(outputs)

    def _example_axis(self, spot: Spot) -> ExampleAxis | None:
        """Where the examples lie in one output; an axis longer than they are many is told by a later view of it."""
        varying = self._axes[spot[0]][spot[1]]
        if varying is None or isinstance(varying, str):
            return None
        axis, each = varying
        if each == 1:
            return ExampleAxis(axis)
        if spot not in self._found:
            self._found[spot] = None
            candidates = {
                self._by_what_follows(spot, follower, axis) for follower in self._below.get(spot, [])
            }
            candidates.discard(None)
            self._found[spot] = candidates.pop() if len(candidates) == 1 else None
        return self._found[spot]

    def _by_what_follows(self, spot: Spot, follower: int, axis: int) -> ExampleAxis | None:
        shape = self._shapes[spot[0]][spot[1]]
        for place, followed in enumerate(self._shapes[follower]):
            there = self._example_axis((follower, place))
            if there is None:
                continue
            if self._names[follower] in VIEWS or _is_made_anew(self._graph.nodes[follower]):
                return there.before_view(followed, shape, axis)
            if followed[there.axis] == shape[axis]:
                return ExampleAxis(axis, there.before, there.after)
        return None


def graph_leaf(parameter: nn.Parameter) -> Node:
    """The node of the autograd graph in which a parameter's uses end; it stays the same while it is held."""
    with torch.enable_grad():
        return get_gradient_edge(parameter).node


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
    """The axis whose length goes with the number of examples, and its length per example; None if none changes."""
    if two == three:
        return None
    changed = [axis for axis, (a, b) in enumerate(zip(two, three, strict=False)) if a != b]
    if len(two) != len(three) or len(changed) != 1:
        return "several"
    each, rest = divmod(two[changed[0]], 2)
    return "several" if rest or three[changed[0]] != 3 * each else (changed[0], each)
