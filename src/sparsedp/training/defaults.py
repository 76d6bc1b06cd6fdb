"""What `fit` takes when it is not told. All of it follows from public numbers."""

from __future__ import annotations

import functools
import math

import torch

from sparsedp.privacy.plan import Plan
from sparsedp.training.choices import OptimizerChoice

EPSILON = 3.0
EPOCHS = 20
CLIP_NORM = 1.0
MOMENTUM = 0.9


def default_delta(units: int) -> float:
    """The largest power of ten that is at most a tenth of 1/N, and at most 1e-5.

    A delta near 1/N would allow publishing somebody's record outright.
    """
    return 10.0 ** min(-5, math.floor(-math.log10(10 * units)))


def default_batch_size(units: int) -> int:
    """The power of two nearest to 4 sqrt(N), at most N: large batches drown the noise, small ones sample less."""
    return min(units, 1 << round(math.log2(4 * math.sqrt(units))))


def default_optimizer(lr: float | None, plan: Plan) -> OptimizerChoice:
    """SGD with momentum 0.9, at a rate of `0.2 sqrt(B / 128) / clip_norm` if none is given.

    Clipped updates scale with the clip norm, and their noise falls with the batch size. Found on digits (B = 128 and
    256) and MNIST (B = 1024) at epsilon 3.
    """
    last = plan.phases[-1]
    scale = math.sqrt(plan.expected_batch_size(last) / 128) / (last.clip_norm or CLIP_NORM)
    return functools.partial(torch.optim.SGD, lr=0.2 * scale if lr is None else lr, momentum=MOMENTUM)
