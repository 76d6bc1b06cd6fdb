"""Losses that other packages average over a batch, taken one example at a time."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader

from sparsedp.batch import Batch, LossFunction, example_count, slice_batch
from sparsedp.errors import SparseDPError
from sparsedp.evaluation import evaluation_mode
from sparsedp.grad_sample.isolation import MADE_UP, made_up
from sparsedp.loading import first_row


def one_by_one(loss_of_batch: Callable[[Any, Batch], Tensor]) -> LossFunction:
    """The loss of each example: what the loss of a batch is for that example alone."""

    def losses(model: Any, batch: Batch) -> Tensor:
        count = example_count(batch)
        if count == 1:
            return loss_of_batch(model, batch).reshape(1)
        return torch.cat([losses(model, slice_batch(batch, slice(i, i + 1))) for i in range(count)])

    return losses


def check_mean(
    model: Any, loss_of_batch: Callable[[Any, Batch], Tensor], loader: DataLoader[Any], name: str
) -> None:
    """Refuse a loss of a batch that is not the mean of its examples' losses, on made-up examples.

    Of the loader's examples the shapes are looked at, and nothing else.
    """
    rows = first_row(loader.dataset, loader.collate_fn)
    with evaluation_mode(model):
        for kind in MADE_UP:
            made = made_up(rows, 3, kind)
            try:
                whole, alone = loss_of_batch(model, made), one_by_one(loss_of_batch)(model, made)
            except Exception:  # not every model takes all made-up examples
                continue
            if not torch.allclose(whole.reshape(()), alone.mean(), rtol=1e-3, atol=1e-5, equal_nan=True):
                raise SparseDPError(
                    f"{name}: its loss of three made-up examples is {float(whole):.6g}, and the mean of their losses "
                    f"one by one {float(alone.mean()):.6g}. It is called one example at a time, so it must give a "
                    "mean over examples that do not see each other: no in-batch negatives, no batch statistics"
                )
            return
