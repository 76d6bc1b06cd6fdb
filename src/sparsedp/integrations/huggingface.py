"""Hugging Face `transformers`: its Trainer, trained privately."""

from __future__ import annotations

import shutil
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import DataLoader
from transformers import Trainer as HubTrainer
from transformers import get_scheduler
from transformers.trainer_callback import ExportableState, TrainerState
from transformers.trainer_utils import TrainOutput

from sparsedp.batch import Batch, PerExampleLoss
from sparsedp.errors import ModelError, SparseDPError
from sparsedp.evaluation import evaluation_mode
from sparsedp.integrations._per_example import check_mean, one_by_one
from sparsedp.loading import DataConfig
from sparsedp.methods import Method
from sparsedp.methods.auto import AUTO_METHOD
from sparsedp.private_training import PrivateTraining, make_private
from sparsedp.results import Result


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class PrivacyArguments:
    """What privacy needs beside `TrainingArguments`.

    The clip norm of each unit is `TrainingArguments.max_grad_norm`; the expected batch size is
    `per_device_train_batch_size * gradient_accumulation_steps`.

    Attributes:
        data: as for `make_private`; its `max_physical_batch` is `per_device_train_batch_size` if not given.

    The others are those of `make_private`; `run_dir` is what a resume needs.
    """

    epsilon: float | None = None
    noise_multiplier: float | None = None
    delta: float | None = None
    method: str | Method = AUTO_METHOD
    accountant: str | None = None
    unit_ids: Any = None
    data: DataConfig = field(default_factory=DataConfig)
    run_dir: Path | str | None = None
    seed: int | None = None
    ema_decay: float | None = None


