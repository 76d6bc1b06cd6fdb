"""The optimizer that `fit` takes when it is not told: it follows from public numbers, as the plan's defaults do."""

from __future__ import annotations

import functools
import math

import torch

from sparsedp.methods.spec import CLIP_NORM
from sparsedp.privacy.plan import Plan
from sparsedp.training.choices import OptimizerChoice

MOMENTUM = 0.9


def default_optimizer(lr: float | None, plan: Plan) -> OptimizerChoice:
    """SGD with momentum 0.9, at a rate of `0.2 sqrt(B / 128) / clip_norm` if none is given.

    Clipped updates scale with the clip norm, and their noise falls with the batch size. Found on digits (B = 128 and
    256) and MNIST (B = 1024) at epsilon 3.
    """
    last = plan.phases[-1]
    scale = math.sqrt(plan.expected_batch_size(last) / 128) / (last.clip_norm or CLIP_NORM)
    return functools.partial(torch.optim.SGD, lr=0.2 * scale if lr is None else lr, momentum=MOMENTUM)
