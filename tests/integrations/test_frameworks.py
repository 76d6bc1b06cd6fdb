"""Loops and logs of other packages, on random weights: each takes the private run that `fit` would take."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from runs import weights
from sparsedp import SparseDPError, fit, make_private

pytestmark = pytest.mark.filterwarnings("default")

ROWS = 40
PRIVACY = {"epsilon": 8.0, "delta": 1e-3, "accountant": "rdp", "method": "dp-sgd", "seed": 0}


def table(seed: int, rows: int = ROWS) -> TensorDataset:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, 4, generator=generator)
    return TensorDataset(x, (x[:, 0] > 0).long())


def linear() -> nn.Module:
    torch.manual_seed(0)
    return nn.Linear(4, 2)


class Classifier:
    """The body of a user's LightningModule; made a subclass of it in `lightning_module`."""

    def training_step(self, batch, batch_idx):
        x, y = batch
        loss = nn.functional.cross_entropy(self.net(x), y)
        self.log("train_loss", loss)
        return loss

    def validation_step(self, batch, batch_idx):
        x, y = batch
        self.log("val_accuracy", (self.net(x).argmax(1) == y).float().mean())

    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), lr=0.5)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)]


def lightning_module():
    lightning = pytest.importorskip("lightning")

    class Own(Classifier, lightning.LightningModule):
        def __init__(self):
            lightning.LightningModule.__init__(self)
            self.net = linear()

    return Own()


def lightning_trainer(folder, **more):
    lightning = pytest.importorskip("lightning")
    return lightning.Trainer(
        **{"max_epochs": 3, "enable_checkpointing": False, **more}, accelerator="cpu", logger=False,
        enable_progress_bar=False, enable_model_summary=False, default_root_dir=folder,
    )  # fmt: skip


@pytest.mark.parametrize("by_module", [False, True])
def test_lightning_module_of_a_user_trains_the_run_of_fit(by_module, tmp_path):
    """On given loaders, or on those of a data module."""
    lightning = pytest.importorskip("lightning")
    from sparsedp.integrations.lightning import PrivateModule

    class Tables(lightning.LightningDataModule):
        def setup(self, stage):
            self.train = table(0)

        def train_dataloader(self):
            return DataLoader(self.train, batch_size=10, shuffle=True)

        def val_dataloader(self):
            return DataLoader(table(1), batch_size=20)

    module, trainer = lightning_module(), lightning_trainer(tmp_path)
    loader, tables = (None, Tables()) if by_module else (DataLoader(table(0), batch_size=10), None)
    private = PrivateModule(module, loader, datamodule=tables, epochs=3, **PRIVACY)
    trainer.fit(private, val_dataloaders=None if by_module else DataLoader(table(1), batch_size=20))
    assert set(trainer.callback_metrics) == {"epsilon", "val_accuracy"}
    assert private.result.complete
    plain = linear()
    fit(plain, table(0), nn.CrossEntropyLoss(), epochs=3, batch_size=10, progress=False, **PRIVACY,
        optimizer=lambda p: torch.optim.SGD(p, lr=0.5),
        lr_scheduler=lambda o, steps: torch.optim.lr_scheduler.StepLR(o, 4, 0.5))  # fmt: skip
    assert torch.allclose(weights(module), weights(plain), atol=1e-6)


@pytest.mark.parametrize(
    ("more", "named"),
    [
        ({"max_epochs": 2}, "max_epochs"),
        ({"accumulate_grad_batches": 2}, "accumulate_grad_batches"),
        ({"limit_train_batches": 0.5}, "limit_train_batches"),
        ({"precision": "bf16-mixed"}, "precision"),
    ],
)
def test_lightning_setting_that_is_not_heeded_is_refused(more, named, tmp_path):
    pytest.importorskip("lightning")
    from sparsedp.integrations.lightning import PrivateModule

    private = PrivateModule(lightning_module(), DataLoader(table(0), batch_size=10), epochs=3, **PRIVACY)
    with pytest.raises(Exception, match=named):
        lightning_trainer(tmp_path, **more).fit(private)
    assert private.private.step == 0


