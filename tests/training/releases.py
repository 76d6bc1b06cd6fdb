"""Releases with chosen values."""

from __future__ import annotations

import torch
from torch import Tensor

from sparsedp.parameters import ParameterLayout, Support
from sparsedp.privacy.mechanism import _SEAL, Release


def release(layout: ParameterLayout, support: Support, gradient: Tensor, step: int = 0) -> Release:
    """A release of exactly `gradient` on the support."""
    mean = support.gather(gradient.to(torch.float64))
    return Release(
        support=support, mean=mean, noise_scale=torch.zeros_like(mean), phase="train", step=step, publishable=False,
        seal=_SEAL,
    )  # fmt: skip
