"""`make_private`: a training loop of your own, made private."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any, final

from rich.console import Console
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader, Dataset

from sparsedp._private_loop import Loop, PrivateCriterion, PrivateLoader, PrivateModel, PrivateOptimizer
from sparsedp.batch import PerExampleLoss, per_sample_loss, slice_batch
from sparsedp.callbacks import live
from sparsedp.distributed import require_one_process
from sparsedp.errors import DataError, SparseDPError
from sparsedp.evaluation import Evaluator, MetricFunctions
from sparsedp.loading import DataConfig, first_row
from sparsedp.methods import Method
from sparsedp.methods.auto import AUTO_METHOD
from sparsedp.methods.phases import ClipNorm
from sparsedp.privacy.plan import Plan
from sparsedp.results import CallbackLike, Result
from sparsedp.runs.record import EpochMetrics
from sparsedp.training.data import GivenData, evaluator_of, given_data, loading_of
from sparsedp.training.planning import RunConfig, plan_for
from sparsedp.training.trainer import Trainer

_IN_OPACUS: Mapping[str, str] = {
    "module": "model",
    "data_loader": "loader",
    "target_epsilon": "epsilon",
    "target_delta": "delta",
    "poisson_sampling": "nothing: batches are always Poisson samples, as the guarantee needs",
    "clipping": "max_grad_norm, which is a number (flat), 'auto', or a mapping from patterns of names (per layer)",
    "grad_sample_mode": "nothing: the engine chooses, layer by layer, and falls back to engine='reference'",
    "max_physical_batch_size": "data=DataConfig(max_physical_batch=...)",
}
"""Names that users of Opacus may give; and what to give instead."""


def make_private(
    model: nn.Module | None = None,
    optimizer: Optimizer | None = None,
    loader: DataLoader[Any] | None = None,
    criterion: Callable[[Any, Tensor], Tensor] | PerExampleLoss | None = None,
    *,
    epsilon: float | None = None,
    noise_multiplier: float | None = None,
    delta: float | None = None,
    epochs: int | None = None,
    max_grad_norm: ClipNorm | None = None,
    method: str | Method = AUTO_METHOD,
    accountant: str | None = None,
    private_loss: float | None = None,
    unit_ids: Tensor | Sequence[int] | None = None,
    data: DataConfig = DataConfig(),  # noqa: B008
    ema_decay: float | None = None,
    eval_dataset: Dataset[Any] | DataLoader[Any] | tuple[Any, Any] | None = None,
    evaluate: Evaluator | None = None,
    run_dir: Path | str | None = None,
    resume: bool = False,
    seed: int | None = None,
    callbacks: Sequence[CallbackLike] = (),
    progress: bool = False,
    run: RunConfig = RunConfig(),  # noqa: B008
    **other_names: object,
) -> PrivateTraining:
    """Make an ordinary PyTorch loop private: forward, criterion, backward, step, over the loader's batches.

    >>> private = make_private(model, optimizer, loader, criterion, epsilon=3)  # doctest: +SKIP
    >>> for epoch in range(20):  # doctest: +SKIP
    ...     for x, y in private.loader:
    ...         private.optimizer.zero_grad()
    ...         private.criterion(private.model(x), y).backward()
    ...         private.optimizer.step()
    ...     print(private.epsilon(), private.evaluate(held_out_dataset))

    Or `model, optimizer, loader, criterion = make_private(...)`, and the loop stays as it is.

    Args:
        model: trained in place, in the modes it is in.
        optimizer: any `torch.optim` optimizer over the model's parameters. Schedulers on it, or on the one given
            back, work as usual.
        loader: a `DataLoader`. Its data set, batch size (from now on the expected size of a Poisson batch),
            `collate_fn` and `num_workers` are taken; its sampler, which must be a plain one, is replaced.
        criterion: on (output, targets), with any usual reduction: it is taken apart per example. Or
            `PerExampleLoss(lambda model, batch: ...)`.
        epsilon: the budget, never exceeded; 3 if neither it nor `noise_multiplier` is given.
        noise_multiplier: the noise instead of the budget; the plan then says which epsilon comes out.
        delta: of the guarantee, as for `fit`.
        epochs: passes over the loader, 20 if not given; planned ahead, as the noise depends on them.
        max_grad_norm: L2 bound on each unit's gradient, "auto", or norms by pattern of names, as for `fit`.
        method: a name, or a `Method` from `get_method(name, **changes)`; "auto" is dense or sparse by public numbers.
        accountant: "pld" if not given, "rdp" or "rdp-classic".
        private_loss: the public bound on an example's loss, to release a training loss every epoch, as for `fit`.
        unit_ids: the unit (patient, user) each row belongs to; then units are protected, not rows.
        data: what a unit is called, rows drawn of a unit, most rows at once; else as the loader says.
        ema_decay: keep an exponential average of the weights, evaluate it, and leave it in the model at the end.
        eval_dataset: held-out data, evaluated at the end of every epoch for history and record.
        evaluate: your own evaluation instead: model to named numbers.
        run_dir: run directory to make: plan, ledger, checkpoint, metrics, record. Never overwritten.
        resume: go on with the run at `run_dir`; give the same arguments.
        seed: reproducible, and not to be published.
        callbacks: see every step and epoch.
        progress: show a bar with epoch, epsilon and time left on a terminal.
        run: a cap over several runs, engine, names for the record.
        other_names: refused; names of Opacus are answered by ours.

    Formal guarantees: As `fit`: the step is the trainer's, on the rows it drew, and the loop decides only when it is
    taken. Outputs and losses on training rows are not computed outside the step, so a loop cannot log them. What your
    own code makes of the batch itself is not protected.
    Edge cases: After the last planned step the run is finished; `private.finish()` gives its result.
    """
    for name in other_names:
        expected = _IN_OPACUS.get(name, "none of that name; see help(sparsedp.make_private)")
        raise TypeError(f"make_private() got {name!r}; expected {expected}")
    if model is None or optimizer is None or loader is None or criterion is None:
        raise TypeError(
            "expected make_private(model, optimizer, loader, criterion, epsilon=...), all four of them"
        )
    wrapped = {"model": model, "optimizer": optimizer, "loader": loader, "criterion": criterion}
    for name, (kinds, expected) in _WRAPPED.items():
        if isinstance(wrapped[name], kinds):
            raise SparseDPError(
                f"{name}: got what make_private gave back for another run, which is charged for by itself; expected "
                f"{expected}"
            )
    if not isinstance(optimizer, Optimizer):
        raise SparseDPError(f"optimizer: got {type(optimizer).__name__}, expected one of torch.optim")
    if not isinstance(loader, DataLoader):
        raise DataError(
            f"loader: got {type(loader).__name__}, expected a torch DataLoader; fit and Trainer take data sets"
        )
    given = given_data(loader, "loader")
    require_one_process("make_private")
    per_sample_loss(criterion)  # refuses what is no loss, before anything else
    loading = loading_of(replace(data, num_workers=data.num_workers or loader.num_workers), given, unit_ids)
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
        batch_size=loader.batch_size,
        max_grad_norm=max_grad_norm,
        accountant=accountant,
        private_loss=private_loss,
    )
    if evaluate is None and eval_dataset is not None:
        evaluate = evaluator_of(eval_dataset, given, criterion, collate=data.collate_fn)
    closing = ExitStack()
    shown = (closing.enter_context(live(plan, Console(stderr=True))),) if progress else ()
    with closing:
        trainer = Trainer(
            model,
            given.dataset,
            criterion,
            plan=plan,
            optimizer=optimizer,
            data=loading,
            evaluate=evaluate,
            run_dir=run_dir,
            resume=resume,
            seed=seed,
            engine=run.engine,
            ema_decay=ema_decay,
            callbacks=(*callbacks, *shown),
            metadata=run.metadata,
        )
        no_rows = slice_batch(first_row(given.dataset, loading.collate_fn), slice(0, 0))
        opened = closing.pop_all()
    return PrivateTraining(Loop(trainer, criterion, no_rows), model, optimizer, given, opened)


@final
class PrivateTraining:
    """What `make_private` gives back; also iterable as `(model, optimizer, loader, criterion)`.

    Attributes:
        model: for the loader's batches, and under `torch.no_grad()` for held-out data.
        optimizer: its `step()` is the private step.
        loader: gives the Poisson batches of one epoch a pass.
        criterion: takes the model's output and the targets; what it gives has `backward()`.
    """

    def __init__(
        self, loop: Loop, model: nn.Module, optimizer: Optimizer, data: GivenData, display: ExitStack
    ) -> None:
        self._loop, self._data, self._display = loop, data, display
        self.model = PrivateModel(model, loop)
        self.optimizer = PrivateOptimizer(optimizer, loop)
        self.loader = PrivateLoader(loop, data.dataset)
        self.criterion = PrivateCriterion(loop)

    def __iter__(self) -> Iterator[Any]:
        return iter((self.model, self.optimizer, self.loader, self.criterion))

    @property
    def trainer(self) -> Trainer:
        """The run inside: support, history, `save`."""
        return self._loop.trainer

    @property
    def plan(self) -> Plan:
        """What was planned."""
        return self.trainer.plan

    @property
    def step(self) -> int:
        """How many steps of the plan are done."""
        return self.trainer.position

    @property
    def history(self) -> tuple[EpochMetrics, ...]:
        """One report per epoch so far."""
        return self.trainer.history

    def epsilon(self, delta: float | None = None) -> float:
        """What is spent so far, at the plan's delta or another one, at any step; 0 before the first.

        It holds as a guarantee if the decision to stop here did not depend on anything that the run released; else
        `planned_epsilon` does.
        """
        return self.trainer.epsilon(delta)

    @property
    def planned_epsilon(self) -> float:
        """The epsilon of the whole plan: the guarantee, also of a run that is stopped because of what it showed."""
        return self.trainer.planned_epsilon

    @property
    def noise_multiplier(self) -> float:
        """The noise of the step at work, over max_grad_norm."""
        last = min(self.step, self.plan.total_steps - 1)
        return self.plan.phase_at(last).noise_multiplier

    def evaluate(
        self,
        dataset: Dataset[Any] | DataLoader[Any] | tuple[Any, Any],
        criterion: Callable[[Any, Tensor], Tensor] | PerExampleLoss | None = None,
        metrics: MetricFunctions | None = None,
    ) -> Mapping[str, float]:
        """Mean loss and metrics of the model as it is now on held-out data, in evaluation mode.

        Args:
            dataset: held-out examples; they are outside the guarantee, so none of the training data.
            criterion: of the loss; the loop's if not given.
            metrics: further numbers by name, each a function of all outputs and all targets.

        Raises:
            PrivacyError: examples of the training data are among them.
        """
        chosen = self._loop.criterion if criterion is None else criterion
        evaluate = evaluator_of(dataset, self._data, chosen, name="the held-out data", metrics=metrics)
        return self.trainer.evaluate(evaluate)

    def finish(self) -> Result:
        """The run's result. After the last planned step the run is finished already; before, it is stopped here."""
        self._display.close()
        return self._loop.finish()

    @property
    def result(self) -> Result:
        """The result of a finished run.

        Raises:
            SparseDPError: there are steps left; `finish()` stops the run before them.
        """
        if not self._loop.finished:
            raise SparseDPError(
                f"result: step {self.step} of {self.plan.total_steps} is done; the result is there after the last "
                "one, or after private.finish(), which stops the run here"
            )
        return self.finish()

    def pause(self) -> None:
        """Save and close, to go on with `resume=True`; nothing is saved without a run directory."""
        self._display.close()
        self.trainer.pause()


_WRAPPED: Mapping[str, tuple[type | tuple[type, ...], str]] = {
    "model": ((PrivateModel, PrivateTraining), "the plain module inside, private.model.module"),
    "optimizer": (PrivateOptimizer, "a new torch.optim optimizer over private.model.module.parameters()"),
    "loader": (PrivateLoader, "the DataLoader it was made from, or a new one"),
    "criterion": (PrivateCriterion, "the criterion it was made from, such as nn.CrossEntropyLoss()"),
}