def test_lightning_run_is_checkpointed_by_callbacks_and_resumed_from_its_folder(tmp_path):
    lightning = pytest.importorskip("lightning")
    from sparsedp.integrations.lightning import PrivateModule

    class Break(lightning.Callback):
        def on_train_epoch_start(self, trainer, module):
            if trainer.current_epoch == 1:
                raise SystemError

    def private(folder, **more):
        loader = DataLoader(table(0), batch_size=10)
        return PrivateModule(
            lightning_module(), loader, epochs=3, run_dir=tmp_path / folder, **PRIVACY, **more
        )

    held = DataLoader(table(1), batch_size=20)
    saving = lightning.pytorch.callbacks.ModelCheckpoint(
        dirpath=tmp_path / "kept", monitor="val_accuracy", save_top_k=-1
    )
    whole, cut = private("whole"), private("cut")
    trainer = lightning_trainer(tmp_path, callbacks=[saving], enable_checkpointing=True)
    trainer.fit(whole, val_dataloaders=held)
    assert trainer.global_step == whole.private.step == 12
    assert len(list((tmp_path / "kept").iterdir())) == 3
    lightning_module().load_state_dict(torch.load(saving.best_model_path, weights_only=False)["state_dict"])
    with pytest.raises(SystemError):
        lightning_trainer(tmp_path, callbacks=[Break()]).fit(cut, val_dataloaders=held)
    cut.private.pause()
    again = private("cut", resume=True)
    with pytest.raises(SparseDPError, match="checkpoints hold no ledger"):
        lightning_trainer(tmp_path).fit(again, val_dataloaders=held, ckpt_path=saving.best_model_path)
    trainer = lightning_trainer(tmp_path)
    trainer.fit(again, val_dataloaders=held)
    assert (again.private.step, trainer.current_epoch) == (12, 3)
    assert torch.equal(weights(again.module), weights(whole.module))


def test_accelerate_leaves_a_plain_loop_as_it_is():
    accelerate = pytest.importorskip("accelerate")
    accelerator = accelerate.Accelerator(cpu=True)
    model = linear()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    private = make_private(
        accelerator.prepare_model(model), optimizer, DataLoader(table(0), batch_size=10), nn.CrossEntropyLoss(),
        epochs=2, **PRIVACY,
    )  # fmt: skip
    for _ in range(2):
        for x, y in private.loader:
            private.optimizer.zero_grad()
            private.criterion(private.model(x), y).backward()
            private.optimizer.step()
    plain = linear()
    fit(plain, table(0), nn.CrossEntropyLoss(), epochs=2, batch_size=10, progress=False, **PRIVACY,
        optimizer=lambda p: torch.optim.SGD(p, lr=0.5))  # fmt: skip
    assert torch.equal(weights(model), weights(plain))


def test_mlflow_sees_released_values_only(tmp_path):
    mlflow = pytest.importorskip("mlflow")
    from sparsedp.integrations.mlflow import MLflowLog

    seen: list[tuple[set[str], int]] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(mlflow, "log_metrics", lambda values, step: seen.append((set(values), step)))
        fit(linear(), table(0), nn.CrossEntropyLoss(reduction="none"), epochs=2, batch_size=10, progress=False,
            eval_dataset=table(1), callbacks=[MLflowLog()], **PRIVACY)  # fmt: skip
    steps = {"released_norm", "active_ratio", "learning_rate"}
    assert [names for names, _ in seen if names & steps] == [steps] * 8
    assert all(
        names == {"epsilon"} | {n for n in names if n.startswith("held_out_")}
        for names, _ in seen
        if not names & steps
    )


def test_the_example_runs(tmp_path):
    pytest.importorskip("peft")
    example = Path(__file__).parents[2] / "examples" / "hugging_face.py"
    done = subprocess.run(
        [sys.executable, str(example)], capture_output=True, text=True, cwd=tmp_path, check=False, timeout=250
    )
    assert done.returncode == 0, done.stderr
    assert "at epsilon 8.00" in done.stdout or "at epsilon 7.9" in done.stdout, done.stdout
