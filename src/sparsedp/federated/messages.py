"""What the server sends to clients in a round, and its form on the wire. All of it is public."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, Self, final

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from sparsedp._serialization import sha256
from sparsedp.clipping import FlatClip, Geometry, Identity, Standardized
from sparsedp.errors import SparseDPError
from sparsedp.parameters import ParameterLayout, Support
from sparsedp.privacy.mechanism import Grid
from sparsedp.runs.checkpoint import describe_layout
from sparsedp.validation.state import tensor_digest


class Payload(NamedTuple):
    """Named arrays and plain values, which any transport can carry."""

    arrays: Mapping[str, npt.NDArray[Any]]
    values: Mapping[str, int | float | str]


@final
@dataclass(frozen=True, slots=True, eq=False)
class ClientTask:
    """One round's work: train from these weights on this support, and send the update.

    `run` is the plan's fingerprint, `model` the `model_digest` of the server's model. Of all d `weights` the update
    has those on the support, clipped by `clip` in the space of `geometry`; `top` is the share of them that is sent,
    the largest there, or None for all. The grid follows from clip and `noise_multiplier`.
    """

    run: str
    model: str
    step: int
    weights: Tensor
    support: Support
    clip: FlatClip
    noise_multiplier: float
    geometry: Geometry
    top: float | None

    @property
    def grid(self) -> Grid:
        """The grid that updates live on."""
        return Grid.for_mechanism(self.clip.norm, self.noise_multiplier, self.support.size)

    @property
    def dtype(self) -> torch.dtype:
        """The type of an update: the smaller integer type that holds every number within the grid's bound."""
        return torch.int32 if self.grid.bound / self.grid.step < 2**31 - 1 else torch.int64

    def to_payload(self) -> Payload:
        """Write it as arrays and plain values."""
        arrays = {"weights": self.weights}
        values: dict[str, int | float | str] = {name: getattr(self, name) for name in _VALUES}
        values["clip_norm"] = self.clip.norm
        if not self.support.is_full:
            arrays["support"] = self.support.indices.to(torch.int32)
        if isinstance(self.geometry, Standardized):
            arrays |= {"centre": self.geometry.centre, "scale": self.geometry.scale}
        if self.top is not None:
            values["top"] = self.top
        return Payload({name: tensor.cpu().numpy() for name, tensor in arrays.items()}, values)

    @classmethod
    def from_payload(cls, payload: Payload) -> Self:
        """Read the task that `to_payload` wrote."""
        arrays = {name: torch.from_numpy(np.array(array)) for name, array in payload.arrays.items()}
        values: dict[str, Any] = dict(payload.values)
        try:
            weights = arrays["weights"]
            d = weights.numel()
            return cls(
                **{name: values[name] for name in _VALUES},
                weights=weights,
                support=Support(arrays["support"], d) if "support" in arrays else Support.full(d),
                clip=FlatClip(values["clip_norm"]),
                geometry=Standardized(arrays["centre"], arrays["scale"]) if "scale" in arrays else Identity(),
                top=values.get("top"),
            )
        except KeyError as error:
            raise SparseDPError(
                f"the server's task has no {error}; use one version of sparsedp everywhere"
            ) from error


_VALUES = ("run", "model", "step", "noise_multiplier")


def model_digest(model: nn.Module, layout: ParameterLayout) -> str:
    """Digest what the models of server and clients must share: trainable names and shapes, and everything frozen."""
    trainable = {slot.name for slot in layout}
    frozen = {
        name: tensor_digest(tensor).hex()
        for name, tensor in {**dict(model.named_parameters()), **dict(model.named_buffers())}.items()
        if name not in trainable
    }
    return sha256(json.dumps([describe_layout(layout), frozen]))
