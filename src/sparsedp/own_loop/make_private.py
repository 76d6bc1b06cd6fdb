"""`make_private`: keep your own loop."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Unpack

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader, Dataset, IterableDataset
from torch.utils.data._utils.collate import default_collate

from sparsedp.batch import PerExampleLoss, per_sample_loss, select_rows
from sparsedp.distributed import require_one_process
from sparsedp.errors import DataError, SparseDPError
from sparsedp.evaluation import Evaluator, held_out, refuse_training_rows, threshold_of
from sparsedp.loading import Loading, rows_in_order
from sparsedp.methods import Method, MethodOptions
from sparsedp.methods.auto import AUTO_METHOD
from sparsedp.methods.plan_config import Asked, check_asked
from sparsedp.own_loop.loop import Loop
from sparsedp.own_loop.private_loop import PrivateLoader, PrivateModel, PrivateOptimizer
from sparsedp.randomness import PublicRandomness, own_generators
from sparsedp.results import Callback
from sparsedp.runs.record import RunMetadata
from sparsedp.training.data import refuse_picked_rows
from sparsedp.training.planning import AskedMethod, plan_for
from sparsedp.training.trainer import Trainer


def make_private(
    model: nn.Module,
    optimizer: Optimizer,
    data_loader: DataLoader[Any],
    loss_fn: Callable[[Any, Tensor], Tensor] | PerExampleLoss,
    *,
    method: str | Method = AUTO_METHOD,
    active_ratio: float | None = None,
    options: MethodOptions | None = None,
    public_scores: Mapping[str, Any] | None = None,
    accumulation: int = 1,
    eval_dataset: Dataset[Any] | None = None,
    evaluate: Evaluator | None = None,
    out: Path | str | None = None,
    resume: bool = False,
    seed: int | None = None,
    units: Tensor | Sequence[int] | None = None,
    unit: str | None = None,
    rows_per_unit: int = 1,
    engine: str = "bookkeeping",
    max_physical_batch: int | None = None,
    ema_decay: float | None = None,
    callbacks: Sequence[Callback] = (),
    about: RunMetadata = RunMetadata(),  # noqa: B008
    **asked: Unpack[Asked],
) -> tuple[PrivateModel, PrivateOptimizer, PrivateLoader]:
    """Make an ordinary PyTorch loop private: zero_grad, forward, loss, backward, step, over the loader's batches.

    >>> model, optimizer, loader = make_private(model, optimizer, loader, loss_fn, epsilon=3)  # doctest: +SKIP

    What is not said here is as in `fit`:
        model: trained in place.
        optimizer: any `torch.optim` optimizer over the model's parameters. Schedulers on it, or on the one given
            back, work as usual.
        data_loader: its data set, batch size (the expected size of a Poisson batch), collate and workers are taken;
            its sampler, which must be a plain one, is replaced.
        loss_fn: as in `fit`: a criterion with `reduction="none"`, or `PerExampleLoss`. The loop calls it,
            and may take the mean or sum before `backward`.
        accumulation: batches of the loader before each `optimizer.step()`; a step then expects that many times the
            loader's batch size.
        asked: epsilon, delta, epochs, clip_norm and all else of a plan. Epochs are passes over the loader, 20 if not
            given; planned ahead, so the loop makes no more of them.

    **Privacy.** As `fit`: the step is the trainer's, on the rows it drew, and the loop decides only when it is taken.
    Outputs and losses on training rows are not computed outside the step, so a loop cannot log them. What your own
    code makes of the batch itself is not protected.
    **Edge cases.** After the last planned step the run is finished; `loader.finish()` gives its result.
    """
    check_asked(asked, "make_private", without=("batch_size", "normalise"))
    loading = Loading(
        units=units,
        rows_per_unit=rows_per_unit,
        max_physical_batch=max_physical_batch,
        workers=_loader(data_loader).num_workers,
        collate=None if data_loader.collate_fn is default_collate else data_loader.collate_fn,
    )
    _refuse_wrapped(model, optimizer)
    if not isinstance(optimizer, Optimizer):
        raise SparseDPError(
            f"optimizer: got {type(optimizer).__name__}, expected the torch.optim optimizer that the loop steps"
        )
    if isinstance(accumulation, bool) or not isinstance(accumulation, int) or accumulation < 1:
        raise SparseDPError(f"accumulation: got {accumulation!r}, expected a whole number >= 1")
    dataset, per_sample = data_loader.dataset, per_sample_loss(loss_fn)
    require_one_process("make_private")
    asked["batch_size"] = _batch_size(data_loader) * accumulation
    plan = plan_for(
        model,
        dataset,
        AskedMethod(method, options, active_ratio, public_scores),
        loading,
        unit=unit,
        out=out,
        resume=resume,
        **asked,
    )
    if evaluate is None and eval_dataset is not None:
        refuse_training_rows(dataset, eval_dataset)
        evaluate = held_out(
            eval_dataset, per_sample, collate=loading.collate, threshold=threshold_of(loss_fn)
        )
    trainer = Trainer(
        model,
        dataset,
        loss_fn,
        plan=plan,
        public_scores=public_scores,
        optimizer=optimizer,
        loading=loading,
        evaluate=evaluate,
        out=out,
        resume=resume,
        seed=seed,
        engine=engine,
        ema_decay=ema_decay,
        callbacks=callbacks,
        about=about,
    )
    with own_generators(PublicRandomness(0).generator_seed(()), torch.device("cpu")):
        no_rows = select_rows(next(rows_in_order(dataset, 1, 1, loading.collate)), slice(0, 0))
    loop = Loop(trainer, per_sample, no_rows, accumulation)
    private = PrivateModel(model, loop)
    return private, PrivateOptimizer(optimizer, loop), PrivateLoader(loop, private, dataset)


def _refuse_wrapped(model: object, optimizer: object) -> None:
    """What make_private has given belongs to its run."""
    if isinstance(model, PrivateModel):
        raise SparseDPError(
            "model: got one that make_private gave back, expected a plain module; a new run takes the model inside, "
            "model.module, and is charged for by itself"
        )
    if isinstance(optimizer, PrivateOptimizer):
        raise SparseDPError(
            "optimizer: got one that make_private gave back, which belongs to that run; a new run takes a new "
            "torch.optim optimizer over model.module.parameters()"
        )


def _loader(given: object) -> DataLoader[Any]:
    """A loader whose way to draw batches can be replaced by Poisson sampling."""
    if not isinstance(given, DataLoader):
        raise DataError(
            f"data_loader: got {type(given).__name__}, expected a torch DataLoader; fit and Trainer take data sets"
        )
    if isinstance(given.dataset, IterableDataset):
        raise DataError(
            "data_loader: its IterableDataset has no rows to draw from, and privacy takes each row with the planned "
            "chance; give a map-style data set, with __len__ and __getitem__"
        )
    refuse_picked_rows(given, "data_loader")
    return given


def _batch_size(loader: DataLoader[Any]) -> int:
    if loader.batch_size is None:
        raise DataError("data_loader: got no batch_size, expected a number: the expected size of a batch")
    return loader.batch_size
