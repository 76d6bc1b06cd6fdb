"""A model's trainable weights as one flat vector: read, written, and recognised."""

from __future__ import annotations

import json

import torch
from torch import Tensor, nn

from sparsedp._serialization import sha256
from sparsedp.optimizers.sparse import places_in
from sparsedp.parameters import Layout, Support
from sparsedp.runs.checkpoint import describe_layout
from sparsedp.validation.state import tensor_digest


@torch.no_grad()
def write_weights(model: nn.Module, layout: Layout, support: Support, values: Tensor) -> None:
    """Put k values into the support's weights, and leave every other one alone."""
    split, start = support.split(layout), 0
    for slot, parameter in zip(layout, layout.parameters(model), strict=True):
        places = places_in(split[slot.name], slot.shape, parameter.device)
        count = split[slot.name].numel()
        mine = values[start : start + count].to(parameter)
        if places is None:
            parameter.copy_(mine.reshape(slot.shape))
        else:
            places.write(parameter, mine.reshape(places.shape))
        start += count


def model_digest(model: nn.Module, layout: Layout) -> str:
    """What two models must share to be trained together: trainable names and shapes, and everything frozen."""
    trainable = {slot.name for slot in layout}
    frozen = {
        name: tensor_digest(tensor).hex()
        for name, tensor in {**dict(model.named_parameters()), **dict(model.named_buffers())}.items()
        if name not in trainable
    }
    return sha256(json.dumps([describe_layout(layout), frozen]))
