"""The model check: a probe that finds models per-sample clipping cannot protect, before any training."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from sparsedp.batch import PerSampleLoss, Rows, to_device
from sparsedp.errors import ModelError
from sparsedp.grad_sample.alone import generators_put_back
from sparsedp.grad_sample.embedding import refuse_embedding
from sparsedp.grad_sample.trial import REMEDY, Trial, describe, state_of
from sparsedp.parameters import Layout
from sparsedp.randomness import PublicRandomness

PROBE_ROWS = 32
"""Rows of the user's that are enough to try a model with."""


def check_model(
    model: nn.Module, loss: PerSampleLoss, rows: Rows, *, fast: bool = True, largest: int = 64
) -> None:
    """Refuse a model whose samples influence each other, or that remembers what it saw.

    Rows are run in different company and one by one, in several numbers up to those that training takes at once
    (`largest` at the most), under several seeds, with gradients on: outputs of modules, losses and (where the `fast`
    engine will train) the gradient of each row are compared. As the model is, and with its parameters perturbed: a
    branch that starts at zero may mix samples later. The model and the caller's random state are left as they were.

    Raises:
        ModelError: the module at fault by name, and the remedy.
    """
    parameters = Layout.of(model).parameters(model)
    for name, parameter in model.named_parameters():
        if not bool(parameter.isfinite().all()):
            raise ModelError(f"parameter {name!r} holds NaN or infinite values; re-initialise the model")
    refuse_known_layers(model)
    pool = to_device(rows, parameters[0].device)
    with generators_put_back(parameters[0].device), _without_log():
        for refuse in (Trial.refuse_by_outputs, Trial.refuse_by_gradients):  # outputs tell which module it is
            with _put_back(model):
                for perturbed in (False, True):
                    if perturbed:
                        _perturb(parameters)
                    refuse(Trial(model, loss, pool, fast, largest, first_seed=1000 * perturbed))


def refuse_known_layers(model: nn.Module) -> None:
    """Refuse layers that are known to mix samples, in the modes they are in.

    Raises:
        ModelError: the layer by name, and the remedy.
    """
    for name, module in model.named_modules():
        if isinstance(module, _BatchNorm) and (module.training or not module.track_running_stats):
            raise ModelError(
                f"{describe(name, module)} normalises with the statistics of the whole batch, so one sample changes "
                "the gradients of all others and clipping protects nobody; a pretrained network keeps what it has "
                "learned by sparsedp.batch_norm.freeze_batch_norm(model), which makes it a fixed affine map. To "
                f"train from scratch, {REMEDY}: nn.GroupNorm(num_groups, {module.num_features}) in its place"
            )
        if isinstance(module, (nn.Embedding, nn.EmbeddingBag)) and (why := refuse_embedding(module)):
            raise ModelError(f"{describe(name, module)}: {why}")


def _perturb(parameters: list[nn.Parameter]) -> None:
    """Move every trainable parameter a little: public noise, a tenth of the tensor's size."""
    with torch.no_grad():
        for place, parameter in enumerate(parameters):
            size = max(0.1 * float(parameter.square().mean().sqrt()), 0.02)
            move = PublicRandomness(0).normal(parameter.numel(), key=(place,)).reshape(parameter.shape)
            parameter.add_(move.to(parameter), alpha=size)


@contextmanager
def _put_back(model: nn.Module) -> Iterator[None]:
    before = state_of(model)
    try:
        yield
    finally:
        for name, value in [*model.named_parameters(), *model.named_buffers()]:
            value.data.copy_(before[name])


@contextmanager
def _without_log() -> Iterator[None]:
    """What the engine says of a model it says again when it trains."""
    logger = logging.getLogger("sparsedp")
    before, logger.disabled = logger.disabled, True
    try:
        yield
    finally:
        logger.disabled = before
