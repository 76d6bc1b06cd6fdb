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

PROBE_ROWS = 8
TOLERANCE = 1e-3
"""Relative difference between a sample computed alone and in company that rounding does not explain."""

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

    A few rows are run together and one by one, with dropout off. The model, its buffers and the caller's random
    state are left as they were.

    Raises:
        ModelError: the module at fault by name, and the remedy.
    """
    parameters = Layout.of(model).parameters(model)
    for name, parameter in model.named_parameters():
        if not bool(parameter.isfinite().all()):
            raise ModelError(f"parameter {name!r} holds NaN or infinite values; re-initialise the model")
    _refuse_batch_norm(model)
    probe = to_device(select_rows(rows, slice(PROBE_ROWS)), parameters[0].device)
    count = row_count(probe)
    with torch.no_grad(), torch.random.fork_rng(), _without_dropout(model):
        _refuse_changing_buffers(model, loss, probe)
        if _is_random(model, loss, probe):
            model.eval()
        together = _run(model, loss, probe)
        alone = [_run(model, loss, select_rows(probe, slice(i, i + 1))) for i in range(count)]
    _refuse_mixing(model, together, alone)


def _refuse_batch_norm(model: nn.Module) -> None:
    for name, module in model.named_modules():
        uses_batch = isinstance(module, _BatchNorm) and (module.training or not module.track_running_stats)
        if uses_batch:
            raise ModelError(
                f"{_describe(name, module)} normalises with the statistics of the whole batch, so one sample changes "
                f"the gradients of all others and clipping protects nobody; {REMEDY}: "
                f"nn.GroupNorm(num_groups, {module.num_features}) in its place"
            )


def _refuse_changing_buffers(model: nn.Module, loss: PerSampleLoss, probe: Rows) -> None:
    before = {name: buffer.clone() for name, buffer in model.named_buffers()}
    _run(model, loss, probe)
    changed = [name for name, buffer in model.named_buffers() if not _same(before[name], buffer)]
    for name, buffer in model.named_buffers():
        buffer.copy_(before[name])
    if changed:
        owner = changed[0].rpartition(".")[0]
        raise ModelError(
            f"{_describe(owner, model.get_submodule(owner))} updates its buffer {changed[0]!r} in the forward pass: "
            "what it remembers of the data is released without noise. Freeze it (for example "
            f"track_running_stats=False), or {REMEDY}"
        )


def _refuse_mixing(model: nn.Module, together: _Run, alone: list[_Run]) -> None:
    """Name the first module, in the order of the calls, whose output for a sample depends on the company."""
    for call, (name, tensors) in enumerate(together.outputs):
        for place, tensor in enumerate(tensors):
            for i, single in enumerate(alone):
                counterpart = _counterpart(single, call, name, place)
                comparable = counterpart is not None and tensor.shape[:1] == (len(alone),)
                if comparable and counterpart is not None and _differ(tensor[i : i + 1], counterpart):
                    raise ModelError(
                        f"{_describe(name, model.get_submodule(name))} mixes samples: its output for one sample "
                        f"changes with the others in the batch, so clipping protects nobody; {REMEDY}"
                    )
    losses = torch.cat([run.losses for run in alone])
    if _differ(together.losses, losses):
        raise ModelError(
            "the loss of one sample changes with the others in the batch, though no module's output does; write the "
            "loss (and anything the model computes outside its modules) so that each row stands alone"
        )


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


def _is_random(model: nn.Module, loss: PerSampleLoss, probe: Rows) -> bool:
    torch.manual_seed(0)
    first = _run(model, loss, probe).losses
    torch.manual_seed(1)
    return not _same(first, _run(model, loss, probe).losses)


@contextmanager
def _without_dropout(model: nn.Module) -> Iterator[None]:
    modes = {module: module.training for module in model.modules()}
    for module in modes:
        if isinstance(module, _DropoutNd):
            module.training = False
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


def _describe(name: str, module: nn.Module) -> str:
    kind = type(module).__name__
    return f"module {name!r} ({kind})" if name else f"the model itself ({kind})"
