"""The model check: a probe that finds models per-sample clipping cannot protect, before any training."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.dropout import _DropoutNd
from torch.utils import _pytree as pytree

from sparsedp.core.batch import PerSampleLoss, Rows, check_losses, row_count, select_rows, to_device
from sparsedp.core.errors import ModelError
from sparsedp.core.layout import Layout
from sparsedp.core.randomness import PublicRandomness

PROBE_ROWS = 8
TOLERANCE = 1e-3
"""Relative difference between a sample computed alone and in company that rounding does not explain."""

LOSS = "<loss>"
"""Stands for the loss where a module's name is expected."""
REMEDY = (
    "use a layer that looks at one sample at a time, such as nn.GroupNorm, nn.LayerNorm or nn.InstanceNorm"
)


@dataclass(frozen=True, slots=True)
class _Run:
    """What one forward gave: the losses, and every module's output tensors in the order of the calls."""

    losses: Tensor
    outputs: list[tuple[str, list[Tensor]]]


def check_model(model: nn.Module, loss: PerSampleLoss, rows: Rows) -> None:
    """Refuse a model whose samples influence each other, or that remembers what it saw.

    A few rows are run in different company and one by one, as the model is and with its parameters perturbed (a
    branch that starts at zero may mix samples later). The model and the caller's random state are left as they were.

    Raises:
        ModelError: the module at fault by name, and the remedy.
    """
    parameters = Layout.of(model).parameters(model)
    for name, parameter in model.named_parameters():
        if not bool(parameter.isfinite().all()):
            raise ModelError(f"parameter {name!r} holds NaN or infinite values; re-initialise the model")
    _refuse_known_layers(model)
    probe = to_device(select_rows(rows, slice(PROBE_ROWS)), parameters[0].device)
    with torch.no_grad(), torch.random.fork_rng(), _put_back(model):
        for perturbed in (False, True):
            if perturbed:
                _perturb(parameters)
            _refuse_memory(model, loss, probe)
            _refuse_influence_of_company(model, loss, probe)
            _refuse_influence_of_size(model, loss, probe)


def _refuse_known_layers(model: nn.Module) -> None:
    for name, module in model.named_modules():
        if isinstance(module, _BatchNorm) and (module.training or not module.track_running_stats):
            raise ModelError(
                f"{_describe(name, module)} normalises with the statistics of the whole batch, so one sample changes "
                f"the gradients of all others and clipping protects nobody; {REMEDY}: "
                f"nn.GroupNorm(num_groups, {module.num_features}) in its place"
            )
        if isinstance(module, (nn.Embedding, nn.EmbeddingBag)):
            if module.max_norm is not None:
                raise ModelError(
                    f"{_describe(name, module)} has max_norm: it rewrites the rows of the tokens a batch holds, "
                    "which releases them without noise; leave max_norm out"
                )
            if module.scale_grad_by_freq:
                raise ModelError(
                    f"{_describe(name, module)} has scale_grad_by_freq=True: it weighs a sample's gradient by other "
                    "samples' tokens; turn it off"
                )


def _refuse_memory(model: nn.Module, loss: PerSampleLoss, probe: Rows) -> None:
    """A forward pass may write to no parameter or buffer, nor make the next one come out otherwise."""
    before = _state(model)
    first = _seeded_run(model, loss, probe)
    for name, value in _state(model).items():
        if not _same(before[name], value):
            owner = name.rpartition(".")[0]
            raise ModelError(
                f"{_describe(owner, model.get_submodule(owner))} updates {name!r} in the forward pass: what it "
                "remembers of the data is released without noise. Freeze it (for example track_running_stats=False), "
                f"or {REMEDY}"
            )
    second = _seeded_run(model, loss, probe)
    if (place := _first_difference(first, second, slice(None), slice(None))) is not None:
        raise ModelError(
            f"{_at(model, place)} gives another result for the same rows and the same random numbers: it remembers "
            "earlier batches, without noise. Make its forward pass depend on its input alone"
        )


def _refuse_influence_of_company(model: nn.Module, loss: PerSampleLoss, probe: Rows) -> None:
    """A row's results may not change with the content of the other rows; dropout masks agree by position."""
    count = row_count(probe)
    together = _seeded_run(model, loss, probe)
    for i in range(count if count > 1 else 0):
        company = [(i + 1) % count] * count
        company[i] = i
        changed = _seeded_run(model, loss, _reordered(probe, company))
        if (name := _first_difference(together, changed, slice(i, i + 1), slice(i, i + 1))) is not None:
            raise _mixing(model, name)


def _refuse_influence_of_size(model: nn.Module, loss: PerSampleLoss, probe: Rows) -> None:
    """A row's results may not change with the number of rows; dropout is off, as its masks depend on the number."""
    with _modes_put_back(model):
        for module in model.modules():
            if isinstance(module, _DropoutNd):
                module.eval()
        if _is_random(model, loss, probe):
            model.eval()
        together = _seeded_run(model, loss, probe)
        for i in range(row_count(probe)):
            alone = _seeded_run(model, loss, select_rows(probe, slice(i, i + 1)))
            if (name := _first_difference(together, alone, slice(i, i + 1), slice(None))) is not None:
                raise _mixing(model, name)


