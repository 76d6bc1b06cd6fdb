"""Which layer answers for which parameter."""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn

from sparsedp.errors import ModelError
from sparsedp.grad_sample.layers.source import Family
from sparsedp.grad_sample.layers.table import family_of
from sparsedp.parameters import Layout


@dataclass(frozen=True, slots=True)
class Layer:
    """One recorded module: its family and its trainable parameters, local name -> flat name."""

    name: str
    module: nn.Module
    family: Family
    parameters: dict[str, str]


def partition(model: nn.Module, layout: Layout) -> tuple[Layer, ...]:
    """The modules of a model that the table knows and that hold trainable parameters.

    All other trainable parameters are followed through the graph, operation by operation.
    """
    flat_names = {id(p): slot.name for slot, p in zip(layout, layout.parameters(model), strict=True)}
    layers = []
    for name, module in model.named_modules():
        family = family_of(module)
        own = {
            local: flat_names[id(p)]
            for local, p in module.named_parameters(recurse=False)
            if id(p) in flat_names
        }
        if family is None or not own:
            continue
        if (reason := family.refuse(module)) is not None:
            raise ModelError(f"layer {name!r}: {reason}")
        layers.append(Layer(name, module, family, own))
    return tuple(layers)


def droppable_axes(layout: Layout, layers: tuple[Layer, ...]) -> dict[str, int]:
    """Along how many leading axes a parameter's inactive slices may be left out: what all its layers can do."""
    axes = {slot.name: min(2, len(slot.shape)) for slot in layout}
    for layer in layers:
        for local, flat in layer.parameters.items():
            axes[flat] = min(axes[flat], layer.family.droppable_axes(layer.module, local))
    return axes
