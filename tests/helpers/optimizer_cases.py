"""Optimizers, a small model, and releases with chosen values to apply to it."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import Tensor, nn, optim
from torch.optim import Optimizer

from sparsedp.parameters import ParameterLayout, Support
from sparsedp.privacy.mechanism import Release
from sparsedp.testing import made_up_release

Factory = Callable[[Iterable[nn.Parameter]], Optimizer]

OPTIMIZERS: dict[str, Factory] = {
    "sgd": lambda p: optim.SGD(p, lr=0.1),
    "sgd-decay": lambda p: optim.SGD(p, lr=0.1, weight_decay=0.3),
    "momentum": lambda p: optim.SGD(p, lr=0.1, momentum=0.9),
    "momentum-decay": lambda p: optim.SGD(p, lr=0.1, momentum=0.9, dampening=0.1, weight_decay=0.3),
    "nesterov": lambda p: optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.3),
    "maximize": lambda p: optim.SGD(p, lr=0.1, momentum=0.9, maximize=True, weight_decay=0.3),
    "adam": lambda p: optim.Adam(p, lr=0.1),
    "adam-decay": lambda p: optim.Adam(p, lr=0.1, weight_decay=0.3, amsgrad=True),
    "adam-loop": lambda p: optim.Adam(p, lr=0.1, weight_decay=0.3, foreach=False),
    "adam-fused": lambda p: optim.Adam(p, lr=0.1, weight_decay=0.3, fused=True),
    "adamw": lambda p: optim.AdamW(p, lr=0.1, weight_decay=0.3),
    "nadam": lambda p: optim.NAdam(p, lr=0.1, weight_decay=0.3),
    "radam": lambda p: optim.RAdam(p, lr=0.1, weight_decay=0.3, decoupled_weight_decay=True),
    "rmsprop": lambda p: optim.RMSprop(p, lr=0.1, momentum=0.9, centered=True, weight_decay=0.3),
    "adagrad": lambda p: optim.Adagrad(p, lr=0.1, initial_accumulator_value=0.5, weight_decay=0.3),
    "adadelta": lambda p: optim.Adadelta(p, lr=0.1, weight_decay=0.3),
    "adamax": lambda p: optim.Adamax(p, lr=0.1, weight_decay=0.3),
    "adafactor": lambda p: optim.Adafactor(p, lr=0.1, weight_decay=0.3),
    "rprop": lambda p: optim.Rprop(p, lr=0.1),
}
INDEPENDENT = [name for name in OPTIMIZERS if name != "adafactor"]
"""Adafactor's rows, columns and norms are shared between coordinates: there is no update of one alone."""

DROPPING = {**OPTIMIZERS, "asgd": lambda p: optim.ASGD(p, lr=0.1, lambd=0.1, weight_decay=0.3)}


class Net(nn.Module):
    """Matrices, a convolution kept channels-last, a bias and a single number."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.weight = nn.Parameter(torch.randn(4, 6, generator=generator))
        kernel = torch.randn(2, 3, 2, 2, generator=generator)
        self.kernel = nn.Parameter(kernel.to(memory_format=torch.channels_last))
        self.bias = nn.Parameter(torch.randn(5, generator=generator))
        self.gain = nn.Parameter(torch.randn((), generator=generator))


def gradients(dimension: int, steps: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    return list(torch.randn(steps, dimension, generator=generator, dtype=torch.float64))


def random_support(dimension: int, size: int, seed: int) -> Support:
    order = torch.randperm(dimension, generator=torch.Generator().manual_seed(seed))
    return Support(order[:size], dimension)


def release(layout: ParameterLayout, support: Support, gradient: Tensor, step: int = 0) -> Release:
    """A release of exactly `gradient` on the support."""
    mean = support.gather(gradient.to(torch.float64))
    return made_up_release(support, mean, torch.zeros_like(mean), step)
