"""Held-out evaluation: loss and metrics of a classifier, exact and outside the guarantee."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any, cast

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn
from torch.utils.data import Dataset, Subset, TensorDataset

from sparsedp.batch import Batch, LossFunction, example_count, to_device, validate_losses
from sparsedp.errors import DataError, PrivacyError
from sparsedp.loading import rows_in_order


def threshold_of(criterion: object) -> float:
    """Where one output a row decides for class 1: halfway for losses that pull it to the target itself, else 0.

    Edge cases: A function says nothing of what it takes, so its outputs are taken for logits.
    """
    aims = isinstance(criterion, (nn.BCELoss, nn.MSELoss, nn.L1Loss, nn.SmoothL1Loss, nn.HuberLoss))
    return 0.5 if aims else 0.0


def classification_metrics(outputs: Tensor, targets: Tensor, threshold: float = 0.0) -> dict[str, float]:
    """Accuracy from logits of shape [n, classes], or from one output a row for two classes; empty if neither fits.

    The second class is what lies above the threshold: 0 for logits, 0.5 for probabilities.
    """
    if outputs.dim() == 2 and outputs.shape[1] == 1:
        outputs = outputs.squeeze(1)
    targets = targets.reshape(-1)
    if outputs.shape[0] != targets.shape[0] or outputs.dim() > 2:
        return {}
    if outputs.dim() == 2:
        if targets.is_floating_point():
            return {}
        predicted = outputs.argmax(dim=1)
        scores = outputs[:, 1] - outputs[:, 0] if outputs.shape[1] == 2 else None
    else:
        if not bool(((targets == 0) | (targets == 1)).all()):
            return {}
        predicted, scores = (outputs > threshold).long(), outputs
    actual = targets.long()
    metrics = {"accuracy": float((predicted == actual).sum()) / len(actual)}
    positive = (actual == 1).cpu().numpy()
    if scores is not None and positive.any() and not positive.all():
        from sklearn.metrics import balanced_accuracy_score, recall_score, roc_auc_score

        found = (predicted == 1).cpu().numpy()
        metrics |= {
            "auc": float(roc_auc_score(positive, score_ranks(scores))),
            "balanced_accuracy": float(balanced_accuracy_score(positive, found)),
            "sensitivity": float(recall_score(positive, found)),
            "specificity": float(recall_score(~positive, ~found)),
        }
    return metrics


def score_ranks(scores: Tensor) -> npt.NDArray[Any]:
    """Each score's place among the different ones, NaN highest: scikit-learn refuses scores that are not finite."""
    _, ranks = torch.unique(scores.double(), return_inverse=True)
    return np.asarray(ranks.cpu())


TARGET_NAMES = ("labels", "label", "target", "targets", "y")
"""What rows in a dictionary call their classes."""

Metrics = Mapping[str, float]
MetricFunctions = Mapping[str, Callable[[Tensor, Tensor], float]]
"""Numbers to watch, by name: each is given all outputs and all targets of the held-out data."""

Evaluator = Callable[[nn.Module], Metrics]
"""Takes the model in evaluation mode, gives named numbers."""


def held_out(
    dataset: Dataset[Any],
    loss: LossFunction,
    *,
    batch_size: int = 1024,
    collate_fn: Callable[[list[Any]], Batch] | None = None,
    threshold: float = 0.0,
    metrics: MetricFunctions | None = None,
) -> Evaluator:
    """Mean loss on a data set, and for a classifier its accuracy: of (input, target) rows, or dicts with labels.

    Two classes add AUC, balanced accuracy, sensitivity and specificity. A loss with a method `on_held_out(model,
    rows)` is scored by that: for models whose training loss says nothing of their predictions.

    Args:
        dataset: the held-out rows.
        loss: one loss per row; it is given the model itself.
        batch_size: rows at once.
        collate_fn: as for `fit`.
        threshold: where a model with one output a row decides for class 1: 0 for logits, see `threshold_of`.
        metrics: further numbers by name, each a function of all outputs and all targets.
    """
    size = len(cast("Any", dataset))
    if size == 0:
        raise DataError("eval_dataset is empty; give at least one row, or None")
    score: LossFunction = getattr(loss, "on_held_out", loss)

    @torch.no_grad()
    def evaluate(model: nn.Module) -> Metrics:
        total, returned = 0.0, list[Any]()
        outputs, targets = list[Tensor](), list[Tensor]()
        watch = model.register_forward_hook(lambda _model, _inputs, output: returned.append(output))
        try:
            for rows in rows_in_order(dataset, size, batch_size, collate_fn):
                rows = to_device(rows, next(model.parameters()).device)
                returned.clear()  # nothing is returned where a loss calls parts of the model
                total += float(validate_losses(score(model, rows), example_count(rows)).double().sum())
                target = _class_targets(rows)
                output = getattr(returned[-1], "logits", returned[-1]) if returned else None
                if target is not None and isinstance(output, Tensor):
                    outputs.append(output.detach().cpu())
                    targets.append(target.detach().cpu())
        finally:
            watch.remove()
        found = {"loss": total / size}
        if outputs:
            every, wanted = torch.cat(outputs), torch.cat(targets)
            found |= classification_metrics(every, wanted, threshold)
            found |= {name: float(function(every, wanted)) for name, function in (metrics or {}).items()}
        elif metrics:
            raise DataError(
                "metrics: the data gives no pair of outputs and targets, expected examples (input, target), or "
                f"dictionaries with one of {', '.join(TARGET_NAMES)}"
            )
        return found

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


