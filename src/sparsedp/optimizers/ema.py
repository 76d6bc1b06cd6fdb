"""A running average of the weights."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, final

import torch
from torch import Tensor, nn

from sparsedp.errors import SparseDPError
from sparsedp.optimizers.places import Places, carry, places_in
from sparsedp.parameters import ParameterLayout, Support


@final
class WeightAverage:
    """Exponential moving average of the trainable weights, `decay` per step (De et al. 2022, Sec. 3).

    The first steps use `min(decay, (1 + t)/(10 + t))`, so that the initial weights are soon forgotten. A decay of 1
    averages the whole run, the weights after step t counting t times (Shamir and Zhang 2013, eta = 1). Only
    coordinates that were in a support so far are held: elsewhere the average is the weight itself, to the bit.
    Formal guarantees: Post-processing of releases.
    """

    def __init__(self, model: nn.Module, layout: ParameterLayout, decay: float) -> None:
        if not 0 < decay <= 1:
            raise SparseDPError(
                f"ema_decay: got {decay}, expected a number between 0 and 1, such as 0.99, or 1 for the whole run"
            )
        self._layout = layout
        self._parameters = dict(zip((s.name for s in layout), layout.parameters(model), strict=True))
        self._decay = decay
        self._updates = 0
        self._last: Support | None = None
        self._moved = Support.empty(layout.dimension)
        self._places: dict[str, Places] = {}
        self._weights: dict[str, Tensor] = {}

    def follow(self, support: Support) -> None:
        """Hold these coordinates from now on; to be called before they move for the first time."""
        if support is self._last:
            return
        self._last, moved = support, self._moved.union(support)
        if moved == self._moved:
            return
        self._moved, split = moved, moved.split(self._layout)
        places = {
            slot.name: places_in(split[slot.name], slot.shape, self._parameters[slot.name].device)
            for slot in self._layout
            if split[slot.name].numel()
        }
        self._weights = {name: self._grown(name, new) for name, new in places.items()}
        self._places = places

    @torch.no_grad()
    def update(self) -> None:
        """Move the average towards the weights as they are now."""
        passed = self._updates
        decay = passed / (passed + 2) if self._decay == 1 else min(self._decay, (1 + passed) / (10 + passed))
        for name, places in self._places.items():
            self._weights[name].lerp_(places.read(self._parameters[name].detach()), 1 - decay)
        self._updates += 1

    @torch.no_grad()
    def begin_again(self) -> None:
        """Forget what was averaged so far: the weights were changed by more than a step."""
        for name, places in self._places.items():
            self._weights[name] = places.read(self._parameters[name].detach()).clone()
        self._updates = 0

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """The model with the averaged weights, for the length of a `with` block."""
        raw = {
            name: places.read(self._parameters[name].detach()).clone()
            for name, places in self._places.items()
        }
        try:
            self.install()
            yield
        finally:
            self._write(raw)

    def install(self) -> None:
        """Put the averaged weights into the model for good."""
        self._write(self._weights)

    def state(self) -> dict[str, Any]:
        """What a checkpoint keeps: the weights, how often they moved, and where they may differ (None: all)."""
        moved = None if self._moved.is_full else self._moved.indices
        weights = {name: p.detach().clone() for name, p in self._parameters.items()}
        for name, places in self._places.items():
            places.write(weights[name], self._weights[name])
        return {"weights": weights, "updates": self._updates, "moved": moved}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on from a checkpoint; the model has its weights already."""
        d, moved = self._layout.dimension, state["moved"]
        self.follow(Support.full(d) if moved is None else Support(moved, d))
        self._weights = {
            name: places.read(state["weights"][name].to(self._parameters[name])).clone()
            for name, places in self._places.items()
        }
        self._updates = state["updates"]

    def _grown(self, name: str, new: Places) -> Tensor:
        """A parameter's average on more places than so far: what enters is read from the weights."""
        old = self._places.get(name)
        if old is not None and old.index is None:
            return self._weights[name]
        weights = new.read(self._parameters[name].detach()).clone()
        if old is not None:
            carry(self._weights[name], old, weights, new)
        return weights

    def _write(self, values: dict[str, Tensor]) -> None:
        for name, places in self._places.items():
            places.write(self._parameters[name].detach(), values[name])
