"""Flat coordinates of a model (`ParameterLayout`), and sets of them (`Support`)."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import final

import torch
from torch import Tensor, nn

from sparsedp.errors import ModelError, SparseDPError


@dataclass(frozen=True, slots=True)
class ParameterSlice:
    """One trainable parameter's place in the flat vector.

    `table` is True for the weight of an `nn.Embedding` or `nn.EmbeddingBag`: rows that inputs name. `norm` is True
    for the parameters of a normalisation layer: a module whose class is called so (`LayerNorm`, `LlamaRMSNorm`), or
    what `freeze_batch_norm` makes of one (`ChannelAffine`).
    """

    name: str
    shape: tuple[int, ...]
    offset: int
    table: bool = False
    norm: bool = False

    @property
    def size(self) -> int:
        """Number of scalars."""
        return math.prod(self.shape)

    @property
    def span(self) -> slice:
        """The slice of the flat vector this parameter occupies."""
        return slice(self.offset, self.offset + self.size)


@dataclass(frozen=True, slots=True)
class ParameterLayout:
    """Flat index <-> named parameter, for the trainable parameters of a model, in definition order.

    A tied parameter appears once, under its first name.
    """

    slots: tuple[ParameterSlice, ...]

    @classmethod
    def of(cls, model: nn.Module) -> ParameterLayout:
        """The layout of a model's trainable parameters, which must be on one device."""
        slots: list[ParameterSlice] = []
        devices: dict[torch.device, str] = {}
        offset = 0
        tables = {id(m.weight) for m in model.modules() if isinstance(m, nn.Embedding | nn.EmbeddingBag)}
        norms = [
            m for m in model.modules() if "Norm" in type(m).__name__ or type(m).__name__ == "ChannelAffine"
        ]
        norms_own = {id(p) for m in norms for p in m.parameters(recurse=False)}
        for name, parameter in model.named_parameters():
            if not parameter.requires_grad:
                continue
            if isinstance(parameter, nn.parameter.UninitializedParameter):
                raise ModelError(f"parameter {name!r} is not initialised yet; run one forward pass first")
            if not parameter.is_floating_point():
                raise ModelError(
                    f"parameter {name!r} has dtype {parameter.dtype}; only real floating-point parameters can be "
                    "trained privately. Freeze it with requires_grad_(False)"
                )
            devices.setdefault(parameter.device, name)
            kinds = id(parameter) in tables, id(parameter) in norms_own
            slots.append(ParameterSlice(name, tuple(parameter.shape), offset, *kinds))
            offset += parameter.numel()
        if offset == 0:
            raise ModelError(
                "the model has no trainable parameters (requires_grad=True on none); unfreeze at least one"
            )
        if len(devices) > 1:
            where = ", ".join(f"{name!r} on {device}" for device, name in devices.items())
            raise ModelError(f"trainable parameters are on several devices ({where}); move the model to one")
        return cls(tuple(slots))

    @property
    def dimension(self) -> int:
        """The number d of trainable scalars."""
        last = self.slots[-1]
        return last.offset + last.size

    def __iter__(self) -> Iterator[ParameterSlice]:
        return iter(self.slots)

    def slot(self, name: str) -> ParameterSlice:
        """The slot of a parameter by name."""
        return next(slot for slot in self.slots if slot.name == name)

    def parameters(self, model: nn.Module) -> list[nn.Parameter]:
        """The model's parameters in layout order; a `ModelError` if these are no longer those of the layout."""
        found = {name: p for name, p in model.named_parameters() if p.requires_grad}
        expected = {slot.name: slot.shape for slot in self.slots}
        actual = {name: tuple(p.shape) for name, p in found.items()}
        if actual != expected:
            changed = sorted(set(actual.items()) ^ set(expected.items()))
            raise ModelError(
                "the model's trainable parameters changed since training was set up "
                f"(differing: {[name for name, _ in changed][:6]}); build a new trainer for the changed model"
            )
        return [found[slot.name] for slot in self.slots]

    def flatten(self, model: nn.Module) -> Tensor:
        """The trainable scalars as one vector (a copy), in the widest dtype among them."""
        parameters = self.parameters(model)
        dtype = widest_dtype(parameters)
        return torch.cat([p.detach().reshape(-1).to(dtype) for p in parameters])

    @torch.no_grad()
    def write(self, model: nn.Module, values: Tensor) -> None:
        """Set the trainable scalars to those of one vector: the inverse of `flatten`."""
        for slot, parameter in zip(self.slots, self.parameters(model), strict=True):
            parameter.copy_(values[slot.span].reshape(slot.shape))


def widest_dtype(parameters: Iterable[Tensor]) -> torch.dtype:
    """The widest dtype among some parameters, float32 or wider."""
    return functools.reduce(torch.promote_types, (p.dtype for p in parameters), torch.float32)


