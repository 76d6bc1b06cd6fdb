"""Hugging Face `transformers`: its Trainer, trained privately."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from transformers import Trainer as HubTrainer
from transformers import get_scheduler
from transformers.trainer_utils import TrainOutput

from sparsedp.batch import PerExampleLoss, Rows
from sparsedp.errors import SparseDPError
from sparsedp.integrations.transformers_losses import loss_for
from sparsedp.integrations.transformers_settings import refuse_unheeded
from sparsedp.loading import DataConfig
from sparsedp.results import Result
from sparsedp.training.fit import fit


class SparseDPTrainer(HubTrainer):  # type: ignore[misc]
    """`transformers.Trainer` whose `train` is a private run; evaluation, prediction and saving are as they were.

    Args:
        args: as in `transformers.Trainer`; epochs, batch size, accumulation, learning rate, weight decay and schedule
            are taken from its `args`.
        privacy: further arguments of `sparsedp.fit`: epsilon, method, units, out, seed, ...
        kwargs: as in `transformers.Trainer`.

    **Privacy.** That of `fit`. Training losses are not logged, as they are not private; `result` says what was spent.
    **Edge cases.** Pad to one fixed length: padding to the longest of a batch mixes samples, and is refused. The
    optimizer is AdamW, or the one given in `optimizers`. The loss is the one the model's own head would average
    (`loss_for`). What only transformers' own loop would heed (max_steps, bf16, an overridden compute_loss, ...) is
    refused before anything is spent.
    """

    def __init__(self, *args: Any, privacy: Mapping[str, Any], **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.privacy = dict(privacy)
        self.result: Result | None = None

    def train(self, resume_from_checkpoint: object = None, **kwargs: Any) -> TrainOutput:
        """Train privately; `privacy={"run_dir": ..., "resume": True}` goes on with a run."""
        if resume_from_checkpoint:
            raise SparseDPError(
                "resume_from_checkpoint: checkpoints of transformers hold no ledger; resume with "
                'privacy={"run_dir": RUN, "resume": True}'
            )
        refuse_unheeded(self, self.privacy)
        args = self.args
        self.result = fit(
            self.model,
            self.train_dataset,
            PerExampleLoss(loss_for(self.model)),
            epochs=int(args.num_train_epochs),
            batch_size=args.train_batch_size * args.gradient_accumulation_steps,
            optimizer=self.optimizer or self._adamw,
            lr_scheduler=self._schedule(),
            data=DataConfig(collate_fn=lambda items: dict(self.data_collator(items))),
            progress=not args.disable_tqdm,
            **self.privacy,
        )
        self.state.global_step = self.result.plan.total_steps
        self.state.epoch = float(len(self.result.history))
        spent = {"epsilon": self.result.epsilon, "delta": self.result.delta}
        return TrainOutput(self.state.global_step, float("nan"), spent)

    def _adamw(self, parameters: Any) -> Optimizer:
        args = self.args
        return torch.optim.AdamW(
            parameters,
            lr=args.learning_rate,
            weight_decay=args.weight_decay,
            betas=(args.adam_beta1, args.adam_beta2),
            eps=args.adam_epsilon,
        )

    def _schedule(self) -> Callable[[Optimizer, int], LRScheduler]:
        def make(optimizer: Optimizer, steps: int) -> LRScheduler:
            made: LRScheduler = get_scheduler(
                self.args.lr_scheduler_type,
                optimizer,
                self.args.get_warmup_steps(steps),
                steps,
                scheduler_specific_kwargs=self.args.lr_scheduler_kwargs,
            )
            return made

        return make


def loss_per_sample(model: nn.Module, rows: Rows) -> Tensor:
    """`loss_for` of the model at hand, for `fit(model, data, PerExampleLoss(loss_per_sample))`."""
    return loss_for(model)(model, rows)
