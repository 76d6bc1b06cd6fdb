"""The tape: one forward that remembers what each layer saw, one backward to the layers' outputs."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.utils import _pytree as pytree

from sparsedp.errors import ModelError
from sparsedp.grad_sample.graph import CannotBookError, Ends, Graph, Place, place_of
from sparsedp.grad_sample.hooks import custom_backward, refuse_inside_a_function, tensor_hooks_noted
from sparsedp.grad_sample.keyed import KeyedDraws

if TYPE_CHECKING:
    from sparsedp.grad_sample.layers.shared import Use


@dataclass(slots=True)
class Call:
    """One call of one layer: its arguments, and the gradient of the loss with respect to its output. Private."""

    name: str
    module: nn.Module
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    versions: tuple[int, ...]
    ends: Ends
    edge: GradientEdge | None
    output_gradient: Tensor | None = None

    @classmethod
    def of(cls, module: nn.Module, input: Tensor, output_gradient: Tensor) -> Call:
        """A call that was never recorded, for a layer's formulas on tensors found elsewhere."""
        return cls("", module, (input,), {}, (), Ends("", frozenset(), frozenset()), None, output_gradient)

    @property
    def input(self) -> Tensor:
        """The first argument, for layers that take one tensor."""
        first = self.args[0] if self.args else self.kwargs.get("input", next(iter(self.kwargs.values())))
        assert isinstance(first, Tensor)
        return first.detach()

    @property
    def shapes(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """The shapes of input and output."""
        assert self.edge is not None
        return tuple(self.input.shape), tuple(self.edge.node._input_metadata[self.edge.output_nr].shape)


class Tape:
    """Records the calls of chosen layers during one forward pass."""

    def __init__(self, keyed: KeyedDraws | None = None) -> None:
        self.keyed = keyed
        self.calls: list[Call] = []
        self._begun: list[tuple[tuple[int, ...], frozenset[Place]]] = []
        self._tensor_hooks: list[str] = []

    @contextmanager
    def recording(self, layers: Mapping[str, nn.Module]) -> Iterator[None]:
        """Record every call of these layers; leaves no trace on them afterwards."""
        handles = []
        for name, layer in layers.items():
            handles.append(layer.register_forward_pre_hook(self._begin, with_kwargs=True))
            handles.append(layer.register_forward_hook(self._end(name), with_kwargs=True, prepend=True))
        try:
            with tensor_hooks_noted() as self._tensor_hooks:
                yield
        finally:
            for handle in handles:
                handle.remove()

    def _begin(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        inputs = _arguments(args, kwargs)
        places = frozenset(place_of(get_gradient_edge(t)) for t in inputs if t.requires_grad)
        self._begun.append((tuple(t._version for t in inputs), places))

    def _end(self, name: str) -> Callable[..., None]:
        def record(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
            refuse_inside_a_function(name)
            versions, inputs = self._begun.pop()
            tensors = [t for t in _tensors(output) if t.requires_grad]
            edge = get_gradient_edge(tensors[0]) if tensors else None
            ends = Ends(name, frozenset() if edge is None else frozenset({place_of(edge)}), inputs)
            self.calls.append(Call(name, module, args, kwargs, versions, ends, edge))

        return record

    def graph(self, losses: Tensor, thorough: bool) -> Graph:
        """The graph of the losses; empty where they need no gradient.

        Raises:
            CannotBookError: code of the user's own runs in the backward pass (hooks on nodes are looked for only
                where `thorough`, as that takes longer).
        """
        if self._tensor_hooks:
            raise CannotBookError(self._tensor_hooks[0])
        if not losses.requires_grad:
            return Graph([], {}, [])
        graph = Graph.of(get_gradient_edge(losses))
        if (reason := custom_backward(graph.nodes, thorough)) is not None:
            raise CannotBookError(reason)
        return graph

    def backward(
        self, losses: Tensor, weights: Tensor | None, uses: Sequence[Use], keep_graph: bool = False
    ) -> None:
        """Fill in the output gradients of all calls and uses, computing no weight gradient at all."""
        start = torch.ones_like(losses) if weights is None else weights.to(losses)
        again = keep_graph or not all(use.has_formula for use in uses)
        found = iter(output_gradients(losses, start, self.calls, uses, keep_graph=again))
        for call in self.calls:
            call.output_gradient = None if call.edge is None else next(found)
        for use in uses:
            taken = {place: next(found) for place, _ in use.meeting.outputs}
            use.gradients = {place: g for place, g in taken.items() if g is not None}

    def check_inputs_unchanged(self) -> None:
        """Refuse a forward that overwrites what a layer has read, as autograd itself would."""
        for call in self.calls:
            versions = tuple(t._version for t in _arguments(call.args, call.kwargs))
            if versions != call.versions:
                raise ModelError(
                    f"the input of layer {call.name!r} is modified in place after the layer has read it, so its "
                    "gradient is lost; use the out-of-place form (for example nn.ReLU(inplace=False))"
                )


def output_gradients(
    losses: Tensor, start: Tensor, calls: Sequence[Call], uses: Sequence[Use], keep_graph: bool
) -> tuple[Tensor | None, ...]:
    """The gradients of the outputs of all calls, then of all uses; None where the losses do not depend on them."""
    edges = [call.edge for call in calls if call.edge is not None] + [e for use in uses for e in use.edges]
    if not edges or not losses.requires_grad:
        return (None,) * len(edges)
    return torch.autograd.grad(losses, edges, start, allow_unused=True, retain_graph=keep_graph)


def _arguments(args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Tensor]:
    return _tensors(args[0]) if len(args) == 1 and not kwargs else _tensors((args, kwargs))


def _tensors(tree: Any) -> list[Tensor]:
    if isinstance(tree, Tensor):
        return [tree]
    return [leaf for leaf in pytree.tree_leaves(tree) if isinstance(leaf, Tensor)]
