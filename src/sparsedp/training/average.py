"""A running average of the weights: smoother, and free, because it is post-processing."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, final

import torch
from torch import Tensor, nn

from sparsedp.core.errors import SparseDPError
from sparsedp.core.layout import Layout


@final
class WeightAverage:
    """Exponential moving average of the trainable weights, `decay` per step (De et al. 2022, Sec. 3).

    The first steps use `min(decay, (1 + t)/(10 + t))`, so that the initial weights are soon forgotten.
    **Privacy.** Post-processing of releases.
    """

    def __init__(self, model: nn.Module, layout: Layout, decay: float) -> None:
        if not 0 < decay < 1:
            raise SparseDPError(
                f"ema_decay: got {decay}, expected a number strictly between 0 and 1, such as 0.99"
            )
        self._parameters = dict(zip((s.name for s in layout), layout.parameters(model), strict=True))
        self._decay = decay
        self._updates = 0
        self._weights = {name: p.detach().clone() for name, p in self._parameters.items()}

    @torch.no_grad()
    def update(self) -> None:
        """Move the average towards the weights as they are now."""
        decay = min(self._decay, (1 + self._updates) / (10 + self._updates))
        for name, parameter in self._parameters.items():
            self._weights[name].lerp_(parameter, 1 - decay)
        self._updates += 1

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """The model with the averaged weights, for the length of a `with` block."""
        raw = {name: p.detach().clone() for name, p in self._parameters.items()}
        try:
            self.install()
            yield
        finally:
            _copy(raw, self._parameters)

    def install(self) -> None:
        """Put the averaged weights into the model for good."""
        _copy(self._weights, self._parameters)

    def state(self) -> dict[str, Any]:
        """What a checkpoint keeps."""
        return {"weights": self._weights, "updates": self._updates}

    def restore(self, state: dict[str, Any]) -> None:
        """Go on from a checkpoint."""
        self._weights = {name: state["weights"][name].to(p) for name, p in self._parameters.items()}
        self._updates = state["updates"]


@torch.no_grad()
def _copy(values: dict[str, Tensor], parameters: dict[str, nn.Parameter]) -> None:
    for name, parameter in parameters.items():
        parameter.copy_(values[name])
