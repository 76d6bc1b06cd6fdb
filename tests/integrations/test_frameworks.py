"""Loops and logs of other packages, on random weights: each takes the private run that `fit` would take."""

from __future__ import annotations

import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, Dataset, TensorDataset

from sparsedp import PerExampleLoss, SparseDPError, fit

pytestmark = pytest.mark.filterwarnings("default")

ROWS, LENGTH = 40, 6
PRIVACY = {"epsilon": 8.0, "delta": 1e-3, "accountant": "rdp", "method": "dp-sgd", "seed": 0}


@pytest.fixture(autouse=True)
def no_datasets_package(monkeypatch):
    """Tests of ours live in a folder `datasets`, which transformers would take for the package of that name."""
    if find_spec("transformers"):
        monkeypatch.setattr("transformers.trainer.is_datasets_available", lambda: False)


class Texts(Dataset):
    """Made-up sentences in dictionaries, as tokenizers give them."""

    def __len__(self):
        return ROWS

    def __getitem__(self, i):
        words = torch.from_numpy(np.random.default_rng(i).integers(2, 50, LENGTH))
        return {
            "input_ids": words,
            "attention_mask": torch.ones(LENGTH, dtype=torch.long),
            "labels": int(words[0] > 25),
        }


def bert(seed: int = 0) -> nn.Module:
    hf = pytest.importorskip("transformers")
    torch.manual_seed(seed)
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
    quiet = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    return hf.BertForSequenceClassification(hf.BertConfig(vocab_size=50, num_labels=2, **sizes, **quiet))


def hub_trainer(model: nn.Module, tmp_path, **more):
    hf = pytest.importorskip("transformers")
    from sparsedp.integrations.transformers import SparseDPTrainer

    args = hf.TrainingArguments(
        output_dir=str(tmp_path), num_train_epochs=2, per_device_train_batch_size=5, gradient_accumulation_steps=2,
        learning_rate=1e-2, report_to=[], disable_tqdm=True, use_cpu=True, lr_scheduler_type="linear",
    )  # fmt: skip
    return SparseDPTrainer(
        model=model, args=args, train_dataset=Texts(), data_collator=hf.default_data_collator,
        eval_dataset=Texts(), privacy={**PRIVACY, **more},
    )  # fmt: skip


def weights(model: nn.Module) -> torch.Tensor:
    return torch.cat([p.detach().reshape(-1) for p in model.parameters() if p.requires_grad])


def test_the_trainer_of_transformers_takes_the_run_of_fit(tmp_path):
    trainer = hub_trainer(bert(), tmp_path)
    done = trainer.train()
    assert done.metrics["epsilon"] <= 8.0
    assert trainer.result.plan.total_steps == done.global_step == 8
    assert "eval_loss" in trainer.evaluate()

    def loss(model, rows):
        logits = model(input_ids=rows["input_ids"], attention_mask=rows["attention_mask"]).logits
        return F.cross_entropy(logits, rows["labels"], reduction="none")

    plain = bert()
    fit(
        plain, Texts(), PerExampleLoss(loss), epochs=2, batch_size=10, progress=False, **PRIVACY,
        optimizer=lambda p: torch.optim.AdamW(p, lr=1e-2, weight_decay=0.0),
        lr_scheduler=lambda o, steps: torch.optim.lr_scheduler.LambdaLR(o, lambda step: (steps - step) / steps),
    )  # fmt: skip
    assert torch.allclose(weights(trainer.model), weights(plain), atol=1e-6)
    with pytest.raises(SparseDPError, match="ledger"):
        trainer.train(resume_from_checkpoint=True)


def test_low_rank_adapters_are_what_is_trained(tmp_path):
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(task_type="SEQ_CLS", r=2, target_modules=["query", "value"])
    model = peft.get_peft_model(bert(), config)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    trainer = hub_trainer(model, tmp_path)
    trainer.train()
    moved = {name for name, p in model.named_parameters() if not torch.equal(p, before[name])}
    assert moved
    assert all("lora" in name or "classifier" in name for name in moved)
    assert trainer.result.d == sum(p.numel() for p in model.parameters() if p.requires_grad)


def table(seed: int, rows: int = ROWS) -> TensorDataset:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, 4, generator=generator)
    return TensorDataset(x, (x[:, 0] > 0).long())


def linear() -> nn.Module:
    torch.manual_seed(0)
    return nn.Linear(4, 2)


def test_lightning_trains_the_run_of_fit(tmp_path):
    lightning = pytest.importorskip("lightning")
    from sparsedp.integrations.lightning import PrivateModule

    loss = nn.CrossEntropyLoss(reduction="none")
    model = linear()
    module = PrivateModule(
        model, torch.optim.SGD(model.parameters(), lr=0.5), DataLoader(table(0), batch_size=10), loss,
        epochs=3, **PRIVACY,
    )  # fmt: skip
    trainer = lightning.Trainer(
        max_epochs=3, accelerator="cpu", logger=False, enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False, default_root_dir=tmp_path,
    )  # fmt: skip
    trainer.fit(module, val_dataloaders=DataLoader(table(1), batch_size=20))
    assert "val_accuracy" in trainer.callback_metrics
    assert module.result().complete
    plain = linear()
    fit(plain, table(0), loss, epochs=3, batch_size=10, progress=False, **PRIVACY,
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