@final
class Support:
    """An immutable set of coordinates of a d-dimensional vector, kept as sorted unique indices.

    It holds k numbers; the full one holds none, and makes its indices anew when asked for them.
    """

    __slots__ = ("_dimension", "_hash", "_held")

    def __init__(self, indices: Tensor | Sequence[int], dimension: int) -> None:
        given = torch.as_tensor(indices).detach()
        if given.numel() and (given.is_floating_point() or given.is_complex() or given.dtype == torch.bool):
            raise SparseDPError(
                f"Support: got indices of dtype {given.dtype}, expected integers; of a mask, mask.nonzero().flatten()"
            )
        unique = torch.unique(given.to("cpu", torch.int64), sorted=True)
        if dimension < 0 or (unique.numel() and (int(unique[0]) < 0 or int(unique[-1]) >= dimension)):
            raise SparseDPError(f"Support: every index must lie in 0..{dimension - 1}")
        self._held: Tensor | None = None if unique.numel() == dimension else unique.clone()
        self._dimension = dimension
        self._hash: int | None = None

    @classmethod
    def full(cls, dimension: int) -> Support:
        """Every coordinate."""
        support = cls.empty(dimension)
        support._held = None
        return support

    @classmethod
    def empty(cls, dimension: int) -> Support:
        """No coordinate."""
        return cls(torch.empty(0, dtype=torch.int64), dimension)

    @property
    def dimension(self) -> int:
        """The number d of coordinates there are."""
        return self._dimension

    @property
    def size(self) -> int:
        """The number k of active coordinates."""
        return self._dimension if self._held is None else self._held.numel()

    @property
    def active_ratio(self) -> float:
        """k/d."""
        return self.size / self._dimension if self._dimension else 0.0

    @property
    def is_full(self) -> bool:
        """Whether every coordinate is active."""
        return self._held is None

    @property
    def indices(self) -> Tensor:
        """A copy of the sorted indices (int64, on the CPU)."""
        return self._indices if self._held is None else self._held.clone()

    @property
    def _indices(self) -> Tensor:
        return torch.arange(self._dimension) if self._held is None else self._held

    def mask(self, device: torch.device | str = "cpu") -> Tensor:
        """The support as a boolean mask of length d."""
        mask = torch.zeros(self._dimension, dtype=torch.bool, device=device)
        mask[self._indices.to(device)] = True
        return mask

    def gather(self, vector: Tensor) -> Tensor:
        """The k active entries of the last axis of a vector or a stack of vectors, always a copy."""
        if vector.shape[-1] != self._dimension:
            raise SparseDPError(
                f"Support.gather: got length {vector.shape[-1]}, expected d={self._dimension}"
            )
        return vector.clone() if self.is_full else vector.index_select(-1, self._indices.to(vector.device))

    def scatter(self, values: Tensor, fill: float = 0.0) -> Tensor:
        """A d-vector with `values` on the support and `fill` elsewhere."""
        if values.shape != (self.size,):
            raise SparseDPError(f"Support.scatter: got shape {tuple(values.shape)}, expected ({self.size},)")
        if self.is_full:
            return values.clone()
        out = values.new_full((self._dimension,), fill)
        out[self._indices.to(values.device)] = values
        return out

    def split(self, layout: ParameterLayout) -> dict[str, Tensor]:
        """The active places inside each parameter, as sorted flat positions: costs k, not d."""
        if layout.dimension != self._dimension:
            raise SparseDPError(f"the support has d={self._dimension}, the layout d={layout.dimension}")
        if self.is_full:
            return {slot.name: torch.arange(slot.size) for slot in layout}
        cuts = torch.tensor([*(slot.offset for slot in layout), layout.dimension])
        bounds = torch.searchsorted(self._indices, cuts).tolist()
        parts = zip(layout, pairwise(bounds), strict=True)
        return {slot.name: self._indices[start:stop] - slot.offset for slot, (start, stop) in parts}

    def inputs(self, layout: ParameterLayout, features: int) -> list[int]:
        """The inputs that an active coordinate of the first layer on so many features multiplies, in order."""
        first = next(slot for slot in layout if len(slot.shape) == 2 and slot.shape[1] == features)
        return [int(place) for place in torch.unique(self.split(layout)[first.name] % features)]

    def without(self, other: Support) -> Support:
        """The coordinates of this support that are not in the other."""
        if other.is_full or not self.size:
            return Support.empty(self._dimension)
        mine = self._indices
        return Support(mine[torch.isin(mine, other._indices, invert=True)], self._dimension)

    def union(self, other: Support) -> Support:
        """The coordinates of either support."""
        if self.is_full or other.is_full:
            return Support.full(self._dimension)
        return Support(torch.cat([self._indices, other._indices]), self._dimension)

    def __len__(self) -> int:
        return self.size

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Support):
            return NotImplemented
        if self._dimension != other._dimension or self.size != other.size:
            return False
        return self is other or self._held is None or torch.equal(self._indices, other._indices)

    def __hash__(self) -> int:
        if self._hash is None:
            self._hash = hash((self._dimension, self._indices.numpy().tobytes()))
        return self._hash

    def __repr__(self) -> str:
        return f"Support(k={self.size}, d={self._dimension})"
