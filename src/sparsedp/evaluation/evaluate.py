"""Evaluation on held-out data. The held-out data is outside the guarantee: these numbers are exact."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

from sparsedp.batch import PerSampleLoss, Rows, check_losses, row_count, to_device
from sparsedp.errors import DataError
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
    threshold: float = 0.0,
) -> Evaluator:
    """Mean loss on a data set, and for a classifier its accuracy: of (input, target) rows, or dicts with labels.

    Two classes add AUC, balanced accuracy, sensitivity and specificity. A loss with a method `on_held_out(model,
    rows)` is scored by that: for models whose training loss says nothing of their predictions.

    Args:
        dataset: the held-out rows.
        loss: one loss per row; it is given the model itself.
        batch_size: rows at once.
        collate: as for `fit`.
        threshold: where a model with one output a row decides for class 1: 0 for logits, see `threshold_of`.
    """
    size = len(cast("Any", dataset))
    if size == 0:
        raise DataError("eval_dataset is empty; give at least one row, or None")
    score: PerSampleLoss = getattr(loss, "on_held_out", loss)

    @torch.no_grad()
    def evaluate(model: nn.Module) -> Metrics:
        total = 0.0
        outputs: list[Tensor] = []
        targets: list[Tensor] = []
        for rows in rows_in_order(dataset, size, batch_size, collate):
            rows = to_device(rows, next(model.parameters()).device)
            with _watching(model) as returned:
                total += float(check_losses(score(model, rows), row_count(rows)).double().sum())
            target = _class_targets(rows)
            output = getattr(returned[0], "logits", returned[0]) if returned else None
            if target is not None and isinstance(output, Tensor):
                outputs.append(output.detach().cpu())
                targets.append(target.detach().cpu())
        metrics = {"loss": total / size}
        if outputs:
            metrics |= classification_metrics(torch.cat(outputs), torch.cat(targets), threshold)
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


@contextmanager
def _watching(model: nn.Module) -> Iterator[list[Any]]:
    """What the model returned last; nothing as long as only its parts are called."""
    returned: list[Any] = []

    def remember(_model: nn.Module, _inputs: Any, output: Any) -> None:
        returned[:] = [output]

    watch = model.register_forward_hook(remember)
    try:
        yield returned
    finally:
        watch.remove()


def _class_targets(rows: Rows) -> Tensor | None:
    """The second of a pair, or what a dictionary calls its labels: one number a row."""
    found = None
    if isinstance(rows, (tuple, list)) and len(rows) == 2:
        found = rows[1]
    elif isinstance(rows, Mapping):
        found = next((rows[name] for name in TARGET_NAMES if name in rows), None)
    return found if isinstance(found, Tensor) and found.numel() == row_count(rows) else None
