"""What the server asks of a client in a round, and its form on the wire. All of it is public."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple, Self, final

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from sparsedp.clipping import FlatClip, Geometry, Identity, Standardized
from sparsedp.errors import SparseDPError
from sparsedp.parameters import Support
from sparsedp.privacy.mechanism import Grid

Scalar = int | float | str


class Wire(NamedTuple):
    """Named arrays and plain values: what any transport can carry."""

    arrays: Mapping[str, npt.NDArray[Any]]
    values: Mapping[str, Scalar]


@final
@dataclass(frozen=True, slots=True)
class CountAsked:
    """What a round asks for instead of an update: which rows of embedding tables any of a client's rows touches.

    Attributes:
        parameters: names of the tables, in this order.
    """

    parameters: tuple[str, ...]

    def to_json(self) -> str:
        """As text."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Self:
        """What `to_json` wrote."""
        values = json.loads(text)
        return cls(tuple(values["parameters"]))


@final
@dataclass(frozen=True, slots=True, eq=False)
class Task:
    """One round's work: train from these weights, on this support, and send what was learned, or what is `asked`.

    Attributes:
        run: the plan's fingerprint.
        model: `model_digest` of the server's.
        step: of the plan.
        weights: all d, as they stand.
        support: the active coordinates.
        size: how many numbers are sent: the active coordinates, or the rows that are asked for.
        clip: the bound on what is sent.
        noise_multiplier: of the phase; grid and clip follow from public numbers.
        geometry: the space it is clipped in.
        top: the share of the coordinates that is sent, by magnitude there; None for all.
        asked: for a round that counts; None for one that trains.
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
    asked: CountAsked | None = None

    @property
    def grid(self) -> Grid:
        """The grid that updates live on."""
        return Grid.for_mechanism(self.clip.norm, self.noise_multiplier, self.size)

    @property
    def integers(self) -> torch.dtype:
        """The type updates are sent as: the smaller one that holds every number within the clip norm."""
        return integers_for(self.grid)

    def to_wire(self) -> Wire:
        """As arrays and plain values."""
        arrays = {"weights": self.weights}
        values: dict[str, Scalar] = {
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
        if self.asked is not None:
            values["asked"] = self.asked.to_json()
        return Wire({name: tensor.cpu().numpy() for name, tensor in arrays.items()}, values)

    @classmethod
    def from_wire(cls, wire: Wire) -> Self:
        """The task that `to_wire` wrote."""
        arrays = {name: torch.from_numpy(np.array(array)) for name, array in wire.arrays.items()}
        values: dict[str, Any] = dict(wire.values)
        try:
            return cls(
                run=values["run"],
                model=values["model"],
                step=values["step"],
                weights=arrays["weights"],
                support=_support(arrays),
                size=values["size"],
                clip=FlatClip(values["clip_norm"]),
                noise_multiplier=values["noise_multiplier"],
                geometry=Standardized(arrays["centre"], arrays["scale"]) if "scale" in arrays else Identity(),
                top=values.get("top"),
                asked=CountAsked.from_json(values["asked"]) if "asked" in values else None,
            )
        except KeyError as error:
            raise SparseDPError(
                f"the server's task has no {error}; use one version of sparsedp everywhere"
            ) from error


def integers_for(grid: Grid) -> torch.dtype:
    """The smaller integer type that holds every number within a grid's bound."""
    return torch.int32 if grid.bound / grid.step < 2**31 - 1 else torch.int64


def _support(arrays: Mapping[str, Tensor]) -> Support:
    dimension = arrays["weights"].numel()
    return Support(arrays["support"], dimension) if "support" in arrays else Support.full(dimension)
