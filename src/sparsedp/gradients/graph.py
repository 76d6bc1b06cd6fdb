"""A walk over the autograd graph of the losses: is every use of every parameter inside a recorded call?"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import nn
from torch.autograd.graph import GradientEdge, Node, get_gradient_edge

from sparsedp.core.errors import ModelError

Place = tuple[Node, int]
"""One output of one node."""


class CannotBookError(ModelError):
    """The fast path does not understand this model; the reference path may."""


@dataclass(frozen=True, slots=True)
class Ends:
    """Where a recorded call begins and ends in the graph."""

    layer: str
    outputs: frozenset[Place]
    inputs: frozenset[Place]


@dataclass(frozen=True, slots=True)
class Leaf:
    """A parameter, and the layers that answer for it."""

    parameter: str
    layers: frozenset[str]


@dataclass(frozen=True, slots=True)
class Walk:
    """The nodes met, and what was noticed about some calls (by number).

    `hidden_inputs` used what another call computed without being given it; of `nested_outputs` one is computed from
    another.
    """

    nodes: set[Node]
    hidden_inputs: set[int]
    nested_outputs: set[int]


def place_of(edge: GradientEdge) -> Place:
    """Where an edge ends."""
    return edge.node, edge.output_nr


def graph_leaf(parameter: nn.Parameter) -> Node:
    """The node of the autograd graph in which a parameter's uses end; it stays the same while it is held."""
    with torch.enable_grad():
        return get_gradient_edge(parameter).node


def walk(start: GradientEdge, calls: Sequence[Ends], leaves: Mapping[Node, Leaf]) -> Walk:
    """From the losses to recorded outputs, inside each of these calls to its inputs, and on from there.

    A leaf met outside every call, or inside the call of a layer that does not answer for it, is a use that the
    layers' formulas would miss.

    Raises:
        CannotBookError: a parameter is used by hand (for example `F.linear(x, self.embedding.weight)`), a tensor
            inside a layer is used elsewhere.
    """
    recorded: dict[Place, list[int]] = {}
    for number, call in enumerate(calls):
        for place in call.outputs:
            if place[0] not in leaves:
                recorded.setdefault(place, []).append(number)
    found = Walk(set(), set(), set())
    outside: set[Node] = set()
    reached: set[int] = set()
    stack = [place_of(start)]
    while stack:
        place = stack.pop()
        node = place[0]
        if place in recorded:
            for number in recorded[place]:
                if number not in reached:
                    reached.add(number)
                    stack += _inside(number, calls[number], recorded, leaves, found)
        elif node in leaves:
            raise CannotBookError(f"parameter {leaves[node].parameter!r} is used outside its layer's forward")
        elif node not in outside:
            outside.add(node)
            stack += _above(node)
    found.nodes.update(outside)
    return found


def _inside(
    number: int,
    call: Ends,
    recorded: Mapping[Place, list[int]],
    leaves: Mapping[Node, Leaf],
    found: Walk,
) -> set[Place]:
    """From one call's outputs to its inputs; returns where the walk goes on."""
    exits = set(call.inputs)
    stack = [node for node, _ in call.outputs - call.inputs]
    seen = set(stack)
    while stack:
        for place in _above(stack.pop()):
            node = place[0]
            if place in call.inputs or node in seen:
                continue
            if node in leaves:
                if call.layer not in leaves[node].layers:
                    raise CannotBookError(
                        f"parameter {leaves[node].parameter!r} is used inside {call.layer!r}"
                    )
            elif place in recorded:
                exits.add(place)
                found.hidden_inputs.add(number)
            else:
                seen.add(node)
                stack.append(node)
    if len(call.outputs) > 1 and any(
        above in call.outputs and above not in call.inputs for node in seen for above in _above(node)
    ):
        found.nested_outputs.add(number)
    found.nodes.update(seen)
    return exits


def _above(node: Node) -> list[Place]:
    return [(following, place) for following, place in node.next_functions if following is not None]
