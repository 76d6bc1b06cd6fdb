"""Private training over clients that keep their data, on Flower: each client is protected, whatever it holds.

In Flower's simulation engine, in this process:   python examples/flower_digits/flower_digits.py
By Flower's own program:                          flwr run examples/flower_digits
Over its network: see docs/federated.md.
"""

from __future__ import annotations

import torch
from flwr.app import Context
from flwr.serverapp import Grid, ServerApp
from torch import nn
from torch.utils.data import Subset

import sparsedp
from sparsedp.batch import per_sample_loss
from sparsedp.federated import Client, FederatedTrainer, LocalSGD
from sparsedp.integrations.flower import SparseDPStrategy, client_app
from sparsedp_experiments import data as datasets

LOSS = nn.CrossEntropyLoss(reduction="none")
DEFAULTS = {
    "clients": 100, "clients-a-round": 30, "rounds": 27,
    "epsilon": 8.0, "method": "tp-topk", "local-steps": 5, "out": "",
}  # fmt: skip


def make_model() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 10))


def make_client(context: Context) -> Client:
    """A client has every n-th row; on a real one, its own data set."""
    config = {**DEFAULTS, **context.run_config}
    rows = datasets.digits().train
    mine = range(int(context.node_config["partition-id"]), len(rows), int(config["clients"]))
    training = LocalSGD(dataset=Subset(rows, mine), loss=LOSS, steps=int(config["local-steps"]), lr=0.5)
    return Client(make_model, training)


def make_trainer(context: Context) -> FederatedTrainer:
    config = {**DEFAULTS, **context.run_config}
    clients, a_round = int(config["clients"]), int(config["clients-a-round"])
    plan = sparsedp.plan(
        str(config["method"]),
        units=clients,
        unit_name="client",
        batch_size=a_round,
        epochs=max(1, round(int(config["rounds"]) * a_round / clients)),
        epsilon=float(config["epsilon"]),
        delta=1e-3,
    )
    return FederatedTrainer(
        make_model(),
        plan=plan,
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.5, momentum=0.9),
        evaluate=sparsedp.held_out(datasets.digits().test, per_sample_loss(LOSS)),
        run_dir=str(config["out"]) or None,
        callbacks=[show],
        metadata=sparsedp.RunMetadata(dataset="digits", model="linear"),
    )


def show(event: object) -> None:
    if isinstance(event, sparsedp.EpochMetrics):
        accuracy = event.metrics["accuracy"]
        print(f"round {event.step}: accuracy {accuracy:.3f}, epsilon {event.epsilon:.2f}", flush=True)


server, client = ServerApp(), client_app(make_client)


@server.main()
def main(grid: Grid, context: Context) -> None:
    SparseDPStrategy(make_trainer(context)).start(grid, timeout=120)


if __name__ == "__main__":
    from flwr.simulation import run_simulation

    run_simulation(server, client, num_supernodes=int(DEFAULTS["clients"]))
