"""Features of a frozen network, made once, for a head that is trained on them."""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset, TensorDataset

from sparsedp.batch import to_device
from sparsedp.errors import DataError, ModelError
from sparsedp.evaluation.evaluate import evaluation_mode
from sparsedp.randomness import SEED_BYTES, own_generators
from sparsedp.sampling.fetching import Collate, rows_in_order
from sparsedp.sampling.shapes import FixedShapes
from sparsedp.validation.data import validate_collate

MADE_UP_ROWS = 8
TOLERANCE = 1e-4
"""What rounding in another batch may change, as a share of the largest feature. Mixing changes far more."""


def extract_features(
    body: nn.Module, dataset: Dataset[Any], *, batch_size: int = 256, collate: Collate | None = None
) -> TensorDataset:
    """What a frozen network makes of every input, with the targets: a data set in memory to train a head on.

    >>> features = extract_features(body, dataset)  # doctest: +SKIP
    >>> result = fit(head, features, nn.CrossEntropyLoss(reduction="none"), epsilon=3)  # doctest: +SKIP

    Args:
        body: runs in evaluation mode without gradients, on the device of its parameters.
        dataset: of (input, target) tensors; the order stays, so `units` of the rows stay as they are.
        batch_size: how many rows run at once.
        collate: makes a batch of items, as in a `DataLoader`.

    **Privacy.** Features are private rows in another form. Training on them costs what training on the rows costs, as
    each is computed from its own row by a public function: that is checked on made-up rows, together and one by one.
    **Edge cases.** A data set that augments is read once, so every epoch sees the same features.

    Raises:
        DataError: the data set has no rows, or gives something else than (input, target) tensors.
        ModelError: the body mixes rows, draws random numbers, or remembers earlier rows.
        PrivacyError: `collate` mixes rows.
    """
    rows = len(cast("Any", dataset))
    validate_collate(dataset, collate, FixedShapes())
    tensors = [(_pair(part)) for part in rows_in_order(dataset, rows, batch_size, collate)]
    if not tensors:
        raise DataError("extract_features: got a data set without rows, expected at least one")
    with evaluation_mode(body):
        _check_rows_are_computed_alone(body, tensors[0][0])
        features = torch.cat([_run(body, inputs) for inputs, _ in tensors])
    return TensorDataset(features, torch.cat([targets for _, targets in tensors]))


def _pair(rows: Any) -> tuple[Tensor, Tensor]:
    if not isinstance(rows, (tuple, list)) or len(rows) != 2 or not all(isinstance(x, Tensor) for x in rows):
        raise DataError(
            f"extract_features: got a batch of type {type(rows).__name__}, expected (input, target), both tensors; "
            "choose them in the data set or by collate"
        )
    return rows[0], rows[1]


def _run(body: nn.Module, inputs: Tensor) -> Tensor:
    device = next((tensor.device for tensor in body.parameters()), torch.device("cpu"))
    with own_generators(bytes(SEED_BYTES), device):
        found = body(to_device(inputs, device))
    if not isinstance(found, Tensor) or found.shape[:1] != inputs.shape[:1]:
        got = tuple(found.shape) if isinstance(found, Tensor) else type(found).__name__
        raise ModelError(
            f"extract_features: the body gave {got} for {len(inputs)} rows, expected a tensor with one entry a row"
        )
    return found.cpu()


def _check_rows_are_computed_alone(body: nn.Module, like: Tensor) -> None:
    """Compare the features of made-up rows, of the inputs' shape and type, in company, alone and in company again."""
    made_up = _made_up(like)
    together = _run(body, made_up)
    alone = torch.cat([_run(body, made_up[i : i + 1]) for i in range(len(made_up))])
    again = _run(body, made_up.flip(0)).flip(0)
    room = TOLERANCE * float(together.abs().max()) if together.numel() else 0.0
    for other in (alone, again):
        if not torch.allclose(together.double(), other.double(), rtol=0.0, atol=room, equal_nan=True):
            raise ModelError(
                "extract_features: the body makes something else of a row when other rows are in the batch or came "
                "before, so it mixes rows, draws random numbers or remembers; expected a fixed function of each row"
            )


def _made_up(like: Tensor) -> Tensor:
    """Public rows: normal numbers, or zeros and ones for whole numbers, which any table of two entries holds."""
    shape, generator = (MADE_UP_ROWS, *like.shape[1:]), torch.Generator().manual_seed(0)
    if like.is_floating_point():
        return torch.randn(shape, generator=generator).to(like.dtype)
    return torch.randint(0, 2, shape, generator=generator).to(like.dtype)
