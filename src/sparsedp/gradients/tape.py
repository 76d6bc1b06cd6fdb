"""The tape: one forward that remembers what each layer saw, one backward to the layers' outputs."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, Node, get_gradient_edge
from torch.utils import _pytree as pytree

from sparsedp.core.errors import ModelError


class CannotBookError(ModelError):
    """The fast path does not understand this model; the reference path may."""


@dataclass(slots=True)
class Call:
    """One call of one layer: its arguments, and the gradients of the loss with respect to its outputs. Private.

    Edges and gradients are keyed by the place of the output among the tensors the layer returned.
    """

    name: str
    module: nn.Module
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    versions: tuple[int, ...]
    edges: dict[int, GradientEdge]
    gradients: dict[int, Tensor] = field(default_factory=dict)

    @property
    def input(self) -> Tensor:
        """The first argument, for layers that take one tensor."""
        first = self.args[0] if self.args else next(iter(self.kwargs.values()))
        assert isinstance(first, Tensor)
        return first.detach()

    @property
    def output_gradient(self) -> Tensor | None:
        """The gradient with respect to the output, for layers that give one tensor; None if the loss ignores it."""
        return self.gradients.get(0)


class Tape:
    """Records the calls of chosen layers during one forward pass."""

    def __init__(self) -> None:
        self.calls: list[Call] = []
        self._claimed: set[tuple[Node, int]] = set()

    @contextmanager
    def recording(self, layers: Mapping[str, nn.Module]) -> Iterator[None]:
        """Record every call of these layers; leaves no trace on them afterwards."""
        handles = [
            layer.register_forward_hook(self._hook(name), with_kwargs=True, prepend=True)
            for name, layer in layers.items()
        ]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _hook(self, name: str) -> Callable[..., None]:
        def record(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
            inputs = _arguments(args, kwargs)
            edges = {i: get_gradient_edge(t) for i, t in enumerate(_tensors(output)) if t.requires_grad}
            self.calls.append(Call(name, module, args, kwargs, tuple(t._version for t in inputs), edges))
            stop = {t.grad_fn for t in inputs if t.grad_fn is not None}
            self._claimed |= set(_edges_to_leaves([e.node for e in edges.values()], stop))

        return record

    def backward(self, losses: Tensor, weights: Tensor | None) -> None:
        """Fill in every call's output gradients, computing no weight gradient at all."""
        edges = [edge for call in self.calls for edge in call.edges.values()]
        if not edges or not losses.requires_grad:
            return
        start = torch.ones_like(losses) if weights is None else weights.to(losses)
        found = iter(torch.autograd.grad(losses, edges, start, allow_unused=True))
        for call in self.calls:
            taken = {place: next(found) for place in call.edges}
            call.gradients = {place: g for place, g in taken.items() if g is not None}

    def check_nothing_escaped(self, losses: Tensor, leaves: Mapping[Node, str]) -> None:
        """Every use of these parameters (by their graph leaves) in the loss must be inside a recorded call.

        Raises:
            CannotBookError: a parameter is used by hand (for example `F.linear(x, self.embedding.weight)`).
        """
        if losses.grad_fn is None:
            return
        for node, place in _edges_to_leaves([losses.grad_fn], set()):
            leaf = node.next_functions[place][0]
            if leaf is not None and leaf in leaves and (node, place) not in self._claimed:
                raise CannotBookError(f"parameter {leaves[leaf]!r} is used outside its layer's forward")

    def check_inputs_unchanged(self) -> None:
        """Refuse a forward that overwrites what a layer has read, as autograd itself would."""
        for call in self.calls:
            versions = tuple(t._version for t in _arguments(call.args, call.kwargs))
            if versions != call.versions:
                raise ModelError(
                    f"the input of layer {call.name!r} is modified in place after the layer has read it, so its "
                    "gradient is lost; use the out-of-place form (for example nn.ReLU(inplace=False))"
                )


def graph_leaf(parameter: nn.Parameter) -> Node:
    """The node of the autograd graph in which a parameter's uses end; it stays the same while it is held."""
    with torch.enable_grad():
        return get_gradient_edge(parameter).node


def _arguments(args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Tensor]:
    return _tensors(args[0]) if len(args) == 1 and not kwargs else _tensors((args, kwargs))


def _tensors(tree: Any) -> list[Tensor]:
    if isinstance(tree, Tensor):
        return [tree]
    return [leaf for leaf in pytree.tree_leaves(tree) if isinstance(leaf, Tensor)]


def _edges_to_leaves(starts: Iterable[Node], stop: set[Node]) -> Iterator[tuple[Node, int]]:
    """All edges (node, place) of the graph above `starts` that end in a leaf, not walking past `stop`."""
    seen = set(stop)
    stack = [node for node in starts if node not in seen]
    seen.update(stack)
    while stack:
        node = stack.pop()
        for place, (following, _) in enumerate(node.next_functions):
            if following is None:
                continue
            if not following.next_functions:
                yield node, place
            elif following not in seen:
                seen.add(following)
                stack.append(following)
