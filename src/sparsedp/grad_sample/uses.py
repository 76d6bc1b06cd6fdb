"""From where examples meet something they share back to the parameters it was computed from, example by example."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, Node

from sparsedp.grad_sample.linear import SequenceOuter
from sparsedp.grad_sample.rules import (
    RULES,
    Backprop,
    Contribution,
    Tokens,
    added,
    saved_by,
    summed_to,
    times,
)
from sparsedp.grad_sample.sampler import Block, Explicit, GradSampler, Workspace, working
from sparsedp.grad_sample.trace import VIEWS, FallbackError, Graph, Meeting, Place

ROUNDING = 0.02
"""How far a formula may be from the operation's own backward, which may run in half precision."""


@dataclass(slots=True, eq=False)
class Use:
    """One meeting in one graph: its node, what autograd saved there, later the gradients of its outputs. Private.

    `may_have_spread` says that the node's own backward, which sees all examples whichever it is asked for, gave
    something that is not finite: what is infinite in one example, times the zeros of another, is NaN in that other's.
    """

    node: Node
    meeting: Meeting
    saved: dict[str, Any]
    gradients: dict[int, Tensor] = field(default_factory=dict)
    may_have_spread: bool = False

    @classmethod
    def of(cls, graph: Graph, meeting: Meeting) -> Use:
        node = graph.nodes[meeting.node]
        try:
            return cls(node, meeting, saved_by(node))
        except RuntimeError as error:
            raise FallbackError(f"what {node.name()} saved for its backward is lost: {error}") from error

    @property
    def edges(self) -> list[GradientEdge]:
        return [GradientEdge(self.node, place) for place, _ in self.meeting.outputs]

    @property
    def has_formula(self) -> bool:
        """Whether its gradients come from a formula; else its own backward is called once per example."""
        return self.node.name() in RULES

    def parameters(self, leaves: Mapping[Node, str]) -> list[str]:
        starts = [self.node.next_functions[slot][0] for slot in self.meeting.shared]
        found = {node for start in starts if start is not None for node in _above(start) if node in leaves}
        return [name for node, name in leaves.items() if node in found]

    def check_examples(self, examples: int) -> None:
        """Refuse outputs that do not hold this number of examples where they should be."""
        for place, axis in self.meeting.outputs:
            shape = tuple(self.node._input_metadata[place].shape)
            if axis.examples(shape) != examples:
                raise FallbackError(f"{self.node.name()} gives {shape} for {examples} examples")

    def contributions(self, examples: int) -> Iterator[tuple[Place, Contribution]]:
        for slot, place, shape in self._shared_inputs():
            yield place, self._contribution(slot, shape, examples)

    def _shared_inputs(self) -> Iterator[tuple[int, Place, tuple[int, ...]]]:
        for slot in self.meeting.shared if self.gradients else ():
            node, place = self.node.next_functions[slot]
            assert node is not None
            yield slot, (node, place), tuple(node._input_metadata[place].shape)

    def check_formulas(self, examples: int) -> None:
        """Hold every formula against the operation's own backward, one example at a time."""
        if not self.has_formula:
            return
        for slot, _, shape in self._shared_inputs():
            with torch.no_grad():
                found = self._contribution(slot, shape, examples).dense()
                expected = self._one_by_one(slot, shape, examples)
            rounding = sum(float(g.abs().sum()) * torch.finfo(g.dtype).eps for g in self.gradients.values())
            allowed = ROUNDING * expected.abs().max() + 100 * rounding
            wrong = (found - expected).abs() > allowed
            if found.shape != expected.shape or bool((wrong & expected.isfinite()).any()):
                raise FallbackError(f"the formula of {self.node.name()} does not hold here")

    def _contribution(self, slot: int, shape: tuple[int, ...], examples: int) -> Contribution:
        rule = RULES.get(self.node.name())
        if rule is None or list(self.gradients) != [0]:
            return Explicit(self._one_by_one(slot, shape, examples))
        axis = dict(self.meeting.outputs)[0]
        return rule.contribution(Backprop(self.gradients[0], self.saved, slot, shape, axis, examples))

    def _one_by_one(self, slot: int, shape: tuple[int, ...], examples: int) -> Tensor:
        """The node's own backward, given one example's gradient at a time."""
        count = len(self.node._input_metadata)
        axes = dict(self.meeting.outputs)
        backward: Callable[..., Any] = self.node if callable(self.node) else self.node.apply  # type: ignore
        found = []
        for example in range(examples):
            given: list[Tensor | None] = [None] * count
            for place, gradient in self.gradients.items():
                given[place] = axes[place].only(gradient, example, examples)
            result = backward(*given)
            each = result[slot] if isinstance(result, tuple) else result
            if each is None:
                each = torch.zeros(shape)
            found.append(working(each.to_dense() if each.is_sparse else each).sum_to_size(shape))
        each_example = torch.stack(found)
        self.may_have_spread |= not bool(each_example.isfinite().all())
        return each_example


