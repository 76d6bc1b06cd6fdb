"""Optimizers that know what a release is: a gradient with noise of known size, different in every step."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from sparsedp.errors import SparseDPError
from sparsedp.optimizers.sparse import ElementwiseOptimizer


class AdamBC(ElementwiseOptimizer):
    """Adam whose second moment is that of the gradient alone (DP-AdamBC; Tang, Shpilevskiy and Lecuyer 2023).

    A release's square is the gradient's plus the noise's, whose variance the release carries: its own running average
    is taken away, `m / sqrt(max(v - noise, floor))`, both with Adam's correction for the first steps.
    `floor` is the least second moment; the smaller, the larger a step may become where there is nothing but noise.
    """

    def __init__(
        self,
        params: Iterable[nn.Parameter],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        floor: float = 1e-8,
    ) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "floor": floor})
        self._variance: dict[Tensor, Tensor] = {}

    def observe_noise(self, parameter: Tensor, variance: Tensor) -> None:
        """Take the variance of the noise in this parameter's next gradient, in its shape."""
        self._variance[parameter] = variance

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        for group, parameter, gradient in _moving(self):
            state, (first, second) = self.state[parameter], group["betas"]
            if not state:
                state["step"] = torch.zeros(())
                state |= {name: torch.zeros_like(parameter) for name in ("mean", "square", "noise")}
            state["step"] += 1
            count = float(state["step"])
            variance = self._variance.pop(parameter, None)
            if variance is None:
                raise SparseDPError(
                    "AdamBC: it was not told how much noise the gradient has; train with fit or Trainer"
                )
            state["mean"].lerp_(gradient, 1 - first)
            state["square"].mul_(second).addcmul_(gradient, gradient, value=1 - second)
            state["noise"].lerp_(variance.to(parameter.dtype), 1 - second)
            own = (state["square"] - state["noise"]).div_(1 - second**count).clamp_(min=group["floor"])
            parameter.addcdiv_(state["mean"], own.sqrt_(), value=-group["lr"] / (1 - first**count))


class LowPassSGD(ElementwiseOptimizer):
    """SGD on releases that went through a low-pass filter (DOPPLER; Zhang, Bu, Hong and Razaviyayn 2024).

    `m = a m + (1 - a) (g + g_before) / 2`, divided by the sum of its weights so far: noise that changes from step to
    step is held back, gradients that last pass.
    """

    def __init__(self, params: Iterable[nn.Parameter], lr: float = 0.1, a: float = 0.9) -> None:
        super().__init__(params, {"lr": lr, "a": a})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        for group, parameter, gradient in _moving(self):
            state, stays = self.state[parameter], group["a"]
            if not state:
                state["step"] = torch.zeros(())
                state |= {name: torch.zeros_like(parameter) for name in ("filtered", "before")}
            first = not float(state["step"])
            state["step"] += 1
            count = float(state["step"])
            state["filtered"].mul_(stays).add_(gradient + state["before"], alpha=(1 - stays) / 2)
            state["before"].copy_(gradient)
            weights = (1 - stays) / 2 if first else 1 - (stays ** (count - 1)) * (1 + stays) / 2
            parameter.add_(state["filtered"], alpha=-group["lr"] / weights)


def _moving(optimizer: Optimizer) -> Iterable[tuple[dict[str, Any], nn.Parameter, Tensor]]:
    """Each parameter that has a gradient, with its group."""
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if parameter.grad is not None:
                yield group, parameter, parameter.grad
