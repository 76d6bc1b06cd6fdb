"""Runs that take a second each."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import TensorDataset

import sparsedp
from flat_settings import placed
from sparsedp import Result, RunMetadata
from sparsedp.methods import Method

ROWS, FEATURES, CLASSES = 80, 6, 3
loss_fn = nn.CrossEntropyLoss(reduction="none")


def data(seed: int, rows: int = ROWS, classes: int = CLASSES) -> TensorDataset:
    """Separable classes."""
    generator = torch.Generator().manual_seed(seed)
    centres = 2 * torch.randn(classes, FEATURES, generator=torch.Generator().manual_seed(99))
    targets = torch.randint(0, classes, (rows,), generator=generator)
    return TensorDataset(centres[targets] + torch.randn(rows, FEATURES, generator=generator), targets)


def network(classes: int = CLASSES) -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(FEATURES, 8), nn.Tanh(), nn.Linear(8, classes))


def train(
    method: str | Method, *, epsilon: float | None = 8.0, classes: int = CLASSES, **more: Any
) -> Result:
    """A whole run; RDP, which calibrates at once."""
    more.setdefault("metadata", RunMetadata(dataset="blobs", model="perceptron"))
    return sparsedp.fit(
        network(classes),
        more.pop("dataset", None) or data(1, classes=classes),
        loss_fn,
        method=method,
        epsilon=epsilon,
        delta=None if epsilon is None else 1e-3,
        epochs=more.pop("epochs", 4),
        batch_size=20,
        lr=None if "optimizer" in more else 0.5,
        eval_dataset=None if "evaluate" in more else data(2, 60, classes),
        accountant="rdp",
        progress=False,
        **placed(more),
    )


def a_run(out: Path, method: str, **more: Any) -> Path:
    """The folder of a whole run."""
    train(method, run_dir=out, **more)
    return out
