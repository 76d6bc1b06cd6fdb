"""Lightning: a `LightningModule` of your own, trained privately by `lightning.Trainer.fit`."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import lightning
from torch import Tensor
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from sparsedp.batch import Batch, PerExampleLoss
from sparsedp.errors import SparseDPError
from sparsedp.integrations._per_example import check_mean, one_by_one
from sparsedp.private_training import make_private
from sparsedp.results import Result

logger = logging.getLogger("sparsedp")
_TOLD: set[type] = set()
"""Modules whose users were told that logs are dropped."""


@contextmanager
def _replaced(module: Any, **values: Any) -> Iterator[None]:
    """Give a module attributes of its own for a while."""
    for name, value in values.items():
        object.__setattr__(module, name, value)
    try:
        yield
    finally:
        for name in values:
            object.__delattr__(module, name)


def _passed_on(name: str) -> Callable[..., Any]:
    """A hook or step of the user's module, which logs through the module that the trainer knows."""

    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        with _replaced(self.module, log=self.log, log_dict=self.log_dict):
            return getattr(self.module, name)(*args, **kwargs)

    return call


class PrivateModule(lightning.LightningModule):  # type: ignore[misc]
    """Your `LightningModule`, for `lightning.Trainer(max_epochs=...).fit(PrivateModule(module, ...))`.

    Your `training_step` is called by the engine, one example at a time, and gives the loss of that example.
    `configure_optimizers`, `validation_step`, `test_step`, `predict_step` and the hooks around validation are yours
    as they stand.

    Attributes:
        private: the run: `epsilon()`, `plan`, `history`.

    Args:
        module: trained in place.
        train_dataloader: a `DataLoader` of the training data; or `datamodule`, of which all loaders are taken.
        datamodule: a `LightningDataModule`.
        privacy: further arguments of `make_private`: epsilon, epochs, delta, max_grad_norm, method, run_dir, ...;
            `epochs` must be the trainer's `max_epochs`.

    Formal guarantees: That of `make_private`. What `training_step` logs by `self.log` is dropped, and that is said
    once: it would be a number of one private example.
    Edge cases: Refused: several optimizers, schedules that watch a metric, `accumulate_grad_batches`,
    `gradient_clip_val`, another `max_epochs` than was planned, mixed precision, `ckpt_path` (a run resumes from its
    `run_dir`).
    """

    def __init__(
        self,
        module: lightning.LightningModule,
        train_dataloader: DataLoader[Any] | None = None,
        *,
        datamodule: lightning.LightningDataModule | None = None,
        **privacy: Any,
    ) -> None:
        super().__init__()
        if not isinstance(module, lightning.LightningModule):
            raise SparseDPError(
                f"module: got {type(module).__name__}, expected a LightningModule with training_step and "
                "configure_optimizers; for a plain module use make_private"
            )
        for name in {"criterion", "loader", "model", "optimizer"} & set(privacy):
            raise SparseDPError(f"{name}: it comes from the module or the datamodule; leave it out")
        if (train_dataloader is None) == (datamodule is None):
            raise SparseDPError("give either train_dataloader or datamodule")
        if datamodule is not None:
            datamodule.prepare_data()
            datamodule.setup("fit")
            train_dataloader = datamodule.train_dataloader()
        self.automatic_optimization = False
        self.module, self._datamodule = module, datamodule
        optimizer, self._scheduler, self._interval = _configured(module.configure_optimizers())
        if isinstance(train_dataloader, DataLoader):
            check_mean(module, _loss_of_training_step, train_dataloader, "training_step")
        self.private = make_private(
            module, optimizer, train_dataloader, PerExampleLoss(one_by_one(_loss_of_training_step)), **privacy
        )

    @property
    def result(self) -> Result:
        """What the run gave, once it is finished."""
        return self.private.result

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The output of your module."""
        return self.module(*args, **kwargs)

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """That of your module, so that a checkpoint loads into it."""
        return self.module.state_dict(*args, **kwargs)

    def load_state_dict(self, state_dict: Mapping[str, Any], *args: Any, **kwargs: Any) -> Any:
        """Into your module."""
        return self.module.load_state_dict(state_dict, *args, **kwargs)

    def on_fit_start(self) -> None:
        """Refuse settings of the trainer that a private run would pass over in silence."""
        trainer, epochs = self.trainer, len(self.private.plan.epoch_ends())
        found = []
        if trainer.max_epochs != epochs:
            found.append(f"max_epochs={trainer.max_epochs}: the plan has {epochs} epochs; give both the same")
        if trainer.max_steps not in (-1, None):
            found.append(f"max_steps={trainer.max_steps}: the plan is made for whole epochs")
        if trainer.accumulate_grad_batches != 1:
            found.append("accumulate_grad_batches: give the loader the batch size of a step")
        if trainer.gradient_clip_val:
            found.append("gradient_clip_val: each unit's gradient is clipped to max_grad_norm")
        if trainer.world_size > 1:
            found.append("several devices: a run of several processes is torchrun with sparsedp.fit")
        if trainer.overfit_batches or trainer.limit_train_batches not in (None, 1.0):
            found.append("overfit_batches, limit_train_batches: every planned batch is taken once")
        if trainer.precision != "32-true":
            found.append(
                f"precision={trainer.precision}: give the module in that dtype, or put autocast into its forward"
            )
        if trainer.ckpt_path is not None:
            found.append("ckpt_path: checkpoints hold no ledger; give PrivateModule run_dir and resume=True")
        if found:
            raise SparseDPError(f"PrivateModule does not heed {'. '.join(found)}")
        done = trainer.fit_loop.epoch_progress.current
        done.ready = done.started = done.processed = done.completed = self.private.loader.epoch

    def train_dataloader(self) -> Any:
        """Private batches, an epoch at a time."""
        return self.private.loader

    def val_dataloader(self) -> Any:
        """That of the datamodule, or of your module."""
        owner = self.module if self._datamodule is None else self._datamodule
        return owner.val_dataloader()

    def configure_optimizers(self) -> None:
        """None: the private step is taken in `training_step`."""

    def transfer_batch_to_device(self, batch: Any, device: Any, dataloader_idx: int) -> Any:
        """Training examples are on the model's device already, and must stay the ones that were given."""
        return batch if self.training else super().transfer_batch_to_device(batch, device, dataloader_idx)

    def training_step(self, batch: Any, batch_idx: int) -> None:
        """One private step."""
        run, steps = self.private, self.trainer.fit_loop.epoch_loop.manual_optimization.optim_step_progress
        steps.increment_ready()
        run.optimizer.zero_grad()
        run.criterion(run.model, batch).backward()
        run.optimizer.step()
        steps.increment_completed()  # the trainer's global_step, which callbacks and loggers go by
        if self._interval == "step" and self._scheduler is not None:
            self._scheduler.step()

    def on_train_epoch_end(self) -> None:
        """Move a schedule by epochs and log epsilon; then your own hook."""
        if self._interval == "epoch" and self._scheduler is not None:
            self._scheduler.step()
        self.log("epsilon", self.private.epsilon(), prog_bar=True, batch_size=1)
        _passed_on("on_train_epoch_end")(self)

    on_validation_epoch_start = _passed_on("on_validation_epoch_start")
    validation_step = _passed_on("validation_step")
    on_validation_epoch_end = _passed_on("on_validation_epoch_end")
    test_step = _passed_on("test_step")

    def predict_step(self, *args: Any, **kwargs: Any) -> Any:
        """Your step."""
        return self.module.predict_step(*args, **kwargs)


