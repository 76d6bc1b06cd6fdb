"""Runs that do not go through `fit` in one process: clients, two ranks, the estimator; and the noise of plans.

`torchrun --nproc-per-node 2 golden_doors.py FOLDER` does the runs of two ranks; rank 0 writes FOLDER/found.json.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import torch
from golden_runs import PATIENTS, TWO_RELEASES, content, digits, run, sketch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import sparsedp
from sparsedp.federated import Client, FederatedTrainer, LocalSGD
from sparsedp.methods import build_plan
from sparsedp.privacy.accounting import plan_epsilon
from sparsedp.privacy.calibration import NominalSplit

LOSS = nn.CrossEntropyLoss(reduction="none")
_CLIENTS = 12

FEDERATED: dict[str, tuple[str, dict[str, Any]]] = {
    "clients: dp-sgd": ("dp-sgd", {}),
    "clients: tp-topk": ("tp-topk", {"steps": 3, "lr": 0.2, "batch_size": 2, "seed": 4}),
    "clients: on-rand": ("on-rand", {}),
    "clients: adadpigu": ("adadpigu", {"accountant": "pld"}),
}
RANKS: dict[str, dict[str, Any]] = {
    "two ranks: dp-sgd": {"method": "dp-sgd", "model": "cnn"},
    "two ranks: tp-topk": {"method": "tp-topk"},
    "two ranks: adadpigu": {"method": "adadpigu"},
    "two ranks: on-rand": {"method": "on-rand", "max_physical_batch": 9},
    "two ranks: adafest": {"method": "adafest", "model": "table"},
    "two ranks: units": {"method": "tp-topk", **PATIENTS, "rows_per_unit": 3},
    "two ranks: normalised": {"method": "dp-sgd", "epsilon": 6.0, "normalise": TWO_RELEASES},
}
ESTIMATOR: dict[str, dict[str, Any]] = {
    "estimator: dp-sgd": {"method": "dp-sgd"},
    "estimator: tp-topk": {"method": "tp-topk", "bounds": (0.0, 16.0), "active_ratio": 0.3},
    "estimator: hidden, units": {"method": "dp-sgd", "hidden_layer_sizes": 8, "unit": "patient", "lr": 0.3},
    "estimator: private scale": {"method": "tp-coherent", "private_scale": (3, 4, 5), "epsilon": 6.0},
}


def federated(name: str, out: Path) -> dict[str, Any]:
    """A run over clients in this process."""
    method, asked = FEDERATED[name]
    asked = dict(asked)
    accountant = asked.pop("accountant", "rdp")
    plan = build_plan(
        method, units=_CLIENTS, unit_name="client", epsilon=20.0, delta=1e-3, epochs=4, batch_size=4,
        max_grad_norm=0.5, accountant=accountant,
    )  # fmt: skip
    clients = [Client(_network, LocalSGD(dataset=_rows(n), loss=LOSS, **asked)) for n in range(_CLIENTS)]

    def sgd(parameters: Any) -> torch.optim.Optimizer:
        return torch.optim.SGD(parameters, lr=0.5, momentum=0.9)

    supports: list[Tensor] = []

    def note(event: object) -> None:
        if isinstance(event, sparsedp.StepReport):
            supports.append(event.released.support.indices.clone())

    with FederatedTrainer(
        _network(), plan=plan, optimizer=sgd, seed=5, run_dir=out, callbacks=(note,)
    ) as trainer:
        while not trainer.is_done:
            begun = trainer.configure_round()
            trainer.aggregate(begun, {number: clients[number].answer(begun.task) for number in begun.clients})
        return content(trainer.finish(), out, supports)


def estimator(name: str, out: Path) -> dict[str, Any]:
    """A fit of the classifier, and what it predicts."""
    from sparsedp.sklearn import SparseDPClassifier

    (pictures, labels), (apart, _) = (part.tensors for part in digits())
    given = {
        "epsilon": 2.0,
        "delta": 1e-3,
        "accountant": "rdp",
        "epochs": 3,
        "batch_size": 32,
        **ESTIMATOR[name],
    }
    model = SparseDPClassifier(classes=range(10), random_state=5, run_dir=out, **given)
    units = torch.arange(len(labels)).numpy() % 70 if "unit" in given else None
    with warnings.catch_warnings(action="ignore"):  # no bounds were given
        model.fit(pictures.flatten(1).numpy() * 16, labels.numpy(), groups=units)
    guessed = model.predict_proba(apart.flatten(1).numpy() * 16)
    return {**content(model.result_, out), "sketch": [*sketch(model.model_), *guessed.sum(0).tolist()]}


def two_ranks(folder: Path) -> dict[str, dict[str, Any]]:
    """Every run of two ranks, by torchrun as a user starts it."""
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
    }
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", __file__]
    ended = subprocess.run(
        [*command, str(folder)], env=environment, capture_output=True, text=True, timeout=500, check=False
    )
    assert ended.returncode == 0, ended.stderr[-6000:]
    return json.loads((folder / "found.json").read_text())


def plans() -> dict[str, list[float]]:
    """For plans of many kinds: the noise of each phase, and epsilon by every accountant."""
    asked: dict[str, tuple[str, dict[str, Any]]] = {
        f"{method}, {accountant}, {epsilon}": (method, {"accountant": accountant, "epsilon": epsilon})
        for method in ("dp-sgd", "tp-topk", "fest")
        for accountant in ("pld", "rdp", "rdp-classic")
        for epsilon in (1.0, 8.0)
    }
    asked["nominal split"] = ("tp-topk", {"split": NominalSplit(0.3), "accountant": "rdp"})
    asked["full batches"] = ("dp-sgd", {"batch_size": 3000, "accountant": "pld"})
    asked["normalised"] = ("tp-topk", {"normalise": sparsedp.PrivateNormalisation(), "accountant": "pld"})
    found = {}
    for name, (method, more) in asked.items():
        usual = {"epsilon": 3.0, "delta": 1e-5, "epochs": 10, "batch_size": 150}
        plan = build_plan(method, units=3000, **{**usual, **more})
        steps = [float(phase.steps) for phase in plan.phases]
        noise = [phase.noise_multiplier for phase in plan.phases]
        found[name] = [*steps, *noise, *(plan_epsilon(plan, by) for by in ("pld", "rdp", "rdp-classic"))]
    return found


def _network() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(6, 4), nn.Tanh(), nn.Linear(4, 3)).double()


def _rows(client: int) -> TensorDataset:
    generator = torch.Generator().manual_seed(100 + client)
    labels = torch.randint(3, (5,), generator=generator)
    inputs = torch.randn(5, 6, generator=generator, dtype=torch.float64)
    return TensorDataset(inputs + nn.functional.one_hot(labels, 6), labels)


def _as_a_rank(folder: Path) -> None:
    import torch.distributed as dist

    torch.set_num_threads(1)
    found = {}
    for number, (name, asked) in enumerate(RANKS.items()):
        found[name] = run(folder / f"ranks-{number}", asked)
    if int(os.environ["RANK"]) == 0:
        (folder / "found.json").write_text(json.dumps(found))
    if dist.is_initialized():
        dist.barrier()
        dist.destroy_process_group()
    # Under load PyTorch's threads may abort an interpreter that ends beside them, after all work is done.
    os._exit(0)


if __name__ == "__main__":
    _as_a_rank(Path(sys.argv[1]))
