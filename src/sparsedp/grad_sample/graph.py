"""The autograd graph of the losses: which nodes recorded calls account for, and which use parameters on their own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import nn
from torch.autograd.graph import GradientEdge, Node, get_gradient_edge

from sparsedp.errors import ModelError

Place = tuple[Node, int]
"""One output of one node."""
Spot = tuple[int, int]
"""The same, the node by its number in the graph."""

WEIGHT_AS_USED = frozenset({"TBackward0", "ToCopyBackward0"})
"""A weight turned or cast on its way into a layer; autocast and second derivatives share these between uses."""


class CannotBookError(ModelError):
    """The fast path does not understand this model; the reference path may."""


class UnfitLayerError(CannotBookError):
    """A layer's formulas do not cover how it is used here; its operations may be followed one by one."""

    def __init__(self, layer: str, reason: object) -> None:
        super().__init__(f"layer {layer!r}: {reason}")
        self.layer = layer


@dataclass(frozen=True, slots=True)
class Ends:
    """Where a recorded call begins and ends in the graph."""

    layer: str
    outputs: frozenset[Place]
    inputs: frozenset[Place]


@dataclass(frozen=True, slots=True)
class Leaf:
    """A trainable parameter, the layers that answer for it, and whether it has an active coordinate."""

    parameter: str
    layers: frozenset[str]
    active: bool = True


@dataclass(frozen=True, slots=True, eq=False)
class Graph:
    """All nodes between the losses and the leaves, each after those it leads to, in an order of its own making.

    `above` holds, for every input of a node, where it comes from (None: nothing that needs a gradient).
    """

    nodes: list[Node]
    numbers: dict[Node, int]
    above: list[tuple[Spot | None, ...]]

    @classmethod
    def of(cls, start: GradientEdge) -> Graph:
        """The graph from an edge on."""
        graph = cls([], {}, [])
        open_nodes = {start.node}
        stack = [(start.node, iter(start.node.next_functions))]
        while stack:
            node, rest = stack[-1]
            for following, _ in rest:
                if following is not None and following not in open_nodes:
                    open_nodes.add(following)
                    stack.append((following, iter(following.next_functions)))
                    break
            else:
                stack.pop()
                graph._add(node)
        return graph

    def _add(self, node: Node) -> None:
        self.numbers[node] = len(self.nodes)
        self.nodes.append(node)
        self.above.append(
            tuple(None if x is None else (self.numbers[x], place) for x, place in node.next_functions)
        )

    def spot(self, place: Place) -> Spot | None:
        """A place by number; None if the losses do not depend on it."""
        number = self.numbers.get(place[0])
        return None if number is None else (number, place[1])

    def names(self) -> list[str]:
        """What kind of node each is."""
        return [node.name() for node in self.nodes]


@dataclass(frozen=True, slots=True)
class Claims:
    """What the recorded calls account for: their nodes, the layers whose calls are not closed, uses outside.

    `unfit` says of a layer why its formulas cannot stand for it; `outside` holds nodes outside all calls that use an
    active parameter directly.
    """

    nodes: frozenset[int]
    unfit: dict[str, str]
    outside: tuple[int, ...]


@dataclass(slots=True)
class _Search:
    graph: Graph
    leaves: dict[int, Leaf]
    recorded: set[Spot]
    owner: dict[int, int] = field(default_factory=dict)
    unfit: dict[str, str] = field(default_factory=dict)


def claims(graph: Graph, calls: Sequence[Ends], leaves: Mapping[Node, Leaf]) -> Claims:
    """Go into every recorded call that the losses depend on, from its output to its inputs.

    A call is fit for its layer's formulas if all parameters inside are the layer's own, and nothing outside uses what
    lies inside.
    """
    numbered = {graph.numbers[node]: leaf for node, leaf in leaves.items() if node in graph.numbers}
    spots = [{graph.spot(place) for place in call.outputs} - {None} for call in calls]
    search = _Search(graph, numbered, {x for many in spots for x in many if x is not None})
    ends: set[Spot] = set()
    for number, call in enumerate(calls):
        outputs = {x for x in spots[number] if x is not None and x[0] not in numbered}
        if outputs:
            _enter(search, number, call, outputs)
            ends |= outputs
    outside = []
    for number, inputs in enumerate(graph.above):
        mine = search.owner.get(number)
        direct = False
        for spot in inputs:
            if spot is None:
                continue
            if spot[0] in numbered:
                direct |= numbered[spot[0]].active
            elif (theirs := search.owner.get(spot[0])) not in (None, mine) and spot not in ends:
                if graph.nodes[spot[0]].name() in WEIGHT_AS_USED:
                    direct = True
                elif theirs is not None:
                    layer = calls[theirs].layer
                    search.unfit[layer] = "a tensor inside it is used elsewhere"
        if direct and mine is None:
            outside.append(number)
    return Claims(frozenset(search.owner), search.unfit, tuple(outside))


def _enter(search: _Search, number: int, call: Ends, outputs: set[Spot]) -> None:
    """Claim the nodes between one call's outputs and its inputs."""
    inputs = {search.graph.spot(place) for place in call.inputs}
    stack = [node for node, place in outputs if (node, place) not in inputs]
    seen = set(stack)
    while stack:
        node = stack.pop()
        search.owner.setdefault(node, number)
        for spot in search.graph.above[node]:
            if spot is None or spot in inputs or spot[0] in seen:
                continue
            if (leaf := search.leaves.get(spot[0])) is not None:
                if call.layer not in leaf.layers:
                    search.unfit[call.layer] = f"it uses parameter {leaf.parameter!r}"
            elif spot in search.recorded:
                search.unfit[call.layer] = "it uses what another layer computed without being given it"
            else:
                seen.add(spot[0])
                stack.append(spot[0])


def place_of(edge: GradientEdge) -> Place:
    """Where an edge ends."""
    return edge.node, edge.output_nr


def graph_leaf(parameter: nn.Parameter) -> Node:
    """The node of the autograd graph in which a parameter's uses end; it stays the same while it is held."""
    with torch.enable_grad():
        return get_gradient_edge(parameter).node
