"""`fit`: a whole private run in one call."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from signal import SIGINT, SIGTERM
from typing import Any

from rich.console import Console
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from sparsedp.callbacks.reports import Callback, Result
from sparsedp.callbacks.terminal import deferred_interrupt, live
from sparsedp.core.batch import PerSample, Rows, per_sample_loss
from sparsedp.core.errors import ModelError, SparseDPError
from sparsedp.evaluation.evaluate import Evaluator, evaluation_mode, held_out
from sparsedp.evaluation.metrics import threshold_of
from sparsedp.evaluation.overlap import refuse_training_arrays, refuse_training_rows
from sparsedp.methods import Method, MethodOptions
from sparsedp.methods.choice import AUTO_METHOD
from sparsedp.methods.method import ActiveRatio
from sparsedp.methods.spec import ClipNorm
from sparsedp.optimizers.rates import RateFactors
from sparsedp.optimizers.rule import (
    OptimizerChoice,
    Rate,
    SchedulerChoice,
    default_optimizer,
    named_optimizer,
)
from sparsedp.privacy.calibrate import BudgetSplit
from sparsedp.privacy.normalisation import PrivateNormalisation
from sparsedp.privacy.plan import Plan
from sparsedp.ranks.here import ranks_here
from sparsedp.ranks.one import Ranks
from sparsedp.ranks.store import goes_on
from sparsedp.runs.reader import Run
from sparsedp.runs.record import About
from sparsedp.sampling.fetching import Collate
from sparsedp.sampling.loading import Loading
from sparsedp.training.batches import count_channels
from sparsedp.training.given_data import GivenData, given_data, given_units
from sparsedp.training.kept_features import AUTO as AUTO_FEATURES
from sparsedp.training.kept_features import FROZEN_PART, keep_below
from sparsedp.training.normalised import Normalised
from sparsedp.training.planning import AskedMethod, plan_for
from sparsedp.training.together import same_model
from sparsedp.training.trainer import Trainer


def fit(
    model: nn.Module,
    train_dataset: Dataset[Any] | DataLoader[Any] | tuple[Any, Any],
    loss_fn: Callable[[Any, Tensor], Tensor] | PerSample,
    *,
    method: str | Method = AUTO_METHOD,
    epsilon: float | None = None,
    delta: float | None = None,
    epochs: int | None = None,
    batch_size: int | None = None,
    lr: Rate | None = None,
    clip_norm: ClipNorm | None = None,
    active_ratio: ActiveRatio | None = None,
    options: MethodOptions | None = None,
    optimizer: OptimizerChoice | str | None = None,
    scheduler: SchedulerChoice = None,
    eval_dataset: Dataset[Any] | DataLoader[Any] | tuple[Any, Any] | None = None,
    evaluate: Evaluator | None = None,
    out: Path | str | None = None,
    resume: bool = False,
    seed: int | None = None,
    units: Tensor | Sequence[int] | None = None,
    unit: str | None = None,
    rows_per_unit: int = 1,
    warmup_fraction: float | None = None,
    selection_budget: float | None = None,
    split: BudgetSplit | None = None,
    noise_std: float | None = None,
    normalise: PrivateNormalisation | None = None,
    accountant: str | None = None,
    engine: str = "bookkeeping",
    max_physical_batch: int | None = None,
    workers: int = 0,
    collate: Callable[[list[Any]], Rows] | None = None,
    sharded: bool = False,
    ema_decay: float | None = None,
    lr_factors: RateFactors | None = None,
    public_scores: Mapping[str, Any] | None = None,
    cache_features: Path | str | bool | None = None,
    callbacks: Sequence[Callback] = (),
    progress: bool = True,
    about: About = About(),  # noqa: B008
) -> Result:
    """Train a model with differential privacy.

    >>> result = fit(model, dataset, nn.CrossEntropyLoss(reduction="none"), epsilon=3)  # doctest: +SKIP

    Args:
        model: trained in place, in the modes it is in (`train`, `eval`); given back in evaluation mode.
        train_dataset: the data that is protected: a map-style data set, a pair (X, y) of arrays, or a `DataLoader`,
            of which data set, batch size and collate are taken; its sampler must be a plain one.
        loss_fn: a criterion on (output, target) with `reduction="none"`, or `PerSample(lambda model, rows: ...)`.
        method: a name from `sparsedp.methods`, your own `Method`, or "auto": dense or sparse, by public numbers.
        epsilon: the budget; 3 if not given. Never exceeded.
        delta: of the guarantee; if not given, a power of ten at most 1/(10 N) and at most 1e-5, and a log line.
        epochs: 20 if not given.
        batch_size: expected size of a batch; if not given, the power of two nearest to 4 sqrt(N).
        lr: rate of the default optimizer, SGD with momentum 0.9, or a function that gives it for the plan;
            0.2 sqrt(batch_size / 128) / clip_norm if not given.
        clip_norm: L2 bound on each unit's gradient; 1 if not given. A pair is for warm-up and main phase.
        active_ratio: share of the coordinates trained, or "auto": as many as the noise allows; else the method's own.
        options: further changes to the method.
        optimizer: any `torch.optim` optimizer, a function that makes one from the parameters, or a name in
            `torch.optim` such as "adam", at rate `lr` or its own.
        scheduler: a function (optimizer, steps) that makes a learning-rate scheduler; it moves every step.
        eval_dataset: held-out data, evaluated every epoch. Outside the guarantee, so no rows of `train_dataset`. One
            output a row is taken for a logit, or under `nn.BCELoss` and `nn.MSELoss` for what it is.
        evaluate: your own evaluation instead: model to named numbers.
        out: run directory to make: plan, ledger, checkpoint, metrics, record. Never overwritten.
        resume: go on with the run at `out`; give the same arguments.
        seed: reproducible, and not for release.
        units: the unit (patient, user) each row belongs to; then units are protected, not rows.
        unit: what a unit is called.
        rows_per_unit: rows drawn of a sampled unit.
        warmup_fraction: share of the steps of a two-phase method's warm-up; 0.3 if not given.
        selection_budget: share of epsilon that a selection by a release of its own (`fest`) may cost alone; 0.1 if
            not given.
        split: how a two-phase method divides its budget; equal noise if not given.
        noise_std: for the ablation `noisy-sgd` only.
        normalise: centre and scale the inputs by statistics released first, within the same budget; the model given
            back is then `Normalised(model, channels)`.
        accountant: "pld" if not given, "rdp" or "rdp-classic".
        engine: "bookkeeping", or "reference".
        max_physical_batch: most rows loaded at once; changes nothing but memory.
        workers: loading processes.
        collate: makes a batch of items of the data set, as in a `DataLoader`.
        sharded: among several processes, `train_dataset` has this one's rows alone; else each gives all rows.
        ema_decay: keep an exponential average of the weights, and give that back.
        lr_factors: what to multiply the rate by for parts of the model: patterns of parameter names, or words for
            structure, to factors, such as {"head": 10}; the others have 1.
        public_scores: what method `given` trains: a score for each row, entry or whole parameter, or a mask, by the
            parameters' names; see `PublicScores`. Public knowledge, for which nothing is charged.
        cache_features: run the frozen first parts of an `nn.Sequential` once, keep what they give in this folder (or,
            with "auto" or True, in the user's cache) and train on that. It holds private records in another form.
            Not with `normalise`.
        callbacks: see every step and epoch.
        progress: show a progress bar on a terminal.
        about: names for the record.

    **Privacy.** (epsilon, delta) under adding or removing one unit, for everything that the run gives and writes, but
    what is said of `eval_dataset`. Tuning on the same data costs extra and is not counted.
    **Edge cases.** Under `torchrun` all processes train one model together; rank 0 keeps the run. Ctrl-C stops after
    the step in progress, with a checkpoint if there is a run directory; among several processes SIGTERM does as well.
    """
    where = _feature_folder(cache_features, normalise)
    given = given_data(train_dataset, "train_dataset")
    loading = Loading(
        units=given_units(units),
        rows_per_unit=rows_per_unit,
        max_physical_batch=max_physical_batch,
        workers=workers,
        collate=collate or given.collate,
        sharded=sharded,
    )
    apart = _held_apart(eval_dataset, given, collate, evaluate)
    task = _Task(model, given.dataset, *apart, loss_fn, loading, evaluate, _naming_weights(about, model))
    chosen, lr = _own_rate(optimizer, lr)
    ranks = ranks_here()
    resume = goes_on(ranks, out, resume)
    plan = plan_for(
        model,
        given.dataset,
        AskedMethod(method, options, active_ratio, public_scores),
        loading,
        unit=unit,
        out=out,
        resume=resume,
        ranks=ranks,
        epsilon=epsilon,
        delta=delta,
        epochs=epochs,
        batch_size=given.batch_size if batch_size is None else batch_size,
        clip_norm=clip_norm,
        warmup_fraction=warmup_fraction,
        selection_budget=selection_budget,
        split=split,
        noise_std=noise_std,
        accountant=accountant,
        normalise=normalise,
    )
    begun, normalises = out if resume else None, normalise is not None
    task = task.prepared(where, ranks, begun=begun, normalises=normalises, shown=progress)
    with _progress_bar(plan, shown=progress and ranks.leads) as bar:
        trainer = Trainer(
            task.model,
            task.rows,
            loss_fn,
            plan=plan,
            optimizer=chosen or default_optimizer(lr, plan),
            scheduler=scheduler,
            loading=task.loading,
            evaluate=task.evaluator(),
            out=out,
            resume=resume,
            seed=seed,
            engine=engine,
            ema_decay=ema_decay,
            lr_factors=lr_factors,
            public_scores=public_scores,
            callbacks=(*callbacks, *bar),
            about=task.about,
        )
        result = _run(trainer)
    return replace(result, model=model.eval()) if task.is_a_part else result


def _feature_folder(
    asked: Path | str | bool | None, normalise: PrivateNormalisation | None
) -> Path | str | None:
    """Where features are kept, if they are."""
    if asked and normalise is not None:
        raise SparseDPError(
            "cache_features and normalise: the constants would stand in the middle of the model, expected one of the "
            "two; keep the features yourself (run the frozen part over your data once) "
            "and give them to fit with normalise"
        )
    return AUTO_FEATURES if asked is True else asked or None


def _naming_weights(about: About, model: nn.Module) -> About:
    """With the public weights that parts of the model say they were loaded from."""
    named = {str(part.public_weights) for part in model.modules() if hasattr(part, "public_weights")}
    if not named:
        return about
    return replace(about, schema={**(about.schema or {}), "public_weights": sorted(named)})


def _held_apart(
    eval_dataset: Any, train: GivenData, collate: Collate | None, evaluate: Evaluator | None
) -> tuple[Dataset[Any] | None, Collate | None]:
    """Held-out rows and what makes batches of them: their own loader, else what does for the training rows."""
    if eval_dataset is None:
        return None, None
    apart = given_data(eval_dataset, "eval_dataset")
    if evaluate is None:
        refuse_training_arrays(train.arrays, apart.arrays)
    return apart.dataset, apart.collate or collate or (None if apart.from_loader else train.collate)


def _refuse_another_frozen_part(out: Path, now: str | None) -> None:
    """Kept features are not in a run, so nothing else would notice that another network made them."""
    before = (Run.open(out).record["schema"] or {}).get(FROZEN_PART)
    if before is not None and now is None:
        raise ModelError(
            f"resume: the run at {out} was begun with kept features of a frozen part, and now none are kept; give "
            'cache_features (a folder or "auto"), with the model frozen as it was, or begin a new run'
        )
    if before != now:
        raise ModelError(
            f"resume: the frozen part of the model is not the one that the run at {out} was begun with; load the "
            "same weights into it, with cache_features as at the start, or begin a new run"
        )


def _own_rate(
    optimizer: OptimizerChoice | str | None, lr: Rate | None
) -> tuple[OptimizerChoice | None, Rate | None]:
    """The optimizer with its rate, or none and the rate for the default one."""
    if isinstance(optimizer, str) and not callable(lr):
        return named_optimizer(optimizer, lr), None
    if isinstance(optimizer, str) or (optimizer is not None and lr is not None):
        raise SparseDPError(f"lr={lr} is for the default optimizer; give your optimizer its own rate")
    return optimizer, lr


@dataclass(frozen=True, slots=True, eq=False)
class _Task:
    """What is trained, on which rows, and how it is scored."""

    model: nn.Module
    rows: Dataset[Any]
    apart: Dataset[Any] | None
    collate_apart: Collate | None
    loss: Callable[[Any, Tensor], Tensor] | PerSample
    loading: Loading
    evaluate: Evaluator | None
    about: About
    frozen_part: str | None = None
    """Digest of what lies below the model, if it is the part above kept features."""

    @property
    def is_a_part(self) -> bool:
        """Whether the model is the part above kept features."""
        return self.frozen_part is not None

    def prepared(
        self,
        cache_features: Path | str | None,
        ranks: Ranks,
        *,
        begun: Path | str | None,
        normalises: bool,
        shown: bool,
    ) -> _Task:
        """What a trainer gets: the part above kept features, behind constants if the plan releases them.

        `begun` is the run that it goes on with; `shown` is whether to draw progress bars on a terminal.
        """
        if self.evaluate is None and self.apart is not None:
            refuse_training_rows(self.rows, self.apart)
        if cache_features:
            same_model(ranks, self.model)  # also of what lies below the trained parts, which no trainer sees
        task = self._on_kept(cache_features, shown=shown and ranks.leads) if cache_features else self
        if begun is not None and ranks.leads:
            _refuse_another_frozen_part(Path(begun), task.frozen_part)
        if not normalises or isinstance(task.model, Normalised):
            return task
        return replace(task, model=Normalised(task.model, count_channels(task.rows, task.loading.collate)))

    def evaluator(self) -> Evaluator | None:
        """The user's own evaluation, or that of the loss on held-out data."""
        if self.evaluate is not None or self.apart is None:
            return self.evaluate
        return held_out(
            self.apart,
            per_sample_loss(self.loss),
            collate=self.collate_apart,
            threshold=threshold_of(self.loss),
        )

    def _on_kept(self, where: Path | str, *, shown: bool) -> _Task:
        """The part that is trained, on what the fixed part below it gives; all of it where "auto" finds none."""
        loss = self.loss.loss if isinstance(self.loss, PerSample) else None
        collate = self.loading.collate
        if self.apart is not None and self.collate_apart is not collate:
            raise SparseDPError(
                "cache_features: got a collate for eval_dataset that is not the one for train_dataset, expected one "
                "for both, as features of both are kept alike; give fit(collate=...), and data sets"
            )
        kept = keep_below(self.model, self.rows, self.apart, collate, where, loss=loss, shown=shown)
        if kept is None:
            return self
        return _Task(
            kept.above,
            kept.train,
            kept.held_out,
            None,
            self.loss,
            replace(self.loading, collate=None),
            None if self.evaluate is None else _of_the_whole(self.evaluate, self.model),
            replace(self.about, schema={**(self.about.schema or {}), FROZEN_PART: kept.below}),
            frozen_part=kept.below,
        )


def _of_the_whole(evaluate: Evaluator, model: nn.Module) -> Evaluator:
    """The user's evaluation looks at the whole model, whatever part of it is trained."""

    def evaluate_whole(_above: nn.Module) -> Mapping[str, float]:
        with evaluation_mode(model):
            return evaluate(model)

    return evaluate_whole


@contextmanager
def _progress_bar(plan: Plan, *, shown: bool) -> Iterator[Sequence[Callback]]:
    """A callback that draws a bar, where there is somebody to see it."""
    screen = Console(stderr=True)
    if not shown or not screen.is_terminal:
        yield ()
        return
    with live(plan, screen) as bar:
        yield (bar,)


def _run(trainer: Trainer) -> Result:
    """Every step, then the result; Ctrl-C and errors leave a checkpoint behind.

    A launcher ends ranks by SIGTERM when one has failed, or when its job is over. They then go on to the end of the
    step: to hear which one failed, and say so, or to save.
    """
    signals = (SIGINT, SIGTERM) if trainer.ranks.count > 1 else (SIGINT,)
    with trainer, deferred_interrupt(*signals) as interrupted:
        for batch in trainer:
            trainer.step(batch)
            if trainer.stops(interrupted()):
                trainer.pause()
                raise KeyboardInterrupt
        return trainer.finish()