class SparseDPTrainer(HubTrainer):  # type: ignore[misc]
    """`transformers.Trainer` whose `train` is a private run.

    >>> trainer = SparseDPTrainer(model, args, train_dataset=train, privacy=PrivacyArguments())  # doctest: +SKIP

    Callbacks are called, and evaluation, logging and saving happen, when `TrainingArguments` say so. A checkpoint
    of transformers holds the model; the run directory holds what a resume needs. The optimizer is AdamW as
    `TrainingArguments` set it, or the one given in `optimizers`. The loss is the one that the model's own head
    would average (`loss_of_head`).

    Args:
        args: as in `transformers.Trainer`. Each setting is either heeded or refused by name before anything is spent
            (`SETTINGS`).
        privacy: a `PrivacyArguments`.
        kwargs: as in `transformers.Trainer`.

    Formal guarantees: That of `make_private`. Training losses are not computed, so logs hold rate, epsilon and
    evaluation.
    Edge cases: Pad to one fixed length; padding to the longest of a batch mixes examples, and is refused. `train`
    gives `training_loss=nan`. A callback may stop the training; the guarantee is then that of the whole plan. A
    callback cannot end an epoch early: epochs are planned.
    """

    state: Any
    control: Any
    optimizer: Any

    def __init__(self, *args: Any, privacy: PrivacyArguments, **kwargs: Any) -> None:
        if not isinstance(privacy, PrivacyArguments):
            raise SparseDPError(
                f"privacy: got {type(privacy).__name__}, expected PrivacyArguments(epsilon=..., ...) of "
                "sparsedp.integrations.huggingface"
            )
        super().__init__(*args, **kwargs)
        self.privacy = privacy
        self.result: Result | None = None

    def train(
        self,
        resume_from_checkpoint: bool | str | None = None,
        ignore_keys_for_eval: list[str] | None = None,
        **kwargs: Any,
    ) -> TrainOutput:
        """Train privately.

        Args:
            resume_from_checkpoint: True goes on with the run in `PrivacyArguments.run_dir`, whose ledger says what
                was spent. A folder is refused: checkpoints of transformers hold no ledger.
            ignore_keys_for_eval: as in `transformers.Trainer`.
            kwargs: refused.
        """
        resume = self._resumes(resume_from_checkpoint, kwargs)
        if found := list(_unsupported(self)):
            raise SparseDPError(f"SparseDPTrainer does not heed {'. '.join(found)}")
        assert self.model is not None
        self.model.train()
        if self.optimizer is None:
            args = self.args
            self.optimizer = torch.optim.AdamW(
                [p for p in self.model.parameters() if p.requires_grad],
                lr=args.learning_rate,
                weight_decay=args.weight_decay,
                betas=(args.adam_beta1, args.adam_beta2),
                eps=args.adam_epsilon,
            )
        optimizer: Optimizer = self.optimizer
        rates = [group["lr"] for group in optimizer.param_groups]
        private = self._make_private(optimizer, resume)
        schedule = self._create_schedule(optimizer, rates, private)
        self._begin(private, schedule)
        ends = private.plan.epoch_ends()
        for _ in range(private.loader.epoch, len(ends)):
            self.control = self.callback_handler.on_epoch_begin(self.args, self.state, self.control)
            for batch in private.loader:
                self.control = self.callback_handler.on_step_begin(self.args, self.state, self.control)
                private.optimizer.zero_grad()
                private.criterion(private.model, batch).backward()
                private.optimizer.step()
                schedule.step()
                self.state.global_step = private.step
                self.state.epoch = _epochs_done(private.step, ends)
                self.control = self.callback_handler.on_step_end(self.args, self.state, self.control)
                self._log_evaluate_save(private, ignore_keys_for_eval)
                if self.control.should_training_stop:
                    break
            self.state.epoch = _epochs_done(private.step, ends)
            self.control = self.callback_handler.on_epoch_end(self.args, self.state, self.control)
            self._log_evaluate_save(private, ignore_keys_for_eval)
            if self.control.should_training_stop or private.step >= private.plan.total_steps:
                break
        return self._end(private)

    def _resumes(self, given: bool | str | None, others: Mapping[str, Any]) -> bool:
        if others:
            raise SparseDPError(f"train: got {', '.join(others)}, which a private run does not heed")
        if isinstance(given, str):
            raise SparseDPError(
                "resume_from_checkpoint: got a folder, but checkpoints of transformers hold no ledger; give the run "
                "directory as PrivacyArguments(run_dir=...) and call train(resume_from_checkpoint=True)"
            )
        if given and self.privacy.run_dir is None:
            raise SparseDPError(
                "resume_from_checkpoint: there is no run to go on with; the run must have been started with "
                "PrivacyArguments(run_dir=...)"
            )
        return bool(given)

    def _create_schedule(
        self, optimizer: Optimizer, rates: list[float], private: PrivateTraining
    ) -> LRScheduler:
        """The schedule of `TrainingArguments` over the planned steps, brought to where the run stands."""
        for group, rate in zip(optimizer.param_groups, rates, strict=True):
            group["lr"] = rate
        steps = private.plan.total_steps
        made: LRScheduler = get_scheduler(
            self.args.lr_scheduler_type,
            optimizer,
            self.args.get_warmup_steps(steps),
            steps,
            scheduler_specific_kwargs=self.args.lr_scheduler_kwargs,
        )
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the optimizer's own steps were taken in an earlier process
            for _ in range(private.step):
                made.step()
        return made

    @property
    def _batch_size(self) -> int:
        size: int = self.args.train_batch_size * self.args.gradient_accumulation_steps
        return size

    def _make_private(self, optimizer: Optimizer, resume: bool) -> PrivateTraining:
        args, asked = self.args, self.privacy
        dataset, collator = self.train_dataset, self.data_collator
        if type(dataset).__module__.startswith("datasets."):
            dataset = self._remove_unused_columns(dataset, description="training")
        loader: DataLoader[Any] = DataLoader(
            dataset,
            batch_size=self._batch_size,
            shuffle=True,
            num_workers=args.dataloader_num_workers,
            collate_fn=lambda items: dict(collator(items)),
        )
        check_mean(self.model, loss_of_head, loader, type(self.model).__name__)
        others = {entry.name: getattr(asked, entry.name) for entry in fields(asked)}
        if asked.data.max_physical_batch is None and args.gradient_accumulation_steps > 1:
            others["data"] = replace(asked.data, max_physical_batch=args.train_batch_size)
        return make_private(
            self.model,
            optimizer,
            loader,
            LOSS,
            epochs=int(args.num_train_epochs),
            max_grad_norm=args.max_grad_norm,
            resume=resume,
            progress=not args.disable_tqdm,
            **others,
        )

    def _begin(self, private: PrivateTraining, schedule: LRScheduler) -> None:
        handler, args = self.callback_handler, self.args
        exported = [cb for cb in (*handler.callbacks, self.control) if isinstance(cb, ExportableState)]
        self.state = TrainerState(stateful_callbacks=exported)
        self.state.compute_steps(args, private.plan.total_steps)
        self.state.max_steps = private.plan.total_steps
        self.state.num_train_epochs = int(args.num_train_epochs)
        self.state.train_batch_size = self._batch_size
        self.state.is_local_process_zero = self.is_local_process_zero()
        self.state.is_world_process_zero = self.is_world_process_zero()
        self.state.global_step = private.step
        self.state.epoch = _epochs_done(private.step, private.plan.epoch_ends())
        self._logged = private.step
        handler.model, handler.optimizer, handler.lr_scheduler = self.model, self.optimizer, schedule
        self.control = handler.on_train_begin(args, self.state, self.control)
        if args.eval_on_start:
            self._evaluate_in_its_mode(None)

    def _log_evaluate_save(self, private: PrivateTraining, ignored: list[str] | None) -> None:
        """What callbacks asked for; the flow of `TrainingArguments` is a callback, too."""
        control, step = self.control, self.state.global_step
        if control.should_log and step > self._logged:
            self._logged = step
            rate = private.optimizer.param_groups[0]["lr"]
            self.log({"learning_rate": float(rate), "epsilon": private.epsilon()})
        if control.should_evaluate:
            best = self._determine_best_metric(metrics=self._evaluate_in_its_mode(ignored), trial=None)
            control.should_save = best if self.args.save_strategy == "best" else control.should_save
        if control.should_save:
            self._save_model_of_step()
            self.control = self.callback_handler.on_save(self.args, self.state, self.control)
        control.should_log = control.should_evaluate = control.should_save = False

    def _evaluate_in_its_mode(self, ignored: list[str] | None) -> dict[str, float]:
        with evaluation_mode(self.model):
            found: dict[str, float] = self.evaluate(ignore_keys=ignored)
        return found

    def _save_model_of_step(self) -> None:
        """`checkpoint-STEP` in the output directory: the model and the trainer's state; old ones go as asked."""
        root = Path(self.args.output_dir)
        folder = root / f"checkpoint-{self.state.global_step}"
        self.save_model(str(folder), _internal_call=True)
        if self.args.should_save:
            self.state.save_to_json(str(folder / "trainer_state.json"))
        limit = self.args.save_total_limit
        if limit and self.args.should_save:
            kept = sorted(root.glob("checkpoint-*"), key=lambda path: int(path.name.rpartition("-")[2]))
            for old in kept[: -max(1, limit)]:
                shutil.rmtree(old)

    def _end(self, private: PrivateTraining) -> TrainOutput:
        self.result = private.finish()
        spent = {"epsilon": self.result.epsilon, "delta": self.result.delta}
        self.log({**spent, "train_steps": self.state.global_step})
        self.control = self.callback_handler.on_train_end(self.args, self.state, self.control)
        return TrainOutput(self.state.global_step, float("nan"), spent)


