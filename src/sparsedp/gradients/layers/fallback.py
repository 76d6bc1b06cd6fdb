"""Modules the fast path does not know: their per-sample gradients through the reference path, module by module."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import grad, vmap
from torch.utils import _pytree as pytree

from sparsedp.gradients.graph import CannotBookError
from sparsedp.gradients.layers.source import Explicit, working
from sparsedp.gradients.tape import Call
from sparsedp.gradients.vectorised import call_with, detached_and_quiet

logger = logging.getLogger("sparsedp")


@dataclass(frozen=True, slots=True)
class ModuleGradients:
    """Per-sample gradients of all parameters of one unknown module over one call."""

    by_parameter: dict[str, Tensor]

    def source(self, parameter: str) -> Explicit:
        """One parameter's gradients."""
        return Explicit(self.by_parameter[parameter])


def module_gradients(
    call: Call, parameters: dict[str, nn.Parameter], samples: int, batched: tuple[bool, ...]
) -> ModuleGradients:
    """Vector-Jacobian products of the module alone, one sample at a time, checked against the whole batch at once.

    `batched` says which tensors among the arguments hold one row per sample; the others are the same for all.

    Raises:
        CannotBookError: the module does not treat the first axis as the samples, mixes them, or cannot be run alone.
    """
    if call.hidden_inputs:
        raise CannotBookError(f"{call.name!r} uses what another layer computed without being given it")
    if call.nested_outputs and len(call.gradients) > 1:
        raise CannotBookError(f"an output of {call.name!r} is computed from another of its outputs")
    places, cotangents = list(call.gradients), list(call.gradients.values())
    if any(g.shape[:1] != (samples,) for g in cotangents):
        raise CannotBookError(
            f"the output of {call.name!r} does not have the {samples} samples on its first axis"
        )
    leaves, tree = pytree.tree_flatten((call.args, call.kwargs))
    roles = iter(batched)
    try:
        by_row = [isinstance(leaf, Tensor) and next(roles) for leaf in leaves]
    except StopIteration:
        raise CannotBookError(f"{call.name!r} was called with other arguments than at first") from None
    if any(
        is_batched and leaf.shape[:1] != (samples,) for leaf, is_batched in zip(leaves, by_row, strict=True)
    ):
        raise CannotBookError(
            f"an argument of {call.name!r} does not have the {samples} samples on its first axis"
        )
    values = [leaf.detach() if isinstance(leaf, Tensor) else leaf for leaf in leaves]
    detached = {name: p.detach() for name, p in parameters.items()}

    def product(weights: dict[str, Tensor], inputs: list[Any], outs: list[Tensor]) -> Tensor:
        args, kwargs = pytree.tree_unflatten(inputs, tree)
        output = call_with(call.module, weights, args, kwargs)
        found = [leaf for leaf in pytree.tree_leaves(output) if isinstance(leaf, Tensor)]
        return torch.stack([(found[i] * out).sum() for i, out in zip(places, outs, strict=True)]).sum()

    tensors = [v for v, is_batched in zip(values, by_row, strict=True) if is_batched]

    def one(weights: dict[str, Tensor], rows: list[Tensor], outs: list[Tensor]) -> Tensor:
        rest = iter(rows)
        filled = [next(rest).unsqueeze(0) if b else v for v, b in zip(values, by_row, strict=True)]
        return product(weights, filled, [o.unsqueeze(0) for o in outs])

    with detached_and_quiet():
        result = _each_sample(call.name, one, detached, tensors, cotangents, samples)
        together = grad(product)(detached, values, cotangents)
    for name, each in result.items():
        if not _adds_up(each, together[name]):
            raise CannotBookError(f"the per-sample gradients of {call.name!r} do not add up to its gradient")
    return ModuleGradients({name: working(each) for name, each in result.items()})


def _adds_up(each: Tensor, together: Tensor) -> bool:
    """Whether the samples' gradients add up to the batch's, but for rounding relative to their own sizes."""
    if not bool(together.isfinite().all()):
        return True
    wide = working(each)
    difference = (wide.sum(0) - together).abs().amax()
    return bool(difference <= max(1e-3, 8 * torch.finfo(each.dtype).eps) * wide.abs().sum(0).amax())


def _each_sample(
    name: str,
    one: Callable[..., Tensor],
    weights: dict[str, Tensor],
    tensors: list[Tensor],
    cotangents: list[Tensor],
    samples: int,
) -> dict[str, Tensor]:
    try:
        vectorised: dict[str, Tensor] = vmap(grad(one), in_dims=(None, 0, 0), randomness="error")(
            weights, tensors, cotangents
        )
        return vectorised
    except RuntimeError as error:
        logger.info("layer %r cannot be vectorised (%s); its samples are taken one by one", name, error)
    try:
        rows = [
            grad(one)(weights, [t[i] for t in tensors], [c[i] for c in cotangents]) for i in range(samples)
        ]
    except RuntimeError as error:
        raise CannotBookError(f"{name!r} cannot be differentiated alone: {error}") from error
    return {key: torch.stack([row[key] for row in rows]) for key in weights}