def _loss_of_training_step(module: Any, batch: Batch) -> Tensor:
    def drop(*_: Any, **__: Any) -> None:
        if type(module) not in _TOLD:
            _TOLD.add(type(module))
            logger.info(
                "what %s.training_step logs is dropped: it is a number of private examples; validation_step may log",
                type(module).__name__,
            )

    with _replaced(module, log=drop, log_dict=drop):
        found = module.training_step(batch, 0)
    loss = found.get("loss") if isinstance(found, Mapping) else found
    if not isinstance(loss, Tensor) or loss.numel() != 1:
        raise SparseDPError(
            f"training_step: got {type(loss).__name__}, expected the loss of the batch, one number as a tensor, or a "
            'mapping with it under "loss"'
        )
    return loss


def _configured(found: Any) -> tuple[Optimizer, Any, str]:
    """The optimizer, the schedule and what moves it, of what `configure_optimizers` gives."""
    optimizer, scheduler = found, None
    if isinstance(found, Mapping):
        optimizer, scheduler = found.get("optimizer"), found.get("lr_scheduler")
    elif isinstance(found, (tuple, list)):
        optimizers, schedulers = (
            found if len(found) == 2 and isinstance(found[0], (tuple, list)) else (found, [])
        )
        if len(optimizers) != 1 or len(schedulers) > 1:
            raise SparseDPError(
                f"configure_optimizers: got {len(optimizers)} optimizers and {len(schedulers)} schedules, expected "
                "one optimizer and at most one schedule"
            )
        optimizer, scheduler = optimizers[0], next(iter(schedulers), None)
    if not isinstance(optimizer, Optimizer):
        raise SparseDPError(
            f"configure_optimizers: got {type(optimizer).__name__}, expected a torch.optim optimizer, as there is "
            "nothing to train without one"
        )
    settings = scheduler if isinstance(scheduler, Mapping) else {"scheduler": scheduler}
    watched = settings.get("monitor") or type(settings.get("scheduler")).__name__ == "ReduceLROnPlateau"
    interval = settings.get("interval", "epoch")
    if watched or settings.get("frequency", 1) != 1 or interval not in ("epoch", "step"):
        raise SparseDPError(
            "configure_optimizers: got a schedule that watches a metric or moves at a frequency of its own, expected "
            'one that moves every "step" or every "epoch"'
        )
    return optimizer, settings.get("scheduler"), interval
