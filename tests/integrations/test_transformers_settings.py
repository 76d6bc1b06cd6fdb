"""What only transformers' own loop would heed is refused, with what to do instead, before anything is spent."""

from __future__ import annotations

import pytest
import torch
from test_frameworks import Texts, bert, hub_trainer, no_datasets_package  # noqa: F401
from torch.utils.data import Dataset

from sparsedp import SparseDPError

pytestmark = pytest.mark.filterwarnings("default")
pytest.importorskip("transformers")

UNHEEDED = {
    "max_steps": (7, "num_train_epochs"),
    "num_train_epochs": (2.5, "whole number of epochs"),
    "label_smoothing_factor": (0.1, "PerExampleLoss"),
    "max_grad_norm": (0.5, "max_grad_norm"),
    "bf16": (True, "autocast"),
    "fp16": (True, "autocast"),
    "optim": ("adafactor", r"optimizers=\(optimizer, None\)"),
    "neftune_noise_alpha": (5.0, "forward"),
    "load_best_model_at_end": (True, "ema_decay"),
}


@pytest.mark.parametrize("name", UNHEEDED)
def test_an_argument_that_would_be_passed_over_is_refused(name, tmp_path):
    value, remedy = UNHEEDED[name]
    trainer = hub_trainer(bert(), tmp_path / "hub", out=tmp_path / "run")
    setattr(trainer.args, name, value)
    with pytest.raises(SparseDPError, match=f"does not heed .*{name}={value!r}.*: .*{remedy}"):
        trainer.train()
    assert trainer.result is None
    assert not (tmp_path / "run").exists()


def test_all_of_them_are_named_at_once(tmp_path):
    trainer = hub_trainer(bert(), tmp_path)
    trainer.args.max_steps, trainer.args.max_grad_norm = 7, 0.5
    with pytest.raises(SparseDPError, match=r"max_steps=7.*\. max_grad_norm=0.5"):
        trainer.train()


@pytest.mark.parametrize("name", ["compute_loss_func", "optimizer_cls_and_kwargs"])
def test_a_loss_or_a_rule_given_to_the_trainer_is_refused(name, tmp_path):
    trainer = hub_trainer(bert(), tmp_path)
    setattr(trainer, name, (torch.optim.SGD, {}))
    with pytest.raises(SparseDPError, match=f"does not heed {name}: "):
        trainer.train()


def test_a_scheduler_beside_the_optimizer_is_refused(tmp_path):
    model = bert()
    trainer = hub_trainer(model, tmp_path)
    trainer.optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    trainer.lr_scheduler = torch.optim.lr_scheduler.StepLR(trainer.optimizer, 1)
    with pytest.raises(SparseDPError, match="lr_scheduler: give lr_scheduler_type"):
        trainer.train()
    trainer.lr_scheduler = None
    assert trainer.train().global_step == 8


@pytest.mark.parametrize(
    "name", ["compute_loss", "training_step", "get_train_dataloader", "create_optimizer"]
)
def test_a_method_of_the_loop_that_is_not_run_is_refused(name, tmp_path):
    trainer = hub_trainer(bert(), tmp_path)
    trainer.__class__ = type("Mine", (type(trainer),), {name: lambda self, *args, **kwargs: None})
    with pytest.raises(SparseDPError, match=f"does not heed Mine.{name}: "):
        trainer.train()


@pytest.mark.parametrize("name", ["epochs", "batch_size", "optimizer"])
def test_what_the_arguments_say_is_not_said_again(name, tmp_path):
    with pytest.raises(SparseDPError, match=f"privacy.'{name}'.: it comes from TrainingArguments"):
        hub_trainer(bert(), tmp_path, **{name: 1}).train()


def test_the_betas_of_adam_are_heeded(tmp_path):
    trainer = hub_trainer(bert(), tmp_path)
    trainer.args.adam_beta1, trainer.args.adam_beta2, trainer.args.adam_epsilon = 0.5, 0.6, 1e-3
    (group,) = trainer._adamw(trainer.model.parameters()).param_groups
    assert (group["betas"], group["eps"]) == ((0.5, 0.6), 1e-3)


class Unlabelled(Dataset):
    """Sentences that nobody has labelled."""

    def __len__(self):
        return len(Texts())

    def __getitem__(self, i):
        return {key: value for key, value in Texts()[i].items() if key != "labels"}


def test_rows_without_labels_are_told(tmp_path):
    trainer = hub_trainer(bert(), tmp_path)
    trainer.train_dataset = Unlabelled()
    with pytest.raises(SparseDPError, match="expected 'labels'"):
        trainer.train()