def _reordered(rows: Rows, order: list[int]) -> Rows:
    return pytree.tree_map_only(Tensor, lambda leaf: leaf[order], rows)


def _mixing(model: nn.Module, name: str) -> ModelError:
    if name == LOSS:
        return ModelError(
            "the loss of one sample changes with the others in the batch, though no module's output does; write the "
            "loss (and anything the model computes outside its modules) so that each row stands alone"
        )
    return ModelError(
        f"{_at(model, name)} mixes samples, or is handed mixed ones: its output for one sample changes with the "
        f"others in the batch, so clipping protects nobody; {REMEDY}"
    )


def _first_difference(first: _Run, second: _Run, these: slice, those: slice) -> str | None:
    """The first module, in the order of calls, whose output differs for these rows; LOSS if only the loss does."""
    count = first.losses.shape[0]
    for call, (name, tensors) in enumerate(first.outputs):
        for place, tensor in enumerate(tensors):
            counterpart = _counterpart(second, call, name, place)
            by_row = counterpart is not None and tensor.shape[0] == count
            if by_row and counterpart is not None and _differ(tensor[these], counterpart[those]):
                return name
    return LOSS if _differ(first.losses[these], second.losses[those]) else None


def _counterpart(run: _Run, call: int, name: str, place: int) -> Tensor | None:
    if call >= len(run.outputs) or run.outputs[call][0] != name or place >= len(run.outputs[call][1]):
        return None
    return run.outputs[call][1][place]


def _run(model: nn.Module, loss: PerSampleLoss, rows: Rows) -> _Run:
    outputs: list[tuple[str, list[Tensor]]] = []

    def record(name: str, output: Any) -> None:
        leaves = pytree.tree_leaves(output)
        outputs.append((name, [x.detach().clone() for x in leaves if isinstance(x, Tensor) and x.dim()]))

    handles = [
        module.register_forward_hook(lambda _module, _args, output, name=name: record(name, output))
        for name, module in model.named_modules()
    ]
    try:
        losses = check_losses(loss(model, rows), row_count(rows))
    finally:
        for handle in handles:
            handle.remove()
    return _Run(losses.detach(), outputs)


def _seeded_run(model: nn.Module, loss: PerSampleLoss, rows: Rows) -> _Run:
    torch.manual_seed(0)
    return _run(model, loss, rows)


def _is_random(model: nn.Module, loss: PerSampleLoss, probe: Rows) -> bool:
    first = _seeded_run(model, loss, probe).losses
    torch.manual_seed(1)
    return not _same(first, _run(model, loss, probe).losses)


def _perturb(parameters: list[nn.Parameter]) -> None:
    """Move every trainable parameter a little: public noise, a tenth of the tensor's size."""
    for place, parameter in enumerate(parameters):
        size = max(0.1 * float(parameter.square().mean().sqrt()), 0.02)
        move = PublicRandomness(0).normal(parameter.numel(), key=(place,)).reshape(parameter.shape)
        parameter.add_(move.to(parameter), alpha=size)


def _state(model: nn.Module) -> dict[str, Tensor]:
    named = [*model.named_parameters(), *model.named_buffers()]
    return {name: value.detach().clone() for name, value in named}


@contextmanager
def _put_back(model: nn.Module) -> Iterator[None]:
    before = _state(model)
    try:
        yield
    finally:
        for name, value in [*model.named_parameters(), *model.named_buffers()]:
            value.data.copy_(before[name])


@contextmanager
def _modes_put_back(model: nn.Module) -> Iterator[None]:
    modes = {module: module.training for module in model.modules()}
    try:
        yield
    finally:
        for module, training in modes.items():
            module.training = training


def _same(a: Tensor, b: Tensor) -> bool:
    return torch.equal(a.nan_to_num(), b.nan_to_num()) if a.is_floating_point() else torch.equal(a, b)


def _differ(a: Tensor, b: Tensor) -> bool:
    """Whether two results differ by more than rounding; NaN in the same places is no difference."""
    if a.shape != b.shape:
        return True
    x, y = a.double().nan_to_num(), b.double().nan_to_num()
    scale = max(float(x.abs().max()), float(y.abs().max()), 1e-6) if x.numel() else 1.0
    return bool(((x - y).abs() > TOLERANCE * scale).any())


def _at(model: nn.Module, name: str) -> str:
    return "the loss" if name == LOSS else _describe(name, model.get_submodule(name))


def _describe(name: str, module: nn.Module) -> str:
    kind = type(module).__name__
    return f"module {name!r} ({kind})" if name else f"the model itself ({kind})"
