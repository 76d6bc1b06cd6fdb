"""The flat vector: which of the d coordinates belongs to which parameter."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from sparsedp.core.errors import ModelError


@dataclass(frozen=True, slots=True)
class Slot:
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
class Layout:
    """Flat index <-> named parameter, for the trainable parameters of a model, in definition order.

    A tied parameter appears once, under its first name.
    """

    slots: tuple[Slot, ...]

    @classmethod
    def of(cls, model: nn.Module) -> Layout:
        """The layout of a model's trainable parameters.

        Raises:
            ModelError: the model has no trainable parameter, a non-floating or an uninitialised one, or its
                trainable parameters are on several devices.
        """
        slots: list[Slot] = []
        devices: dict[torch.device, str] = {}
        offset = 0
        tables = {id(m.weight) for m in model.modules() if isinstance(m, nn.Embedding | nn.EmbeddingBag)}
        norms = {
            id(parameter)
            for module in model.modules()
            if _is_norm(module)
            for parameter in module.parameters(recurse=False)
        }
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
            slots.append(
                Slot(name, tuple(parameter.shape), offset, id(parameter) in tables, id(parameter) in norms)
            )
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

    def __iter__(self) -> Iterator[Slot]:
        return iter(self.slots)

    def slot(self, name: str) -> Slot:
        """The slot of a parameter by name."""
        for slot in self.slots:
            if slot.name == name:
                return slot
        raise KeyError(f"no trainable parameter {name!r}; there are {[slot.name for slot in self.slots]}")

    def locate(self, index: int) -> tuple[str, tuple[int, ...]]:
        """Name and position inside the parameter of one flat index."""
        if not 0 <= index < self.dimension:
            raise IndexError(f"flat index {index} is outside 0..{self.dimension - 1}")
        slot = next(slot for slot in self.slots if index < slot.span.stop)
        position = torch.unravel_index(torch.tensor(index - slot.offset), slot.shape)
        return slot.name, tuple(int(axis) for axis in position)

    def index(self, name: str, position: tuple[int, ...]) -> int:
        """Flat index of one scalar of a parameter: the inverse of `locate`."""
        slot = self.slot(name)
        if len(position) != len(slot.shape) or any(
            not 0 <= p < n for p, n in zip(position, slot.shape, strict=True)
        ):
            raise IndexError(f"position {position} is outside {name!r} of shape {slot.shape}")
        flat = 0
        for p, n in zip(position, slot.shape, strict=True):
            flat = flat * n + p
        return slot.offset + flat

    def parameters(self, model: nn.Module) -> list[nn.Parameter]:
        """The model's parameters in layout order.

        Raises:
            ModelError: the model's trainable parameters are no longer those of this layout.
        """
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
        values = [p.detach().reshape(-1) for p in self.parameters(model)]
        dtype = torch.float32
        for value in values:
            dtype = torch.promote_types(dtype, value.dtype)
        return torch.cat([value.to(dtype) for value in values])

    @torch.no_grad()
    def write(self, model: nn.Module, values: Tensor) -> None:
        """Set the trainable scalars to those of one vector: the inverse of `flatten`."""
        for slot, parameter in zip(self.slots, self.parameters(model), strict=True):
            parameter.copy_(values[slot.span].reshape(slot.shape))


def _is_norm(module: nn.Module) -> bool:
    name = type(module).__name__
    return "Norm" in name or name == "ChannelAffine"
