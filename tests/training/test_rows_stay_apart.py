"""Rows that look different in other company are refused before a run starts, or in its first odd batch."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

from runs import FEATURES, ROWS, a_plan, loss_fn, network, sgd
from sparsedp.errors import PrivacyError
from sparsedp.loading import DataConfig
from sparsedp.methods import get_method
from sparsedp.training.trainer import Trainer

Items = list[tuple[Tensor, int]]


class Sequences(Dataset):
    """Sequences of vectors, the first of length 2, one of them longer."""

    def __init__(self, long_row: int | None) -> None:
        self.long_row = long_row

    def __len__(self) -> int:
        return ROWS

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        generator = torch.Generator().manual_seed(index)
        length = 10 if index == self.long_row else 2
        return torch.randn(length, FEATURES, generator=generator), index % 3


class Pooled(nn.Module):
    """Classifies the mean over the sequence, so padding counts."""

    def __init__(self) -> None:
        super().__init__()
        self.head = network()

    def forward(self, inputs: Tensor) -> Tensor:
        return self.head(inputs.mean(dim=1))


def stacked(items: Items, length: int | None = None) -> tuple[Tensor, Tensor]:
    longest = max(len(x) for x, _ in items) if length is None else length
    padded = [nn.functional.pad(x, (0, 0, 0, longest - len(x))) for x, _ in items]
    return torch.stack(padded), torch.tensor([y for _, y in items])


def fixed(items: Items) -> tuple[Tensor, Tensor]:
    return stacked(items, 10)


def centred(items: Items) -> tuple[Tensor, Tensor]:
    inputs, targets = fixed(items)
    return inputs - inputs.mean(dim=0), targets


def with_the_one_before(items: Items) -> tuple[Tensor, Tensor]:
    inputs, targets = fixed(items)
    inputs[2:] = inputs[2:] + inputs[1:-1]
    return inputs, targets


def mixup(items: Items) -> tuple[Tensor, Tensor]:
    inputs, targets = fixed(items)
    return 0.7 * inputs + 0.3 * inputs[torch.randperm(len(inputs))], targets


def run(collate: Callable[[Items], object], long_row: int | None, workers: int = 0) -> int:
    row = get_method("dp-sgd")
    trainer = Trainer(
        Pooled(),
        Sequences(long_row),
        loss_fn,
        plan=a_plan(row),
        optimizer=sgd,
        data=DataConfig(collate_fn=collate, num_workers=workers),
        seed=0,
    )
    for batch in trainer:
        trainer.step(batch)
    return trainer.position


@pytest.mark.parametrize(
    ("collate", "words"),
    [
        (stacked, "fixed length"),
        (centred, "other rows are in the batch"),
        (with_the_one_before, "other rows are in the batch"),
        (mixup, "each time"),
    ],
    ids=["padding", "centring", "later rows alone", "mixup"],
)
def test_a_collate_that_mixes_the_first_rows_is_refused_at_the_start(collate, words):
    with pytest.raises(PrivacyError, match=words):
        run(collate, long_row=3)


@pytest.mark.parametrize("workers", [0, 1])
def test_a_long_record_beyond_the_first_rows_is_found_in_its_batch(workers):
    with pytest.raises(PrivacyError, match="fixed length"):
        run(stacked, long_row=40, workers=workers)


@pytest.mark.parametrize("workers", [0, 1])
def test_padding_to_a_fixed_length_trains(workers):
    assert run(fixed, long_row=40, workers=workers) == 15


class Gathered(Sequences):
    """Gathers rows at once, and centres the batch."""

    def rows_at(self, indices: Tensor) -> object:
        return centred([self[int(i)] for i in indices])


def test_a_data_set_that_mixes_the_rows_it_gathers_is_refused():
    row = get_method("dp-sgd")
    with pytest.raises(PrivacyError, match="rows_at makes something else"):
        Trainer(Pooled(), Gathered(None), loss_fn, plan=a_plan(row), optimizer=sgd, seed=0)