def _epochs_done(step: int, ends: tuple[int, ...]) -> float:
    return len(ends) * step / ends[-1]


_IN_THE_MODEL = "give the model in that dtype, or put torch.autocast into its forward"
_ONE_PROCESS = "a private run of several processes is torchrun with sparsedp.fit"
_GIVE_OPTIMIZER = "give the optimizer itself: optimizers=(optimizer, None)"
_GIVE_LOSS = "call sparsedp.fit with PerExampleLoss(lambda model, batch: ...)"
_NO_HOOKS = "its hooks would see all examples at once; bound memory by max_physical_batch"

_HEEDED = (
    "output_dir per_device_train_batch_size num_train_epochs learning_rate lr_scheduler_type "
    "lr_scheduler_kwargs warmup_steps weight_decay adam_beta1 adam_beta2 adam_epsilon "
    "gradient_accumulation_steps max_grad_norm logging_strategy logging_steps logging_first_step "
    "disable_tqdm report_to run_name eval_strategy eval_steps eval_delay eval_on_start "
    "per_device_eval_batch_size save_strategy metric_for_best_model greater_is_better "
    "save_steps save_total_limit dataloader_num_workers seed"
)
"""Settings that a private run does."""
_NO_MATTER = (
    "activation_checkpointing_kwargs gradient_checkpointing_kwargs torch_compile_backend torch_compile_mode "
    "prediction_loss_only eval_do_concat_batches eval_use_gather_object eval_accumulation_steps "
    "include_for_metrics batch_eval_metrics bf16_full_eval fp16_full_eval tf32 use_cache log_level "
    "log_level_replica log_on_each_node logging_nan_inf_filter project trackio_space_id trackio_bucket_id "
    "trackio_static_space_id save_only_model save_on_each_node hub_token hub_private_repo "
    "hub_model_id hub_strategy hub_always_push hub_revision "
    "use_cpu accelerator_config dataloader_pin_memory dataloader_persistent_workers "
    "dataloader_prefetch_factor dataloader_multiprocessing_context remove_unused_columns label_names "
    "length_column_name skip_memory_metrics do_train do_eval do_predict local_rank "
    "ddp_find_unused_parameters ddp_bucket_cap_mb ddp_broadcast_buffers ddp_static_graph ddp_backend "
    "ddp_timeout average_tokens_across_devices full_determinism data_seed warmup_ratio logging_dir "
    "overwrite_output_dir no_cuda torch_empty_cache_steps dataloader_in_order "
    "restore_callback_states_from_checkpoint fsdp_config liger_kernel_config"
)
"""Settings without a bearing on private training: of evaluation, logs and saving, which transformers does itself."""

