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

from sparsedp.gradients.layers.source import Explicit
from sparsedp.gradients.tape import Call, CannotBookError
from sparsedp.gradients.vectorised import call_with, detached_and_quiet

logger = logging.getLogger("sparsedp")


@dataclass(frozen=True, slots=True)
class ModuleGradients:
    """Per-sample gradients of all parameters of one unknown module over one call."""

    by_parameter: dict[str, Tensor]

    def source(self, parameter: str) -> Explicit:
        """One parameter's gradients."""
        return Explicit(self.by_parameter[parameter])


def module_gradients(call: Call, parameters: dict[str, nn.Parameter], samples: int) -> ModuleGradients:
    """Vector-Jacobian products of the module alone, one sample at a time, checked against the whole batch at once.

    Raises:
        CannotBookError: the module does not treat the first axis as the samples, or mixes them.
    """
    places, cotangents = list(call.gradients), list(call.gradients.values())
    if any(g.shape[:1] != (samples,) for g in cotangents):
        raise CannotBookError(
            f"the output of {call.name!r} does not have the {samples} samples on its first axis"
        )
    leaves, tree = pytree.tree_flatten((call.args, call.kwargs))
    values = [leaf.detach() if isinstance(leaf, Tensor) else leaf for leaf in leaves]
    batched = [isinstance(v, Tensor) and v.shape[:1] == (samples,) for v in values]
    detached = {name: p.detach() for name, p in parameters.items()}

    def product(weights: dict[str, Tensor], inputs: list[Any], outs: list[Tensor]) -> Tensor:
        args, kwargs = pytree.tree_unflatten(inputs, tree)
        output = call_with(call.module, weights, args, kwargs)
        found = [leaf for leaf in pytree.tree_leaves(output) if isinstance(leaf, Tensor)]
        return torch.stack([(found[i] * out).sum() for i, out in zip(places, outs, strict=True)]).sum()

    tensors = [v for v, is_batched in zip(values, batched, strict=True) if is_batched]

    def one(weights: dict[str, Tensor], rows: list[Tensor], outs: list[Tensor]) -> Tensor:
        rest = iter(rows)
        filled = [next(rest).unsqueeze(0) if b else v for v, b in zip(values, batched, strict=True)]
        return product(weights, filled, [o.unsqueeze(0) for o in outs])

    with detached_and_quiet():
        result = _each_sample(call.name, one, detached, tensors, cotangents, samples)
        together = grad(product)(detached, values, cotangents)
    for name, each in result.items():
        expected = together[name]
        difference = (each.sum(0) - expected).abs().max()
        if not bool(difference <= 1e-3 * expected.abs().max() + 1e-5) and bool(expected.isfinite().all()):
            raise CannotBookError(f"the per-sample gradients of {call.name!r} do not add up to its gradient")
    return ModuleGradients(result)


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
    rows = [grad(one)(weights, [t[i] for t in tensors], [c[i] for c in cotangents]) for i in range(samples)]
    return {key: torch.stack([row[key] for row in rows]) for key in weights}
