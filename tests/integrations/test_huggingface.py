"""`SparseDPTrainer`: the run of `fit` on the loss of the model's own head; every setting heeded or refused."""

from __future__ import annotations

import dataclasses
import json

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import Dataset

from runs import weights
from sparsedp import ModelError, PerExampleLoss, SparseDPError, fit
from sparsedp.grad_sample.isolation import isolated_losses

hf = pytest.importorskip("transformers")

from sparsedp.integrations.huggingface import LOSS, SETTINGS, PrivacyArguments, SparseDPTrainer  # noqa: E402

pytestmark = pytest.mark.filterwarnings("default")

ROWS, LENGTH = 40, 6
PRIVACY = {"epsilon": 8.0, "delta": 1e-3, "accountant": "rdp", "method": "dp-sgd", "seed": 0}


@pytest.fixture(autouse=True)
def no_datasets_package(monkeypatch):
    """Transformers must not take a folder of tests for the package `datasets`."""
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


def bert() -> nn.Module:
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
    without_dropout = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    return hf.BertForSequenceClassification(
        hf.BertConfig(vocab_size=50, num_labels=2, **sizes, **without_dropout)
    )


def trainer_of(model, folder, privacy=None, callbacks=None, **settings):
    args = hf.TrainingArguments(
        **{
            "output_dir": str(folder), "num_train_epochs": 2, "per_device_train_batch_size": 5,
            "gradient_accumulation_steps": 2, "learning_rate": 1e-2, "report_to": [], "disable_tqdm": True,
            "use_cpu": True, "save_strategy": "no", **settings,
        }
    )  # fmt: skip
    return SparseDPTrainer(
        model=model, args=args, train_dataset=Texts(), eval_dataset=Texts(), callbacks=callbacks,
        data_collator=hf.default_data_collator, privacy=PrivacyArguments(**{**PRIVACY, **(privacy or {})}),
        compute_metrics=lambda found: {"accuracy": float((found.predictions.argmax(1) == found.label_ids).mean())},
    )  # fmt: skip


def test_trainer_takes_the_run_of_fit(tmp_path):
    trainer = trainer_of(bert(), tmp_path, max_grad_norm=0.5)
    done = trainer.train()
    assert done.metrics["epsilon"] <= 8.0
    assert trainer.result.plan.total_steps == done.global_step == 8

    def loss(model, rows):
        logits = model(input_ids=rows["input_ids"], attention_mask=rows["attention_mask"]).logits
        return F.cross_entropy(logits, rows["labels"], reduction="none")

    plain = bert()
    fit(
        plain.train(), Texts(), PerExampleLoss(loss), epochs=2, batch_size=10, progress=False, max_grad_norm=0.5,
        optimizer=lambda p: torch.optim.AdamW(p, lr=1e-2, weight_decay=0.0),
        lr_scheduler=lambda o, steps: torch.optim.lr_scheduler.LambdaLR(o, lambda step: (steps - step) / steps),
        **PRIVACY,
    )  # fmt: skip
    assert torch.allclose(weights(trainer.model), weights(plain), atol=1e-6)


class Seen(hf.TrainerCallback):
    """Counts the events that it hears."""

    def __init__(self):
        self.events, self.logs = [], []

    def __getattribute__(self, name):
        if name in ("on_epoch_begin", "on_epoch_end", "on_step_end", "on_evaluate", "on_save"):
            return lambda *_, **__: self.events.append(name)
        return super().__getattribute__(name)

    def on_log(self, args, state, control, logs=None, **kwargs):
        self.logs.append(logs)


