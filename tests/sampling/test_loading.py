"""How rows are fetched: the user's own functions are used, and a batch never changes its shape."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import Dataset, TensorDataset

from sparsedp.errors import DataError, PrivacyError
from sparsedp.loading import DataConfig, ShapeValidator
from sparsedp.randomness import SeededRandomness
from sparsedp.sampling import PoissonSampler
from sparsedp_experiments.data import Dense, Split

WORKERS = pytest.mark.parametrize("workers", [0, 1])


def first_rows(dataset: Dataset, **more: object) -> object:
    """The rows of a batch of everything."""
    sampler = PoissonSampler(
        dataset, sampling_rate=1.0, randomness=SeededRandomness(0), loading=DataConfig(**more)
    )
    (micro,) = next(sampler.batches(0, 1))
    return micro.rows


class Doubled(TensorDataset):
    """A subclass with items of its own."""

    def __getitem__(self, index: int) -> tuple[Tensor, ...]:
        return tuple(2 * tensor for tensor in super().__getitem__(index))


class HasABatchMethod(Dataset):
    """As Hugging Face's data sets do, whose `batch` takes a size."""

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> Tensor:
        return torch.tensor([float(index)])

    def batch(self, batch_size: int) -> None:
        raise AssertionError("not a way to fetch rows")


class Words(Dataset):
    """Row i is a sequence of length i + 1."""

    def __init__(self, rows: int) -> None:
        self.rows = rows

    def __len__(self) -> int:
        return self.rows

    def __getitem__(self, index: int) -> Tensor:
        return torch.ones(index + 1)


def to_the_longest(items: list[Tensor]) -> Tensor:
    return pad_sequence(items, batch_first=True)


def to_twelve(items: list[Tensor]) -> Tensor:
    return torch.stack([torch.nn.functional.pad(item, (0, 12 - len(item))) for item in items])


@WORKERS
def test_a_subclass_of_a_tensor_data_set_keeps_its_own_items(workers):
    rows = first_rows(Doubled(torch.arange(5.0)), num_workers=workers)
    assert rows[0].tolist() == [0, 2, 4, 6, 8]


@WORKERS
@pytest.mark.parametrize(
    "dataset",
    [
        TensorDataset(torch.arange(6.0).reshape(6, 1), torch.arange(6)),
        Split(Dense(torch.eye(6)), torch.arange(6)),
    ],
    ids=["tensors", "rows_at"],
)
def test_a_collate_function_is_honoured_also_where_rows_could_be_gathered_at_once(dataset, workers):
    def collate(items: list[tuple[Tensor, Tensor]]) -> Tensor:
        return torch.stack([target for _, target in items]) + 100

    assert first_rows(dataset, collate_fn=collate, num_workers=workers).tolist() == [
        100,
        101,
        102,
        103,
        104,
        105,
    ]


def test_only_rows_at_gathers_rows_not_any_method_called_batch():
    assert first_rows(HasABatchMethod()).flatten().tolist() == [0, 1, 2, 3]


@WORKERS
def test_padding_to_the_longest_row_of_a_batch_is_refused_without_telling_a_length(workers):
    sampler = PoissonSampler(
        Words(12),
        sampling_rate=0.3,
        randomness=SeededRandomness(0),
        loading=DataConfig(collate_fn=to_the_longest, num_workers=workers),
    )
    with pytest.raises(PrivacyError, match="one declared fixed length") as refusal:
        [list(batch) for batch in sampler.batches(0, 20)]
    assert not any(character.isdigit() for character in str(refusal.value))


@WORKERS
def test_padding_to_one_length_is_accepted(workers):
    sampler = PoissonSampler(
        Words(12),
        sampling_rate=0.3,
        randomness=SeededRandomness(0),
        loading=DataConfig(collate_fn=to_twelve, num_workers=workers),
    )
    shapes = {micro.rows.shape[1] for batch in sampler.batches(0, 20) for micro in batch}
    assert shapes == {12}


@pytest.mark.parametrize("times", [0, 2])
def test_a_batch_with_more_or_fewer_rows_than_items_is_refused(times):
    """Two rows of one record would be clipped one by one, and add twice what a record may."""
    with pytest.raises(DataError, match="exactly one row of each item"):
        first_rows(Words(1), collate_fn=lambda items: torch.ones(times * len(items), 2))


def test_a_plain_number_beside_the_tensors_may_not_change_either():
    shapes = ShapeValidator()
    shapes.check({"x": torch.zeros(2, 3), "longest": 3}, 2)
    shapes.check({"x": torch.zeros(4, 3), "longest": 3}, 4)
    with pytest.raises(PrivacyError, match="shape of a row"):
        shapes.check({"x": torch.zeros(2, 3), "longest": 2}, 2)