SETTINGS: Mapping[str, tuple[tuple[object, ...], str] | None] = MappingProxyType(
    {
        **dict.fromkeys((*_HEEDED.split(), *_NO_MATTER.split())),
        "max_steps": ((-1,), "set num_train_epochs, which the plan is made for"),
        "label_smoothing_factor": ((0.0,), "call sparsedp.fit with a PerExampleLoss that smooths labels"),
        "bf16": ((False,), _IN_THE_MODEL),
        "fp16": ((False,), _IN_THE_MODEL),
        "optim": (("adamw_torch", "adamw_torch_fused"), _GIVE_OPTIMIZER),
        "optim_args": ((None,), _GIVE_OPTIMIZER),
        "optim_target_modules": ((None,), _GIVE_OPTIMIZER),
        "neftune_noise_alpha": ((None,), "draw the noise in the model's forward"),
        "load_best_model_at_end": ((False,), "average weights: PrivacyArguments(ema_decay=...)"),
        "push_to_hub": ((False,), "push what is there in the end: trainer.push_to_hub()"),
        "gradient_checkpointing": ((None, False), _NO_HOOKS),
        "activation_checkpointing": ((None, False), _NO_HOOKS),
        "torch_compile": ((False,), "the model runs as written"),
        "use_liger_kernel": ((False,), "its kernels have backward code of their own"),
        "auto_find_batch_size": ((False,), "the batch size is planned; bound memory by max_physical_batch"),
        "dataloader_drop_last": ((False,), "batches are Poisson samples"),
        "train_sampling_strategy": (("random",), "batches are Poisson samples"),
        "group_by_length": ((False,), "batches are Poisson samples"),
        "ignore_data_skip": ((False,), "a resume goes on at the ledger's next step"),
        "include_num_input_tokens_seen": (("no", False), "how many tokens were seen is private"),
        "deepspeed": ((None,), _ONE_PROCESS),
        "fsdp": ((None, "", []), _ONE_PROCESS),
        "parallelism_config": ((None,), _ONE_PROCESS),
        "debug": (("", []), "leave it at its default"),
        "resume_from_checkpoint": ((None,), "call train(resume_from_checkpoint=True)"),
        "enable_jit_checkpoint": ((False,), "a run directory is checkpointed once a minute"),
    }
)
"""Every field of `TrainingArguments`: None, or the values that are heeded and what to do else.

A field that is not here must have its default.
"""