def _class_targets(rows: Batch) -> Tensor | None:
    """The second of a pair, or what a dictionary calls its labels: one number a row."""
    if isinstance(rows, Mapping):
        found = next((rows[name] for name in TARGET_NAMES if name in rows), None)
    else:
        found = rows[1] if isinstance(rows, (tuple, list)) and len(rows) == 2 else None
    return found if isinstance(found, Tensor) and found.numel() == example_count(rows) else None


def refuse_training_rows(train: Dataset[Any], held_out: Dataset[Any]) -> None:
    """Refuse to evaluate on rows that are trained on, as far as it shows.

    Formal guarantees: Metrics are exact and saved with the run: on training rows they are a release without noise.
    Edge cases: Found are the same object, parts of it (`Subset`) that share an index, and `TensorDataset`s with a
    row at the same place in memory. Copies of rows are not found.
    """
    theirs = list(_rows_of(held_out))
    for one, places in _rows_of(train):
        if any(one == other and np.intersect1d(places, others).size for other, others in theirs):
            raise _in_both("eval_dataset", "train_dataset")


def refuse_training_arrays(
    train: Sequence[Any],
    held_out: Sequence[Any],
    *,
    names: tuple[str, str] = ("eval_dataset", "train_dataset"),
) -> None:
    """Refuse arrays or frames that are training data, or views of it, as they were given: a conversion copies them.

    Edge cases: Frames are compared column by column, sparse matrices by what they store; of lists only the same
    object is found, and copies of rows are not.
    """
    same = {id(one) for one in train} & {id(one) for one in held_out}
    mine, theirs = ([array for one in given for array in _memory_of(one)] for given in (train, held_out))
    if same or _share_memory(mine, theirs):
        raise _in_both(*names)


def _in_both(held_out: str, train: str) -> PrivacyError:
    own = "; to evaluate on training rows nevertheless, pass an evaluate= of your own"
    return PrivacyError(
        f"{held_out} holds rows of {train}: what is evaluated is outside the guarantee, and exact metrics of the "
        "training rows would be saved with the run. Give rows that are not trained on, or leave it out"
        f"{own if held_out == 'eval_dataset' else ''}"
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
                storage = str(tensor.device), tensor.untyped_storage().data_ptr()
                yield storage, tensor.data_ptr() + indices * tensor.stride(0) * tensor.element_size()


def _memory_of(given: Any) -> Iterator[npt.NDArray[Any]]:
    """Arrays over the memory of what was given, without constants that are spread over all rows."""
    found: list[npt.NDArray[Any]] = [given] if isinstance(given, np.ndarray) else []
    if isinstance(given, Tensor):
        # What NumPy cannot see is not converted either, so that `refuse_training_rows` finds its rows.
        with suppress(TypeError, RuntimeError):
            found = [given.detach().numpy()]
    elif hasattr(given, "columns") and hasattr(given, "to_numpy"):
        found = [np.asarray(given[name].to_numpy()) for name in dict.fromkeys(given.columns)]
    elif hasattr(given, "to_numpy"):
        found = [np.asarray(given.to_numpy())]
    elif isinstance(getattr(given, "data", None), np.ndarray):
        found = [given.data]
    yield from (array for array in found if array.size and array.ndim and array.strides[0])


def _bounds(array: npt.NDArray[Any]) -> tuple[int, int]:
    """The first address of an array, and the one after its last."""
    reach = [stride * (size - 1) for stride, size in zip(array.strides, array.shape, strict=True)]
    low = array.ctypes.data + sum(one for one in reach if one < 0)
    return low, low + sum(map(abs, reach)) + array.itemsize


def _share_memory(mine: Iterable[npt.NDArray[Any]], theirs: Sequence[npt.NDArray[Any]]) -> bool:
    bounds = np.array([_bounds(array) for array in theirs], dtype=np.int64).reshape(-1, 2)
    for array in mine:
        low, high = _bounds(array)
        for place in map(int, np.flatnonzero((bounds[:, 0] < high) & (bounds[:, 1] > low))):
            # Strides that are hard to tell apart are let through.
            with suppress(np.exceptions.TooHardError):
                if np.shares_memory(array, theirs[place], max_work=1_000_000):  # type: ignore[arg-type]
                    return True
    return False
