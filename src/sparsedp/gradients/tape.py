"""The tape: one forward that remembers what each layer saw, one backward to the layers' outputs."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, Node, get_gradient_edge
from torch.utils import _pytree as pytree

from sparsedp.core.errors import ModelError
from sparsedp.gradients.graph import CannotBookError, Ends, Leaf, Place, place_of, walk
from sparsedp.gradients.hooks import custom_backward, refuse_inside_a_function, tensor_hooks_noted


@dataclass(slots=True)
class Call:
    """One call of one layer: its arguments, and the gradients of the loss with respect to its outputs. Private.

    Edges and gradients are keyed by the place of the output among the tensors the layer returned. `hidden_inputs`
    tells that it used what another layer computed without being given it, `nested_outputs` that one output was
    computed from another, so that their gradients count some paths twice.
    """

    name: str
    module: nn.Module
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    versions: tuple[int, ...]
    ends: Ends
    edges: dict[int, GradientEdge]
    gradients: dict[int, Tensor] = field(default_factory=dict)
    hidden_inputs: bool = False
    nested_outputs: bool = False

    @property
    def tensors(self) -> list[Tensor]:
        """All tensors among the arguments."""
        return _tensors((self.args, self.kwargs))

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
            edges = {i: get_gradient_edge(t) for i, t in enumerate(_tensors(output)) if t.requires_grad}
            ends = Ends(name, frozenset(map(place_of, edges.values())), inputs)
            self.calls.append(Call(name, module, args, kwargs, versions, ends, edges))

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

    def check_graph(self, losses: Tensor, leaves: Mapping[Node, Leaf], thorough: bool) -> None:
        """Every use of these parameters in the loss must be inside a recorded call of a layer of theirs.

        Raises:
            CannotBookError: it is not, or code of the user's own runs in the backward pass (hooks on nodes are looked
                for only where `thorough`, as that takes longer).
        """
        if self._tensor_hooks:
            raise CannotBookError(self._tensor_hooks[0])
        if not losses.requires_grad:
            return
        found = walk(get_gradient_edge(losses), [call.ends for call in self.calls], leaves)
        if (reason := custom_backward(found.nodes, thorough)) is not None:
            raise CannotBookError(reason)
        for number in found.hidden_inputs:
            self.calls[number].hidden_inputs = True
        for number in found.nested_outputs:
            self.calls[number].nested_outputs = True

    def check_inputs_unchanged(self) -> None:
        """Refuse a forward that overwrites what a layer has read, as autograd itself would."""
        for call in self.calls:
            versions = tuple(t._version for t in _arguments(call.args, call.kwargs))
            if versions != call.versions:
                raise ModelError(
                    f"the input of layer {call.name!r} is modified in place after the layer has read it, so its "
                    "gradient is lost; use the out-of-place form (for example nn.ReLU(inplace=False))"
                )


def batched_arguments(two: list[Call], three: list[Call]) -> tuple[tuple[bool, ...], ...]:
    """For every tensor among the arguments of each call with a gradient: is its first axis the samples?

    Raises:
        CannotBookError: the calls differ, or an argument is neither one row per sample nor the same for all.
    """
    if [call.name for call in two] != [call.name for call in three]:
        raise CannotBookError("which layers are called depends on the number of rows")
    batched = []
    for small, large in zip(two, three, strict=True):
        shapes = [(a.shape, b.shape) for a, b in zip(small.tensors, large.tensors, strict=False)]
        for a, b in shapes:
            if a != b and (a[:1] != (2,) or b[:1] != (3,)) and small.gradients:
                raise CannotBookError(f"an argument of {small.name!r} has {a} entries for 2 rows, {b} for 3")
        batched.append(tuple(a != b for a, b in shapes))
    return tuple(batched)


def _arguments(args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Tensor]:
    return _tensors(args[0]) if len(args) == 1 and not kwargs else _tensors((args, kwargs))


def _tensors(tree: Any) -> list[Tensor]:
    if isinstance(tree, Tensor):
        return [tree]
    return [leaf for leaf in pytree.tree_leaves(tree) if isinstance(leaf, Tensor)]
