"""What transformers' own loop would heed and a private run does not: refused, each with what to do instead."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from transformers import Trainer

from sparsedp.errors import SparseDPError

ARGUMENTS: dict[str, tuple[tuple[object, ...], str]] = {
    "max_steps": ((-1,), "set num_train_epochs, which the plan is made for"),
    "label_smoothing_factor": ((0.0,), "call sparsedp.fit with a PerExampleLoss loss that smooths labels"),
    "max_grad_norm": (
        (1.0,),
        'each row\'s gradient is clipped: leave it out, and give privacy={"max_grad_norm": ...}',
    ),
    "bf16": ((False,), "give the model in that dtype, or put torch.autocast into its forward"),
    "fp16": ((False,), "give the model in that dtype, or put torch.autocast into its forward"),
    "optim": (
        ("adamw_torch", "adamw_torch_fused"),
        "give the optimizer itself: optimizers=(optimizer, None)",
    ),
    "neftune_noise_alpha": ((None,), "draw the noise in the model's forward"),
    "load_best_model_at_end": ((False,), 'weights are averaged instead by privacy={"ema_decay": ...}'),
}
"""Settings in `TrainingArguments`: the values that say what a private run does, and what to do for others."""

ATTRIBUTES = {
    "compute_loss_func": "call sparsedp.fit with PerExampleLoss(lambda model, rows: ...)",
    "lr_scheduler": "give lr_scheduler_type and warmup_steps in TrainingArguments, and optimizers=(optimizer, None)",
    "optimizer_cls_and_kwargs": "give the optimizer itself: optimizers=(optimizer, None)",
}
"""What may be given to the Trainer besides."""

METHODS = {
    "compute_loss": "call sparsedp.fit with PerExampleLoss(lambda model, rows: ...)",
    "training_step": "call sparsedp.fit with PerExampleLoss(lambda model, rows: ...)",
    "get_train_dataloader": "batches are drawn at random: change train_dataset or data_collator",
    "create_optimizer": "give the optimizer itself: optimizers=(optimizer, None)",
    "create_scheduler": "give lr_scheduler_type and warmup_steps in TrainingArguments",
}
"""Methods that transformers' loop calls."""

TAKEN = ("epochs", "batch_size", "optimizer", "scheduler", "collate", "progress")
"""Arguments of `fit` that come from `TrainingArguments` or the Trainer."""


def refuse_unheeded(trainer: Trainer, privacy: dict[str, Any]) -> None:
    """Refuse settings that a private run would pass over in silence.

    Raises:
        SparseDPError: there are some, and what to do instead.
    """
    found = [*_of_arguments(trainer.args), *_of_the_trainer(trainer)]
    found += [
        f"privacy[{name!r}]: it comes from TrainingArguments or the Trainer"
        for name in TAKEN
        if name in privacy
    ]
    if found:
        raise SparseDPError(f"SparseDPTrainer does not heed {'. '.join(found)}")


def _of_arguments(args: Any) -> Iterator[str]:
    for name, (usual, remedy) in ARGUMENTS.items():
        value = getattr(args, name, usual[0])
        if getattr(value, "value", value) not in usual:
            yield f"{name}={getattr(value, 'value', value)!r}: {remedy}"
    epochs = float(args.num_train_epochs)
    if not epochs.is_integer():
        yield f"part of an epoch (num_train_epochs={epochs}): give a whole number of epochs"


def _of_the_trainer(trainer: Trainer) -> Iterator[str]:
    for name, remedy in ATTRIBUTES.items():
        if getattr(trainer, name, None) is not None:
            yield f"{name}: {remedy}"
    for name, remedy in METHODS.items():
        if getattr(type(trainer), name, None) is not getattr(Trainer, name, None):
            yield f"{type(trainer).__name__}.{name}: {remedy}"