def test_strategies_and_callbacks_are_heeded(tmp_path):
    seen = Seen()
    trainer = trainer_of(
        bert(), tmp_path, callbacks=[seen], eval_strategy="epoch", save_strategy="steps", save_steps=2,
        save_total_limit=2, logging_steps=4,
    )  # fmt: skip
    trainer.train()
    count = {name: seen.events.count(name) for name in set(seen.events)}
    assert count["on_step_end"] == 8
    assert count["on_epoch_begin"] == count["on_epoch_end"] == count["on_evaluate"] == 2
    assert count["on_save"] == 4
    assert sorted(path.name for path in tmp_path.glob("checkpoint-*")) == ["checkpoint-6", "checkpoint-8"]
    state = json.loads((tmp_path / "checkpoint-8" / "trainer_state.json").read_text())
    assert state["global_step"] == 8
    saved = type(bert()).from_pretrained(tmp_path / "checkpoint-8")
    assert torch.equal(weights(saved), weights(trainer.model.cpu()))
    assert ["epsilon" in log for log in seen.logs if "learning_rate" in log] == [True, True]
    assert sum("eval_accuracy" in log for log in seen.logs) == 2
    assert not any("loss" in log for log in seen.logs)


def test_what_is_best_on_held_out_data_is_saved_and_may_stop_the_training(tmp_path):
    losses = iter([1.0, 0.5, 0.7, 0.6, 0.1, 0.0, 0.0, 0.0])
    early = hf.EarlyStoppingCallback(early_stopping_patience=2)
    trainer = trainer_of(
        bert(), tmp_path, callbacks=[early], eval_strategy="steps", eval_steps=1, save_strategy="best",
        metric_for_best_model="watched", greater_is_better=False,
    )  # fmt: skip
    trainer.compute_metrics = lambda found: {"watched": next(losses)}
    assert trainer.train().global_step == 4
    assert sorted(path.name for path in tmp_path.glob("checkpoint-*")) == ["checkpoint-1", "checkpoint-2"]
    assert (trainer.state.best_metric, trainer.state.best_global_step) == (0.5, 2)


def test_resumed_run_has_the_weights_of_an_uninterrupted_one(tmp_path):
    class Break(hf.TrainerCallback):
        def on_epoch_end(self, args, state, control, **kwargs):
            raise KeyboardInterrupt

    whole = trainer_of(bert(), tmp_path / "a", privacy={"run_dir": tmp_path / "whole"})
    whole.train()
    cut = trainer_of(bert(), tmp_path / "b", privacy={"run_dir": tmp_path / "cut"}, callbacks=[Break()])
    with pytest.raises(KeyboardInterrupt):
        cut.train()
    del cut
    again = trainer_of(bert(), tmp_path / "b", privacy={"run_dir": tmp_path / "cut"})
    again.train(resume_from_checkpoint=True)
    assert torch.equal(weights(again.model), weights(whole.model))
    with pytest.raises(SparseDPError, match="hold no ledger"):
        again.train(resume_from_checkpoint=str(tmp_path))


def test_every_setting_is_heeded_or_refused_or_at_its_default():
    unknown = {field.name for field in dataclasses.fields(hf.TrainingArguments)} - set(SETTINGS)
    assert unknown <= {"_n_gpu", "mp_parameters", "jit_mode_eval"}