ATTRIBUTES = {
    "compute_loss_func": _GIVE_LOSS,
    "lr_scheduler": "give lr_scheduler_type and warmup_steps in TrainingArguments, and optimizers=(optimizer, None)",
    "optimizer_cls_and_kwargs": _GIVE_OPTIMIZER,
}
"""What may be given to the Trainer besides."""

METHODS = {
    "compute_loss": _GIVE_LOSS,
    "training_step": _GIVE_LOSS,
    "get_train_dataloader": "batches are drawn at random: change train_dataset or data_collator",
    "create_optimizer": _GIVE_OPTIMIZER,
    "create_scheduler": "give lr_scheduler_type and warmup_steps in TrainingArguments",
}
"""Methods that transformers' own loop calls."""


def _unsupported(trainer: HubTrainer) -> Iterator[str]:
    """What is set and a private run would pass over in silence."""
    args = trainer.args
    for setting in fields(args):
        if not setting.init:
            continue
        treatment = SETTINGS.get(setting.name, ((setting.default,), "leave it at its default"))
        value = getattr(args, setting.name)
        value = getattr(value, "value", value)
        if treatment is not None and value not in treatment[0]:
            yield f"{setting.name}={value!r}: {treatment[1]}"
    if args.lr_scheduler_type == "reduce_lr_on_plateau":
        yield "lr_scheduler_type='reduce_lr_on_plateau': give a schedule that follows the steps"
    epochs = float(args.num_train_epochs)
    if not epochs.is_integer() or epochs < 1:
        yield f"part of an epoch (num_train_epochs={epochs}): give a whole number of epochs"
    if args.max_grad_norm is None or args.max_grad_norm <= 0:
        yield f"max_grad_norm={args.max_grad_norm!r}: give a positive number, the clip norm of each unit"
    for name, remedy in ATTRIBUTES.items():
        if getattr(trainer, name, None) is not None:
            yield f"{name}: {remedy}"
    for name, remedy in METHODS.items():
        if getattr(type(trainer), name, None) is not getattr(HubTrainer, name, None):
            yield f"{type(trainer).__name__}.{name}: {remedy}"


def loss_of_head(model: nn.Module, batch: Batch) -> Tensor:
    """The loss that the model's own head gives: next token, classes, several labels, regression, spans."""
    loss = getattr(model(**batch), "loss", None)
    if not isinstance(loss, Tensor):
        raise ModelError(
            f"the model gave no loss for a batch with {sorted(batch)}; expected a model with a head, and its labels "
            f"among them, from the data set or the collator. For another loss {_GIVE_LOSS}"
        )
    return loss


LOSS = PerExampleLoss(one_by_one(loss_of_head))
"""That loss for `fit(model, dataset, LOSS)`: example by example."""
