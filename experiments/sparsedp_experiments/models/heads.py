"""The last layer of every classifier here, and the checks all builders share."""

from __future__ import annotations

import math
from typing import final

import torch
from torch import Tensor, nn

from sparsedp.errors import ModelError

InputShape = tuple[int, ...]


@final
class PairWithZero(nn.Module):
    """Turns one logit z into the two-class logits (0, z), so that softmax gives sigmoid(z)."""

    def forward(self, logit: Tensor) -> Tensor:
        """Logits of shape [..., 2] from one of shape [..., 1]."""
        return torch.cat([torch.zeros_like(logit), logit], dim=-1)


def classifier_head(features: int, classes: int) -> nn.Module:
    """A linear layer to `classes` logits.

    Two classes get one logit, not two that say the same thing and are ranked and noised apart. It is paired with
    a constant zero, so cross entropy and softmax work as for any other head.
    """
    if classes < 2:
        raise ModelError(f"classes: got {classes}, expected at least 2")
    if classes == 2:
        return nn.Sequential(nn.Linear(features, 1), PairWithZero())
    return nn.Linear(features, classes)


def flat_size(features: nn.Module, input_shape: InputShape) -> int:
    """How many numbers one record has after `features`; refuses inputs too small for it."""
    check_shape(input_shape)
    try:
        with torch.no_grad():
            out: Tensor = features(torch.zeros(1, *input_shape))
    except RuntimeError as error:
        raise ModelError(f"input_shape {input_shape} does not fit this network: {error}") from error
    return out.numel()


def check_shape(input_shape: InputShape, axes: int | None = None) -> None:
    """Refuse shapes that are not positive whole numbers, or not of `axes` axes."""
    whole = all(isinstance(size, int) and size > 0 for size in input_shape)
    if not input_shape or not whole:
        raise ModelError(
            f"input_shape: got {input_shape}, expected positive whole numbers such as (1, 28, 28)"
        )
    if axes is not None and len(input_shape) != axes:
        expected = "(channels, height, width)" if axes == 3 else "(length,)"
        raise ModelError(f"input_shape: got {input_shape}, expected {axes} axes {expected}")


def parameter_count(model: nn.Module) -> int:
    """The number of trainable scalars, tied ones counted once."""
    return sum(math.prod(p.shape) for p in model.parameters() if p.requires_grad)
