"""Evaluation on held-out data. The held-out data is outside the guarantee: these numbers are exact."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, cast

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn
from torch.utils.data import Dataset, Subset, TensorDataset

from sparsedp.core.batch import PerSampleLoss, Rows, check_losses, row_count, to_device
from sparsedp.core.errors import DataError, PrivacyError
from sparsedp.evaluation.metrics import classification_metrics
from sparsedp.sampling.fetching import rows_in_order

TARGET_NAMES = ("labels", "label", "target", "targets", "y")
"""What rows in a dictionary call their classes."""

Metrics = Mapping[str, float]
Evaluator = Callable[[nn.Module], Metrics]
"""Takes the model in evaluation mode, gives named numbers."""


def held_out(
    dataset: Dataset[Any],
    loss: PerSampleLoss,
    *,
    batch_size: int = 1024,
    collate: Callable[[list[Any]], Rows] | None = None,
) -> Evaluator:
    """Mean loss on a data set, and for a classifier its accuracy: of (input, target) rows, or dicts with labels.

    Two classes add AUC, balanced accuracy, sensitivity and specificity.
    """
    size = len(cast("Any", dataset))
    if size == 0:
        raise DataError("eval_dataset is empty; give at least one row, or None")

    @torch.no_grad()
    def evaluate(model: nn.Module) -> Metrics:
        total = 0.0
        outputs: list[Tensor] = []
        targets: list[Tensor] = []
        watched = _WatchOutput(model)
        for rows in rows_in_order(dataset, size, batch_size, collate):
            rows = to_device(rows, next(model.parameters()).device)
            total += float(check_losses(loss(watched, rows), row_count(rows)).double().sum())
            target = _class_targets(rows)
            output = getattr(watched.last, "logits", watched.last)
            if target is not None and isinstance(output, Tensor):
                outputs.append(output.detach().cpu())
                targets.append(target.detach().cpu())
        metrics = {"loss": total / size}
        if outputs:
            metrics |= classification_metrics(torch.cat(outputs), torch.cat(targets))
        return metrics

    return evaluate


@contextmanager
def evaluation_mode(model: nn.Module) -> Iterator[None]:
    """No gradients, no dropout; every module's own mode is put back afterwards."""
    modes = {module: module.training for module in model.modules()}
    model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        for module, mode in modes.items():
            module.training = mode


class _WatchOutput:
    """Calls the model and remembers what it last returned."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self.last: Any = None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self.last = self._model(*args, **kwargs)
        return self.last


def _class_targets(rows: Rows) -> Tensor | None:
    """The second of a pair, or what a dictionary calls its labels: one number a row."""
    found = None
    if isinstance(rows, (tuple, list)) and len(rows) == 2:
        found = rows[1]
    elif isinstance(rows, Mapping):
        found = next((rows[name] for name in TARGET_NAMES if name in rows), None)
    return found if isinstance(found, Tensor) and found.numel() == row_count(rows) else None


def refuse_training_rows(train: Dataset[Any], held_out: Dataset[Any]) -> None:
    """Refuse to evaluate on rows that are trained on, as far as it shows.

    **Privacy.** Metrics are exact and saved with the run: on training rows they are a release without noise.
    **Edge cases.** Found are the same object, parts of it (`Subset`) that share an index, and `TensorDataset`s with a
    row at the same place in memory. Copies of rows are not found.

    Raises:
        PrivacyError: a row is in both.
    """
    mine, theirs = list(_rows_of(train)), list(_rows_of(held_out))
    for one, places in mine:
        for other, others in theirs:
            if one == other and np.intersect1d(places, others).size:
                raise PrivacyError(
                    "eval_dataset holds rows of train_dataset: what is evaluated is outside the guarantee, and exact "
                    "metrics of the training rows would be saved with the run. Give rows that are not trained on, or "
                    "leave it out; to evaluate on training rows nevertheless, pass an evaluate= of your own"
                )


def _rows_of(dataset: Dataset[Any]) -> Iterator[tuple[object, npt.NDArray[np.int64]]]:
    """Ways to tell rows apart: index in the underlying data set, and address of every tensor's row."""
    indices = np.arange(len(cast("Any", dataset)), dtype=np.int64)
    while isinstance(dataset, Subset):
        indices = np.asarray(dataset.indices, dtype=np.int64)[indices]
        dataset = dataset.dataset
    yield id(dataset), indices
    if isinstance(dataset, TensorDataset):
        for tensor in dataset.tensors:
            if tensor.numel() and tensor.stride(0):
                yield (
                    _memory_of(tensor),
                    tensor.data_ptr() + indices * tensor.stride(0) * tensor.element_size(),
                )


def _memory_of(tensor: Tensor) -> object:
    return str(tensor.device), tensor.untyped_storage().data_ptr()
