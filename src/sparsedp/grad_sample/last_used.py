"""Which parameters the losses use last: those of layers after which no other trained layer comes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from sparsedp.core.batch import PerSampleLoss, Rows
from sparsedp.grad_sample.graph import graph_leaf

Names = frozenset[str]
Node = Any
"""A node of the losses' graph: it is only walked, and no gradient taken."""


@dataclass(frozen=True, slots=True)
class LastUsed:
    """The end of a model, by the names of trainable parameters; a tied one has its first name.

    Attributes:
        layers: the last layers, and the parameters each of them has.
        bare: matrices that are used there by themselves, outside of any layer.
    """

    layers: dict[str, Names]
    bare: Names

    @property
    def parameters(self) -> Names:
        """All of them."""
        return self.bare.union(*self.layers.values())

    def beyond(self, meant: Names) -> Names:
        """Parameters that make the output in the place of those that are meant, or with them.

        Where several layers stand side by side, each may be meant. Where there is one, its parameters are, those
        too that belong to another module (tied weights), and so is a matrix that comes after it.
        """
        if not meant & self.parameters:
            return self.parameters
        if len(self.layers) != 1:
            return frozenset()
        ((layer, names),) = self.layers.items()
        tied = {name for name in names if not name.startswith(f"{layer}." if layer else "")}
        return (self.bare | tied) - meant


def used_last(model: nn.Module, loss: PerSampleLoss, rows: Rows) -> LastUsed:
    """Run some rows, and walk from the losses down to the first layers with something to train."""
    outputs: dict[str, set[Node]] = {}

    def note(name: str, output: Any) -> None:
        tensors = [x for x in pytree.tree_leaves(output) if isinstance(x, Tensor)]
        outputs.setdefault(name, set()).update(x.grad_fn for x in tensors if x.grad_fn is not None)

    with torch.enable_grad(), _each_call(model, note):
        losses = loss(model, rows)
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    leaves = {graph_leaf(p): name for name, p in trained.items()}
    if losses.grad_fn is None:
        return LastUsed({}, frozenset())
    matters = frozenset(leaves[node] for node in _down_to(losses.grad_fn, set()) if node in leaves)
    layers = {name: names & matters for name, names in _innermost(model, trained, outputs).items()}
    seen = _down_to(losses.grad_fn, set().union(*(outputs[name] for name in layers)))
    bare = frozenset(leaves[node] for node in seen if node in leaves)
    return LastUsed(
        {name: names for name, names in layers.items() if names and outputs[name] & seen},
        frozenset(name for name in bare if trained[name].dim() > 1),
    )


def _innermost(
    model: nn.Module, trained: dict[str, nn.Parameter], called: dict[str, set[Node]]
) -> dict[str, Names]:
    """The called modules that have something to train, and in which no other such module is called."""
    known = {id(p): name for name, p in trained.items()}
    modules = dict(model.named_modules())
    found = {
        name: frozenset(known[id(p)] for p in modules[name].parameters() if id(p) in known) for name in called
    }
    holding = [name for name, names in found.items() if names]
    around = {name[:place] for name in holding for place in range(len(name)) if name[place] == "."}
    outer = around | ({""} if any(holding) else set())
    return {name: found[name] for name in holding if name not in outer}


def _down_to(start: Node, ends: set[Node]) -> set[Node]:
    """The nodes that a graph leads to, these included, without what lies below them."""
    seen, left = {start}, [start]
    while left:
        node = left.pop()
        if node in ends:
            continue
        for following, _ in node.next_functions:
            if following is not None and following not in seen:
                seen.add(following)
                left.append(following)
    return seen


@contextmanager
def _each_call(model: nn.Module, note: Callable[[str, Any], None]) -> Iterator[None]:
    """Tell of every call of a module; a parametrization is no layer, but part of the one it stands in."""
    handles = [
        module.register_forward_hook(lambda _module, _args, output, name=name: note(name, output))
        for name, module in model.named_modules()
        if "parametrizations" not in name.split(".")
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
