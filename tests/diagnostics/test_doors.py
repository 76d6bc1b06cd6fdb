"""`diagnose` works on a run whatever started it: `fit`, a `Trainer`, `make_private`, an experiment, an estimator."""

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import sparsedp
from diagnostic_probes import network, rows
from sparsedp.diagnostics import look
from sparsedp.methods import build_plan
from sparsedp_experiments.runs.execute import execute
from sparsedp_experiments.runs.settings import Settings

pytestmark = pytest.mark.usefixtures("checked_once")

LOSS = nn.CrossEntropyLoss(reduction="none")


def by_fit(out):
    sparsedp.fit(
        network(), TensorDataset(*rows(60)), LOSS, method="tp-topk", epsilon=8.0, delta=1e-3, epochs=5, batch_size=20,
        accountant="rdp", out=out, progress=False,
    )  # fmt: skip


def by_a_loop_of_ones_own(out):
    plan = build_plan(
        "tp-topk", units=60, batch_size=20, epochs=5, epsilon=8.0, delta=1e-3, clip_norm=1.0, accountant="rdp"
    )
    sgd = lambda parameters: torch.optim.SGD(parameters, lr=0.1)  # noqa: E731
    trainer = sparsedp.Trainer(network(), TensorDataset(*rows(60)), LOSS, plan=plan, optimizer=sgd, out=out)
    for batch in trainer:
        trainer.step(batch)
    trainer.finish()


def by_make_private(out):
    model = network()
    loader = DataLoader(TensorDataset(*rows(60)), batch_size=20, shuffle=True)
    model, optimizer, loader = sparsedp.make_private(
        model, torch.optim.SGD(model.parameters(), lr=0.1), loader, LOSS, method="tp-topk", epsilon=8.0, delta=1e-3,
        epochs=5, accountant="rdp", out=out,
    )  # fmt: skip
    for _ in range(5):
        for inputs, targets in loader:
            optimizer.zero_grad()
            LOSS(model(inputs), targets).mean().backward()
            optimizer.step()
    loader.finish()


def by_an_experiment(out):
    settings = {
        "dataset": "digits",
        "epochs": 3,
        "batch_size": 30,
        "subset": 150,
        "seed": 1,
        "accountant": "rdp",
    }
    execute(Settings.from_json(settings), out=out)


def by_the_estimator(out):
    from sparsedp.sklearn import SparseDPClassifier

    rng = np.random.default_rng(0)
    X, y = rng.uniform(-1, 1, (120, 6)), rng.integers(0, 2, 120)
    settings = {"epsilon": 3.0, "delta": 1e-4, "epochs": 3, "batch_size": 20, "accountant": "rdp"}
    SparseDPClassifier(classes=[0, 1], bounds=(-1, 1), run_dir=out, **settings).fit(X, y)


DOORS = [by_fit, by_a_loop_of_ones_own, by_make_private, by_an_experiment, by_the_estimator]


@pytest.mark.parametrize("start", DOORS)
def test_a_run_can_be_diagnosed_whatever_started_it(start, tmp_path):
    start(tmp_path / "run")
    seen = look(tmp_path / "run")
    assert set(seen.splits) == {"energy", "coherent"}
    assert set(seen.noise.noise_ratios) >= {"all", "head", "support"}
    assert sparsedp.verify(tmp_path / "run", independent=False).reasons == ()
