"""A small model, data and plan to audit, at a confidence that alarms falsely once in ten million audits."""

from __future__ import annotations

import torch
from torch import nn
from torch.utils.data import Dataset, TensorDataset

import sparsedp
from sparsedp.auditing import AuditResult

CONFIDENCE = 1 - 1e-7
ROWS = 400


def data(rows: int = ROWS, width: int = 24) -> TensorDataset:
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(rows, width, generator=generator)
    return TensorDataset(inputs, (inputs[:, 0] > 0).long())


def network(width: int = 24) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(width, 20), nn.Tanh(), nn.Linear(20, 2))


def audited(model: nn.Module | None = None, dataset: Dataset | None = None, **changes: object) -> AuditResult:
    settings = {
        "method": "dp-sgd", "epsilon": 8.0, "delta": 1e-5, "epochs": 4, "batch_size": 40, "max_grad_norm": 0.5,
        "confidence": CONFIDENCE, "steps": 40, "progress": False,
    }  # fmt: skip
    if "plan" in changes:  # which has its own
        settings = {name: settings[name] for name in ("confidence", "steps", "progress")}
    settings |= changes
    loss = nn.CrossEntropyLoss(reduction="none")
    return sparsedp.audit(model or network(), dataset or data(), loss, **settings)


def problems(result: AuditResult) -> str:
    return " | ".join(f"{check.name}: {check.problem}" for check in result.checks if not check.passed)
