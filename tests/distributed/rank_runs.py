"""What the ranks of the tests train: small data, small models, and one word for all that came out."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import sparsedp
from flat_settings import placed
from sparsedp._serialization import to_json
from sparsedp.errors import SparseDPError

ROWS, CLASSES = 400, 3
LOSS = nn.CrossEntropyLoss(reduction="none")


def data(rows: int = ROWS, seed: int = 0) -> TensorDataset:
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(CLASSES, (rows,), generator=generator)
    inputs = torch.rand(rows, 6, generator=generator) + nn.functional.one_hot(labels, 6)
    return TensorDataset(inputs, labels)


def words(rows: int = ROWS) -> TensorDataset:
    generator = torch.Generator().manual_seed(1)
    return TensorDataset(
        torch.randint(20, (rows, 4), generator=generator),
        torch.randint(CLASSES, (rows,), generator=generator),
    )


def network(width: int = 8) -> nn.Module:
    torch.manual_seed(4)
    return nn.Sequential(nn.Linear(6, width), nn.Tanh(), nn.Dropout(0.1), nn.Linear(width, CLASSES))


class Bag(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(4)
        self.table, self.head = nn.Embedding(20, 5), nn.Linear(5, CLASSES)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.table(tokens).mean(dim=1))


def digest(result: sparsedp.Result) -> str:
    found = hashlib.sha256()
    for value in result.model.state_dict().values():
        found.update(value.numpy().tobytes())
    found.update(result.support.indices.numpy().tobytes())
    found.update(json.dumps(to_json(result.history), sort_keys=True).encode())
    found.update(f"{result.ledger.steps} {result.ledger.epsilon}".encode())
    return found.hexdigest()


def train(method: str = "tp-topk", **changes: Any) -> sparsedp.Result:
    by_table = method in TABLES
    protection: dict[str, Any] = {"epsilon": 4.0, "delta": 1e-3, "accountant": "rdp"}
    arguments: dict[str, Any] = {
        "method": method,
        "epochs": 2,
        "batch_size": 100,
        "lr": 0.5,
        "seed": 7,
        "evaluate": accuracy,
        **protection,
        **changes,
    }
    if "model" not in arguments:
        arguments["model"] = Bag() if by_table else network()
    if "dataset" not in arguments:
        arguments["dataset"] = words() if by_table else data()
    model, dataset = arguments.pop("model"), arguments.pop("dataset")
    return sparsedp.fit(model, dataset, arguments.pop("loss", LOSS), **placed(arguments))


def accuracy(model: nn.Module) -> dict[str, float]:
    weights = torch.cat([p.detach().flatten() for p in model.parameters()])
    return {"accuracy": float(weights.abs().mean())}


TABLES = frozenset(
    m.name
    for m in sparsedp.list_methods()
    if m.ranking is not None and (m.ranking.source.counts_rows or m.ranking.source.selects)
)
"""Methods that rank rows of embedding tables, by a count of their own."""


def refused(do: Callable[[], object]) -> str:
    """The error it raises."""
    try:
        do()
    except SparseDPError as error:
        return str(error)
    return "nothing was refused"
