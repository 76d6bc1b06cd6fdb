"""Which layer answers for which parameter: known layers by the table, the rest through the reference path."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import dataclass

from torch import nn

from sparsedp.core.errors import ModelError
from sparsedp.core.layout import Layout
from sparsedp.gradients.layers.source import Family
from sparsedp.gradients.layers.table import family_of
from sparsedp.gradients.vectorised import places

logger = logging.getLogger("sparsedp")


@dataclass(frozen=True, slots=True)
class Layer:
    """One recorded module: its family (None: unknown) and its trainable parameters, local name -> flat name."""

    name: str
    module: nn.Module
    family: Family | None
    parameters: dict[str, str]


def partition(model: nn.Module, layout: Layout) -> tuple[Layer, ...]:
    """Split a model into recorded layers that together own every trainable parameter.

    A module the table does not know is one layer with everything below it: what its forward does with its children
    cannot be known.
    """
    flat_names = {id(p): slot.name for slot, p in zip(layout, layout.parameters(model), strict=True)}
    layers = tuple(_layers("", model, flat_names, set()))
    for layer in layers:
        if layer.family is None:
            kind = type(layer.module).__name__
            logger.info(
                "layer %r (%s) has no fast path; it goes through the reference path", layer.name, kind
            )
        elif (reason := layer.family.refuse(layer.module)) is not None:
            raise ModelError(f"layer {layer.name!r}: {reason}")
    return layers


def _layers(name: str, module: nn.Module, flat_names: dict[int, str], seen: set[int]) -> Iterator[Layer]:
    if id(module) in seen:
        return
    seen.add(id(module))
    own = {
        local: flat_names[id(p)] for local, p in module.named_parameters(recurse=False) if id(p) in flat_names
    }
    family = family_of(module)
    if own and family is not None:
        yield Layer(name, module, family, own)
    elif own:
        below = {place: flat_names[id(p)] for place, p in places(module).items() if id(p) in flat_names}
        yield Layer(name, module, None, below)
    else:
        for child_name, child in module.named_children():
            yield from _layers(f"{name}.{child_name}" if name else child_name, child, flat_names, seen)


def overlap(layers: tuple[Layer, ...]) -> str | None:
    """The name of a layer that is also part of another, unknown one, so that its calls would be counted twice."""
    inside = {
        id(part) for x in layers if x.family is None for part in x.module.modules() if part is not x.module
    }
    return next((x.name for x in layers if id(x.module) in inside), None)


def droppable_axes(layers: tuple[Layer, ...]) -> dict[str, int]:
    """Along how many leading axes a parameter's inactive slices may be left out, in every layer that shares it."""
    axes: dict[str, int] = {}
    for layer in layers:
        for local, flat in layer.parameters.items():
            own = 0 if layer.family is None else layer.family.droppable_axes(layer.module, local)
            axes[flat] = min(own, axes.get(flat, own))
    return axes