REFUSED = {
    "max_steps": 7, "num_train_epochs": 2.5, "label_smoothing_factor": 0.1, "bf16": True, "optim": "adafactor",
    "neftune_noise_alpha": 5.0, "load_best_model_at_end": True, "dataloader_drop_last": True, "torch_compile": True,
    "auto_find_batch_size": True, "max_grad_norm": 0.0,
    "push_to_hub": True, "lr_scheduler_type": "reduce_lr_on_plateau",
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_setting_that_cannot_be_heeded_is_refused_before_anything_is_spent(name, tmp_path):
    trainer = trainer_of(bert(), tmp_path / "hub", privacy={"run_dir": tmp_path / "run"})
    setattr(trainer.args, name, REFUSED[name])
    with pytest.raises(SparseDPError, match=name):
        trainer.train()
    assert trainer.result is None
    assert not (tmp_path / "run").exists()


def test_overridden_loss_and_given_schedule_are_refused(tmp_path):
    class Own(SparseDPTrainer):
        def compute_loss(self, *args, **kwargs):
            return None

    trainer = trainer_of(bert(), tmp_path)
    trainer.__class__ = Own
    with pytest.raises(SparseDPError, match="compute_loss"):
        trainer.train()
    trainer = trainer_of(bert(), tmp_path)
    trainer.optimizer = torch.optim.SGD(trainer.model.parameters(), lr=0.1)
    trainer.lr_scheduler = torch.optim.lr_scheduler.StepLR(trainer.optimizer, 1)
    with pytest.raises(SparseDPError, match="lr_scheduler"):
        trainer.train()


SIZES = {
    "vocab_size": 50, "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16
}  # fmt: skip
T5 = {"vocab_size": 50, "d_model": 16, "d_kv": 8, "d_ff": 16, "num_layers": 1, "num_heads": 2}
GPT2 = {"vocab_size": 50, "n_embd": 16, "n_layer": 1, "n_head": 2}
WORDS = torch.randint(2, 50, (4, LENGTH), generator=torch.Generator().manual_seed(1))
NEXT = WORDS.clone().index_fill_(1, torch.tensor([1]), -100)
FLOATS = torch.rand(4, generator=torch.Generator().manual_seed(2))
HEADS = {
    "classes": ("BertForSequenceClassification", {**SIZES, "num_labels": 3}, {"labels": torch.tensor([0, 2, 1, 1])}),
    "regression": ("BertForSequenceClassification", {**SIZES, "num_labels": 1}, {"labels": FLOATS}),
    "several labels": (
        "BertForSequenceClassification", {**SIZES, "num_labels": 2}, {"labels": FLOATS[:, None].round().repeat(1, 2)},
    ),
    "tokens": ("BertForTokenClassification", {**SIZES, "num_labels": 50}, {"labels": NEXT}),
    "masked": ("BertForMaskedLM", SIZES, {"labels": NEXT}),
    "gpt2": ("GPT2LMHeadModel", GPT2, {"labels": NEXT}),
    "llama": ("LlamaForCausalLM", SIZES, {"labels": NEXT}),
    "t5": ("T5ForConditionalGeneration", {**T5, "decoder_start_token_id": 0}, {"labels": NEXT}),
    "spans": (
        "BertForQuestionAnswering", SIZES, {"start_positions": torch.arange(4), "end_positions": torch.arange(4) + 1},
    ),
}  # fmt: skip


def head(kind: str) -> tuple[nn.Module, dict]:
    name, sizes, targets = HEADS[kind]
    model = getattr(hf, name)
    torch.manual_seed(0)
    return model(model.config_class(**sizes)).eval(), {"input_ids": WORDS, **targets}


@pytest.mark.parametrize("kind", HEADS)
def test_the_loss_of_an_example_is_what_the_head_gives_for_it_alone(kind):
    model, batch = head(kind)
    alone = [model(**{key: values[i : i + 1] for key, values in batch.items()}).loss for i in range(4)]
    for found in (LOSS(model, batch), isolated_losses(model, LOSS.loss, batch)):
        torch.testing.assert_close(found, torch.stack(alone))


def test_a_model_without_a_loss_and_one_that_mixes_examples_are_refused(tmp_path):
    model, batch = head("classes")
    with pytest.raises(ModelError, match=r"gave no loss for a batch with \['input_ids'\]"):
        LOSS(model, {"input_ids": batch["input_ids"]})

    class Mixing(hf.BertForSequenceClassification):
        def forward(self, **given):
            found = super().forward(**given)
            found.loss = F.cross_entropy(found.logits @ found.logits.T, torch.arange(len(found.logits)))
            return found

    with pytest.raises(SparseDPError, match="do not see each other"):
        trainer_of(Mixing(bert().config), tmp_path).train()