def grad_samplers(
    uses: Sequence[Use],
    examples: int,
    leaves: Mapping[Node, str],
    parameters: Mapping[str, nn.Parameter],
    blocks: Mapping[str, Block],
    space: Workspace,
) -> Iterator[tuple[str, GradSampler]]:
    """The per-example gradients of every parameter that is used."""
    pending: dict[Place, list[Contribution]] = {}
    with torch.no_grad():
        for use in uses:
            for place, contribution in use.contributions(examples):
                at, moved = _towards_leaf(place, contribution, leaves)
                pending.setdefault(at, []).append(moved)
        for place in [place for place in pending if place[0] not in leaves]:
            total = torch.stack([part.dense() for part in pending.pop(place)]).sum(0)
            for leaf, values in _pulled_back(place, total, leaves, parameters):
                pending.setdefault((leaf, 0), []).append(Explicit(values))
        for (leaf, _), parts in pending.items():
            name = leaves[leaf]
            for number, part in enumerate(added(parts)):
                yield name, part.restricted(blocks[name], space.of(f"{name}@{number}"))


def _towards_leaf(
    place: Place, contribution: Contribution, leaves: Mapping[Node, str]
) -> tuple[Place, Contribution]:
    """Undo turns, casts, views and look-ups on the way from a parameter, without forming gradients."""
    node, number = place
    while node not in leaves:
        name = node.name()
        above, above_number = node.next_functions[0] if node.next_functions else (None, 0)
        if above is None or len(node.next_functions) > 1:
            break
        shape = tuple(above._input_metadata[above_number].shape)
        if name == "TBackward0" and isinstance(contribution, SequenceOuter):
            contribution = SequenceOuter(contribution.b, contribution.a)
        elif name == "TBackward0" and isinstance(contribution, Explicit):
            contribution = Explicit(contribution.values.mT if len(shape) > 1 else contribution.values)
        elif name == "MulBackward1" and isinstance(contribution, Explicit | SequenceOuter):
            contribution = times(contribution, node._saved_other)  # type: ignore[attr-defined]
        elif name in VIEWS and isinstance(contribution, Explicit):
            contribution = Explicit(contribution.values.reshape(-1, *shape))
        elif name == "ExpandBackward0" and isinstance(contribution, Explicit):
            contribution = Explicit(summed_to(contribution.values, shape))
        elif name == "EmbeddingBackward0" and isinstance(contribution, Explicit):
            saved = saved_by(node)
            ids = saved["indices"].reshape(1, -1).expand(len(contribution.values), -1)
            read = contribution.values.reshape(*ids.shape, -1)
            contribution = Tokens(ids, read, saved["padding_idx"], shape[0])
        elif name != "ToCopyBackward0":
            break
        node, number = above, above_number
    return (node, number), contribution


def _pulled_back(
    place: Place, values: Tensor, leaves: Mapping[Node, str], parameters: Mapping[str, nn.Parameter]
) -> Iterator[tuple[Node, Tensor]]:
    """Gradients [n, *shape] of a tensor computed from parameters, as gradients of those parameters."""
    edge, nodes = GradientEdge(*place), [node for node in _above(place[0]) if node in leaves]
    wanted = [parameters[leaves[node]] for node in nodes]
    values = values.to(place[0]._input_metadata[place[1]].dtype)
    try:
        how = {"retain_graph": True, "allow_unused": True, "is_grads_batched": True}
        found = torch.autograd.grad([edge], wanted, [values], **how)
    except RuntimeError as error:
        raise FallbackError(
            f"what is computed from parameters alone has no batched backward: {error}"
        ) from error
    for node, gradient in zip(nodes, found, strict=True):
        if gradient is not None:
            yield node, working(gradient)


def _above(start: Node) -> list[Node]:
    seen, stack = {start: None}, [start]
    while stack:
        for node, _ in stack.pop().next_functions:
            if node is not None and node not in seen:
                seen[node] = None
                stack.append(node)
    return list(seen)
