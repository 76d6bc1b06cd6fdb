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
    """One round's work: train from these weights on this support and send the update, or send the `count`.

    Attributes:
        run: the plan's fingerprint.
        model: `model_digest` of the server's model.
        step: of the plan.
        weights: all d, as they stand.
        support: the active coordinates.
        size: how many numbers are sent: the active coordinates, or the rows that are counted.
        clip: the bound on what is sent.
        noise_multiplier: of the release; the grid follows from it and the clip.
        geometry: the space in which the update is clipped.
        top: the share of the coordinates that is sent, the largest there; None for all.
        count: the embedding tables of which the rows that any example uses are asked for; None for an update.
    """

    run: str
    model: str
    step: int
    weights: Tensor
    support: Support
    size: int
    clip: FlatClip
    noise_multiplier: float
    geometry: Geometry
    top: float | None
    count: tuple[str, ...] | None = None

    @property
    def grid(self) -> Grid:
        """The grid that updates live on."""
        return Grid.for_mechanism(self.clip.norm, self.noise_multiplier, self.size)

    @property
    def dtype(self) -> torch.dtype:
        """The type of an update: the smaller integer type that holds every number within the grid's bound."""
        return torch.int32 if self.grid.bound / self.grid.step < 2**31 - 1 else torch.int64

    def to_payload(self) -> Payload:
        """Write it as arrays and plain values."""
        arrays = {"weights": self.weights}
        values: dict[str, int | float | str] = {
            "run": self.run,
            "model": self.model,
            "step": self.step,
            "size": self.size,
            "clip_norm": self.clip.norm,
            "noise_multiplier": self.noise_multiplier,
        }
        if not self.support.is_full:
            arrays["support"] = self.support.indices.to(torch.int32)
        if isinstance(self.geometry, Standardized):
            arrays |= {"centre": self.geometry.centre, "scale": self.geometry.scale}
        if self.top is not None:
            values["top"] = self.top
        if self.count is not None:
            values["count"] = json.dumps(self.count)
        return Payload({name: tensor.cpu().numpy() for name, tensor in arrays.items()}, values)

    @classmethod
    def from_payload(cls, payload: Payload) -> Self:
        """Read the task that `to_payload` wrote."""
        arrays = {name: torch.from_numpy(np.array(array)) for name, array in payload.arrays.items()}
        values: dict[str, Any] = dict(payload.values)
        try:
            weights = arrays["weights"]
            full = Support.full(weights.numel())
            return cls(
                run=values["run"],
                model=values["model"],
                step=values["step"],
                weights=weights,
                support=Support(arrays["support"], weights.numel()) if "support" in arrays else full,
                size=values["size"],
                clip=FlatClip(values["clip_norm"]),
                noise_multiplier=values["noise_multiplier"],
                geometry=Standardized(arrays["centre"], arrays["scale"]) if "scale" in arrays else Identity(),
                top=values.get("top"),
                count=tuple(json.loads(values["count"])) if "count" in values else None,
            )
        except KeyError as error:
            raise SparseDPError(
                f"the server's task has no {error}; use one version of sparsedp everywhere"
            ) from error


def model_digest(model: nn.Module, layout: ParameterLayout) -> str:
    """Digest what the models of server and clients must share: trainable names and shapes, and everything frozen."""
    trainable = {slot.name for slot in layout}
    frozen = {
        name: tensor_digest(tensor).hex()
        for name, tensor in {**dict(model.named_parameters()), **dict(model.named_buffers())}.items()
        if name not in trainable
    }
    return sha256(json.dumps([describe_layout(layout), frozen]))
