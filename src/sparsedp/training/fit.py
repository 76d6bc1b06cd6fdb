"""`fit`: a whole private run in one call."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from signal import SIGINT, SIGTERM
from typing import Any

from rich.console import Console
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from sparsedp import distributed
from sparsedp.batch import PerExampleLoss
from sparsedp.callbacks import deferred_interrupt, live
from sparsedp.errors import SparseDPError
from sparsedp.evaluation import Evaluator
from sparsedp.loading import DataConfig
from sparsedp.methods import Method
from sparsedp.methods.auto import AUTO_METHOD
from sparsedp.methods.phases import ClipNorm
from sparsedp.optimizers.factory import (
    OptimizerChoice,
    Rate,
    SchedulerChoice,
    default_optimizer,
    named_optimizer,
)
from sparsedp.privacy.normalization import PrivateNormalisation
from sparsedp.results import CallbackLike, Result
from sparsedp.runs.directory import resumes
from sparsedp.training.data import count_channels, evaluator_of, given_data, loading_of
from sparsedp.training.normalization import Normalised
from sparsedp.training.planning import RunConfig, plan_for
from sparsedp.training.trainer import Trainer


def fit(
    model: nn.Module,
    train_dataset: Dataset[Any] | DataLoader[Any] | tuple[Any, Any],
    criterion: Callable[[Any, Tensor], Tensor] | PerExampleLoss,
    *,
    method: str | Method = AUTO_METHOD,
    epsilon: float | None = None,
    noise_multiplier: float | None = None,
    delta: float | None = None,
    epochs: int | None = None,
    batch_size: int | None = None,
    lr: Rate | None = None,
    max_grad_norm: ClipNorm | None = None,
    optimizer: OptimizerChoice | str | None = None,
    lr_scheduler: SchedulerChoice = None,
    eval_dataset: Dataset[Any] | DataLoader[Any] | tuple[Any, Any] | None = None,
    evaluate: Evaluator | None = None,
    run_dir: Path | str | None = None,
    resume: bool = False,
    seed: int | None = None,
    unit_ids: Tensor | Sequence[int] | None = None,
    data: DataConfig = DataConfig(),  # noqa: B008
    normalise: PrivateNormalisation | None = None,
    private_loss: float | None = None,
    accountant: str | None = None,
    ema_decay: float | None = None,
    public_scores: Mapping[str, Any] | None = None,
    callbacks: Sequence[CallbackLike] = (),
    progress: bool = True,
    run: RunConfig = RunConfig(),  # noqa: B008
) -> Result:
    """Train a model with differential privacy.

    >>> result = fit(model, dataset, nn.CrossEntropyLoss(), epsilon=3)  # doctest: +SKIP

    Args:
        model: trained in place, in the modes it is in (`train`, `eval`); given back in evaluation mode.
        train_dataset: the data that is protected: a map-style data set, a pair (X, y) of arrays, or a `DataLoader`,
            of which data set, batch size and collate_fn are taken; its sampler must be a plain one.
        criterion: on (output, target), with any usual reduction: it is taken apart per example. Or
            `PerExampleLoss(lambda model, batch: ...)`.
        method: a name, a `Method` from `get_method(name, **changes)`, or "auto": dense or sparse, by public numbers.
        epsilon: the budget; 3 if neither it nor `noise_multiplier` is given. Never exceeded.
        noise_multiplier: the noise instead of the budget; the plan then says which epsilon comes out.
        delta: of the guarantee; if not given, a power of ten at most 1/(10 N) and at most 1e-5, and a log line.
        epochs: 20 if not given.
        batch_size: expected size of a batch; if not given, the power of two nearest to 4 sqrt(N).
        lr: rate of the default optimizer, SGD with momentum 0.9, or a function that gives it for the plan;
            0.2 sqrt(batch_size / 128) / max_grad_norm if not given.
        max_grad_norm: L2 bound on each unit's gradient; 1 if not given. A pair is for warm-up and main phase. "auto"
            gives every gradient nearly the norm 1 (AUTO-S); a mapping from patterns of parameter names to numbers
            bounds the gradient layer by layer, at the sensitivity of the root of their squares. First match counts.
        optimizer: any `torch.optim` optimizer, a function that makes one from the parameters, or a name in
            `torch.optim` such as "adam", at rate `lr` or its own.
        lr_scheduler: a function (optimizer, steps) that makes a learning-rate scheduler; it moves every step.
        eval_dataset: held-out data, evaluated every epoch. Outside the guarantee, so no rows of `train_dataset`. One
            output a row is taken for a logit, or under `nn.BCELoss` and `nn.MSELoss` for what it is.
        evaluate: your own evaluation instead: model to named numbers.
        run_dir: run directory to make: plan, ledger, checkpoint, metrics, record. Never overwritten.
        resume: go on with the run at `run_dir`; give the same arguments.
        seed: reproducible, and not to be published.
        unit_ids: the unit (patient, user) each row belongs to; then units are protected, not rows.
        data: what a unit is called, and how rows are loaded: rows drawn of a unit, most rows at once, processes,
            `collate_fn`.
        normalise: centre and scale the inputs by statistics released first, within the same budget; the model given
            back is then `Normalised(model, channels)`.
        private_loss: the public bound on an example's loss: the last step of each epoch then also releases the mean
            loss, clamped to it, as the epoch's `training_loss`, within the same epsilon for 2 % more noise.
        accountant: "pld" if not given, "rdp" or "rdp-classic".
        ema_decay: keep an exponential average of the weights, and give that back.
        public_scores: what method `given` trains: a score for each row, entry or whole parameter, or a mask, by the
            parameters' names; see `PublicScores`. Public knowledge, for which nothing is charged.
        callbacks: see every step and epoch.
        progress: show a progress bar on a terminal.
        run: a cap over several runs, engine, names for the record.

    Formal guarantees: (epsilon, delta) under adding or removing one unit, for everything that the run gives and
    writes, but what is said of `eval_dataset`. Tuning on the same data costs extra and is not counted.
    Edge cases: Under `torchrun` all processes train one model together; rank 0 keeps the run. Ctrl-C stops after
    the step in progress, with a checkpoint if there is a run directory; among several processes SIGTERM does as well.
    """
    given = given_data(train_dataset, "train_dataset")
    loading = loading_of(data, given, unit_ids)
    if evaluate is None and eval_dataset is not None:
        evaluate = evaluator_of(eval_dataset, given, criterion, collate=data.collate_fn)
    if isinstance(optimizer, str) and not callable(lr):
        optimizer, lr = named_optimizer(optimizer, lr), None
    elif isinstance(optimizer, str) or (optimizer is not None and lr is not None):
        raise SparseDPError(f"lr={lr} is for the default optimizer; give your optimizer its own rate")
    distributed.connect()
    resume = resumes(run_dir, resume)
    plan = plan_for(
        model,
        given.dataset,
        method,
        loading,
        run,
        run_dir=run_dir,
        resume=resume,
        epsilon=epsilon,
        noise_multiplier=noise_multiplier,
        delta=delta,
        epochs=epochs,
        batch_size=given.batch_size if batch_size is None else batch_size,
        max_grad_norm=max_grad_norm,
        public_scores=public_scores,
        accountant=accountant,
        normalise=normalise,
        private_loss=private_loss,
    )
    if normalise is not None and not isinstance(model, Normalised):
        model = Normalised(model, count_channels(given.dataset, loading.collate_fn))
    named, metadata, screen = public_weights(model), run.metadata, Console(stderr=True)
    if named:
        metadata = replace(metadata, schema={**(metadata.schema or {}), **named})
    shown = progress and distributed.is_main_process() and screen.is_terminal
    with ExitStack() as closing:
        bar = (closing.enter_context(live(plan, screen)),) if shown else ()
        trainer = Trainer(
            model,
            given.dataset,
            criterion,
            plan=plan,
            optimizer=optimizer or default_optimizer(lr, plan),
            lr_scheduler=lr_scheduler,
            data=loading,
            evaluate=evaluate,
            run_dir=run_dir,
            resume=resume,
            seed=seed,
            engine=run.engine,
            ema_decay=ema_decay,
            public_scores=public_scores,
            callbacks=(*callbacks, *bar),
            metadata=metadata,
        )
        return distributed.report_failure(lambda: _run(trainer))


def public_weights(model: nn.Module) -> dict[str, Any]:
    """The public weights that parts of the model say they were loaded from, as an entry of the record's schema."""
    named = {str(part.public_weights) for part in model.modules() if hasattr(part, "public_weights")}
    return {"public_weights": sorted(named)} if named else {}


def _run(trainer: Trainer) -> Result:
    """Every step, then the result; Ctrl-C and errors leave a checkpoint behind.

    A launcher ends ranks by SIGTERM when one has failed, or when its job is over. They then go on to the end of the
    step: to fail there as well, or to save.
    """
    signals = (SIGINT, SIGTERM) if distributed.world_size() > 1 else (SIGINT,)
    with trainer, deferred_interrupt(*signals) as interrupted:
        for batch in trainer:
            trainer.step(batch)
            if distributed.should_stop(interrupted()):
                trainer.pause()
                raise KeyboardInterrupt
        return trainer.finish()
