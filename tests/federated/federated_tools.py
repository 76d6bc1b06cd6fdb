"""Clients in one process: the round logic without any network."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from sparsedp.federated import Client, ClientTask, FederatedTrainer, LocalSGD, RoundReport
from sparsedp.methods import build_plan
from sparsedp.privacy.plan import Plan

CLIENTS, ROWS, FEATURES, CLASSES = 12, 5, 6, 3
LOSS = nn.CrossEntropyLoss(reduction="none")


def make_model() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(FEATURES, 4), nn.Tanh(), nn.Linear(4, CLASSES)).double()


def rows_of(client: int) -> TensorDataset:
    generator = torch.Generator().manual_seed(100 + client)
    labels = torch.randint(CLASSES, (ROWS,), generator=generator)
    inputs = torch.randn(ROWS, FEATURES, generator=generator, dtype=torch.float64)
    return TensorDataset(inputs + nn.functional.one_hot(labels, FEATURES), labels)


def all_rows() -> tuple[TensorDataset, Tensor]:
    """Every client's rows, and whose each is."""
    tensors = [rows_of(client).tensors for client in range(CLIENTS)]
    inputs, labels = (torch.cat(parts) for parts in zip(*tensors, strict=True))
    return TensorDataset(inputs, labels), torch.arange(CLIENTS).repeat_interleave(ROWS)


def a_plan(method: str = "tp-topk", **changes: object) -> Plan:
    asked = {"epsilon": 20.0, "delta": 1e-3, "epochs": 4, "batch_size": 4}
    asked |= {"max_grad_norm": 0.5, "accountant": "rdp"}
    return build_plan(method, units=CLIENTS, unit_name="client", **{**asked, **changes})


def sgd(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.5, momentum=0.9)


class Loopback:
    """All clients; `meddle` may change what is sent, or drop it."""

    def __init__(
        self,
        meddle: Callable[[int, ClientTask, Tensor], Tensor | str | None] | None = None,
        **local: object,
    ) -> None:
        self.clients = [
            Client(make_model, LocalSGD(dataset=rows_of(number), loss=LOSS, **local))
            for number in range(CLIENTS)
        ]
        self.asked: list[tuple[int, ClientTask]] = []
        self._meddle = meddle or (lambda client, task, update: update)

    def ask(self, client: int, task: ClientTask) -> Tensor | str | None:
        task = ClientTask.from_payload(task.to_payload())
        self.asked.append((client, task))
        return self._meddle(client, task, self.clients[client].answer(task))

    def round(self, trainer: FederatedTrainer) -> RoundReport:
        begun = trainer.configure_round()
        answers = {client: self.ask(client, begun.task) for client in begun.clients}
        return trainer.aggregate(begun, {c: a for c, a in answers.items() if a is not None})

    def run(self, trainer: FederatedTrainer) -> list[RoundReport]:
        reports = []
        while not trainer.is_done:
            reports.append(self.round(trainer))
        return reports
