"""Small runs to interrupt, resume and compare."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import TensorDataset

from sparsedp.batch import from_criterion
from sparsedp.evaluation import held_out
from sparsedp.methods import Method, MethodOptions, build_plan, get_method
from sparsedp.parameters import ParameterLayout
from sparsedp.privacy.plan import Plan
from sparsedp.training.trainer import Trainer

ROWS, FEATURES, CLASSES = 60, 5, 3
loss_fn = nn.CrossEntropyLoss(reduction="none")


def rows(seed: int, count: int = ROWS) -> TensorDataset:
    """Separable classes in a few dimensions."""
    generator = torch.Generator().manual_seed(seed)
    centres = torch.randn(CLASSES, FEATURES, generator=torch.Generator().manual_seed(99))
    targets = torch.randint(0, CLASSES, (count,), generator=generator)
    return TensorDataset(centres[targets] + 0.5 * torch.randn(count, FEATURES, generator=generator), targets)


def network(seed: int = 0, dropout: float = 0.0) -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return nn.Sequential(nn.Linear(FEATURES, 4), nn.Tanh(), nn.Dropout(dropout), nn.Linear(4, CLASSES))


def sgd(parameters: Iterable[nn.Parameter]) -> Optimizer:
    return torch.optim.SGD(parameters, lr=0.2, momentum=0.9)


def a_plan(
    method: Method,
    options: MethodOptions | None = None,
    *,
    epochs: int = 5,
    batch_size: int = 20,
    unit: str = "row",
) -> Plan:
    """A plan of `3 * epochs` steps; RDP, which calibrates at once."""
    return build_plan(
        method,
        options,
        units=ROWS,
        batch_size=batch_size,
        epochs=epochs,
        epsilon=8.0,
        delta=1e-3,
        max_grad_norm=1.0,
        accountant="rdp",
        unit_name=unit,
    )


def a_trainer(
    method: str = "tp-topk",
    *,
    out: Path | None = None,
    resume: bool = False,
    seed: int | None = 0,
    data_seed: int = 1,
    epochs: int = 5,
    model: nn.Module | None = None,
    optimizer: Callable[[Iterable[nn.Parameter]], Optimizer] = sgd,
    options: MethodOptions | None = None,
    plan: Plan | None = None,
    **more: Any,
) -> Trainer:
    row = get_method(method)
    more.setdefault("evaluate", held_out(rows(7, 30), from_criterion(loss_fn)))
    return Trainer(
        network() if model is None else model,
        rows(data_seed),
        loss_fn,
        plan=a_plan(row, options, epochs=epochs) if plan is None else plan,
        optimizer=optimizer,
        run_dir=out,
        resume=resume,
        seed=seed,
        **more,
    )


def advance(trainer: Trainer, steps: int | None = None) -> Trainer:
    """Take that many steps, or all."""
    if steps == 0:
        return trainer
    for taken, batch in enumerate(trainer, start=1):
        trainer.step(batch)
        if taken == steps:
            break
    return trainer


def weights(model: nn.Module) -> Tensor:
    return ParameterLayout.of(model).flatten(model)


def check_that_a_cut_changes_nothing(
    method: str, options: MethodOptions, phase: str, into: int, folder: Path
) -> None:
    """A run cut so many steps after a phase begins ends with the weights and the support of one left alone."""
    whole = advance(a_trainer(method, options=options, out=folder / "whole")).finish()
    cut = a_trainer(method, options=options, out=folder / "cut")
    advance(cut, cut.plan.first_step(phase) + into).close()
    resumed = advance(a_trainer(method, options=options, out=folder / "cut", resume=True)).finish()
    assert torch.equal(weights(whole.model), weights(resumed.model))
    assert whole.support == resumed.support
