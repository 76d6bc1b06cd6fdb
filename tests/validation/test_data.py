"""Items come from their own unit's rows and collates keep them apart: what mixes is refused, what does not trains."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import ConcatDataset, Dataset, Subset, TensorDataset

from runs import FEATURES, ROWS, a_plan, loss_fn, network, sgd
from sparsedp.errors import PrivacyError
from sparsedp.loading import DataConfig
from sparsedp.methods import get_method
from sparsedp.training.trainer import Trainer
from sparsedp.validation.data import validate_items

N = 200
X = torch.randn(N, 5, generator=torch.Generator().manual_seed(0))
Y = torch.arange(N) % 3
PEOPLE = np.arange(N) // 4


class Items(Dataset[Any]):
    """A data set from a function of itself and the index; it holds rows in every kind of container."""

    def __init__(self, make: Callable[[Any, int], Any], **more: Any) -> None:
        self.make = make
        self.x, self.y = X, Y
        self.array, self.labels = X.numpy().copy(), Y.tolist()
        self.pairs = tuple(zip(X.tolist(), Y.tolist(), strict=True))
        self.columns = {"x": X.numpy().copy(), "y": Y.tolist()}
        self.by_index = {i: (X[i], int(Y[i])) for i in range(N)}
        self.offsets = np.arange(0, 2 * N + 1, 2)
        self.stream = np.arange(2 * N, dtype=np.float32)
        self.words = [f"word {i}" for i in range(1000)]
        self.base = TensorDataset(X.clone(), Y.clone())
        self.__dict__.update(more)

    def __len__(self) -> int:
        return N

    def __getitem__(self, index: int) -> Any:
        return self.make(self, index)


def nearest(own: Tensor, rows: Tensor) -> Tensor:
    return rows[int((rows - own).norm(dim=1).argsort()[1])]


class Mixup(TensorDataset):
    """The usual way: another row by `super`."""

    def __getitem__(self, index: int) -> Any:
        x, y = super().__getitem__(index)
        other, _ = super().__getitem__(int(torch.randint(len(self), ())))
        return 0.7 * x + 0.3 * other, y


class Around(Dataset[Any]):
    """A wrapper that makes an item of another data set's."""

    def __init__(self, base: Dataset[Any], make: Callable[[Any, int], Any]) -> None:
        self.base, self.make = base, make

    def __len__(self) -> int:
        return len(self.base)  # type: ignore[arg-type]

    def __getitem__(self, index: int) -> Any:
        return self.make(self.base, index)


class Store:
    """No data set, but holds its rows, and leads back to itself."""

    def __init__(self) -> None:
        self.x, self.y, self.itself = X.clone(), Y.tolist(), self

    def get(self, index: int) -> int:
        return self.itself.y[index]


SOME = Subset(TensorDataset(X, Y), range(150))


FRAME = pd.DataFrame({"a": X[:, 0].numpy(), "y": Y.numpy()}, index=[f"id {i}" for i in range(N)])


MIXING: dict[str, Callable[[], Dataset[Any]]] = {
    "mixup by super": lambda: Mixup(X, Y),
    "mixup through itself": lambda: Items(lambda d, i: (d.x[i], d[(i * 7 + 3) % N]) if i % 2 == 0 else d.x[i]),
    "a random negative, array": lambda: Items(lambda d, i: (d.array[i], d.array[np.random.randint(N)])),  # noqa: NPY002
    "a random label, list": lambda: Items(lambda d, i: (d.x[i], random.choice(d.labels))),
    "the label of the next": lambda: Items(lambda d, i: (d.x[i], d.y[(i + 1) % N])),
    "a nearest neighbour, tensor": lambda: Items(lambda d, i: (d.x[i], nearest(d.x[i], d.x))),
    "the mean of an array": lambda: Items(lambda d, i: d.array[i] - d.array.mean(0)),
    "the mean of a tensor": lambda: Items(lambda d, i: d.x[i] - d.x.mean(0)),
    "a tensor that shares an array's memory": lambda: Items(lambda d, i: torch.from_numpy(d.array)[[i, (i + 1) % N]]),
    "an array turned into a tensor": lambda: Items(lambda d, i: torch.tensor(d.array).mean(0)),
    "same class": lambda: Items(lambda d, i: random.choice([j for j, y in enumerate(d.labels) if y == d.labels[i]])),
    "a mask": lambda: Items(lambda d, i: d.x[d.y == d.y[i]][0]),
    "columns in a dict": lambda: Items(lambda d, i: (d.columns["x"][i], d.columns["y"][i - 1])),
    "a dict by index": lambda: Items(lambda d, i: (d.by_index[i], d.by_index.get((i + 5) % N))),
    "an object that holds them": lambda: Items(lambda d, i: (d.store.y[i], d.store.y[i - 1]), store=Store()),
    "a wrapper with a random other": lambda: Around(TensorDataset(X, Y), lambda b, i: (b[i], b[random.randrange(N)])),
    "a wrapper with the first": lambda: Around(ConcatDataset([SOME, SOME]), lambda b, i: (b[i], b[0])),
    "a wrapper that reads beside": lambda: Around(SOME, lambda b, i: (b[i], b.dataset.tensors[0].mean(0))),
    "one of many rows, which only a second look tells": lambda: Items(
        lambda d, i: (d.x[i], d.many[7919 * i + random.randrange(1000)]), many=TensorDataset(torch.arange(10**7))
    ),
    "a frame's row before": lambda: Items(lambda d, i: (d.frame.iloc[i], d.frame.iloc[i - 1]), frame=FRAME),
    "a frame's random row": lambda: Items(lambda d, i: d.frame.sample(1), frame=FRAME),
    "a frame's mask": lambda: Items(lambda d, i: d.frame[d.frame.y == 1].iloc[0], frame=FRAME),
    "the mean of a frame": lambda: Items(lambda d, i: d.frame.values.mean(0), frame=FRAME),
    "a row twice": lambda: Subset(TensorDataset(X, Y), [0, 0, *range(1, 100)]),
}  # fmt: skip

GROUPS = TensorDataset(torch.randn(5 * N, 2))

SOUND: dict[str, Callable[[], Dataset[Any]]] = {
    "tensors": lambda: Items(lambda d, i: (d.x[i], d.y[i])),
    "negative zero": lambda: Items(lambda d, i: (d.x[i - N], d.y[i : i + 1], d.array[i, 2:4])),
    "an array, a list and a tuple": lambda: Items(lambda d, i: (d.array[i], d.labels[i], d.pairs[i])),
    "a tensor that shares memory, own row": lambda: Items(lambda d, i: torch.from_numpy(d.array)[i]),
    "columns in a dict": lambda: Items(lambda d, i: (d.columns["x"][i], d.columns["y"][i])),
    "a dict by index": lambda: Items(lambda d, i: d.by_index[i]),
    "an object that holds them": lambda: Items(lambda d, i: (d.store.x[i], d.store.get(i)), store=Store()),
    "lengths": lambda: Items(lambda d, i: (d.x[i] / len(d.x), d.array.shape[0], len(d.labels), d.x.size(0))),
    "a vocabulary": lambda: Items(lambda d, i: (d.x[i], d.words[int(d.y[i])], d.words[(i * 31) % 1000])),
    "offsets": lambda: Items(lambda d, i: d.stream[d.offsets[i] : d.offsets[i + 1]]),
    "augmentation": lambda: Items(lambda d, i: (d.x[i] + torch.randn(5), random.random())),
    "a transform": lambda: Items(lambda d, i: d.transform(d.x[i]), transform=torch.nn.LayerNorm(5)),
    "a subset of a subset": lambda: Subset(Subset(TensorDataset(X, Y), range(20, 180)), range(10, 90)),
    "two data sets in a row": lambda: ConcatDataset([TensorDataset(X), TensorDataset(X + 1)]),
    "a wrapper with augmentation": lambda: Around(SOME, lambda b, i: (b[i][0] + torch.randn(5), b[i][1])),
    "a wrapper that reads beside": lambda: Around(TensorDataset(X, Y), lambda b, i: (b[i], b.tensors[1][i])),
    "a frame by place": lambda: Items(lambda d, i: d.frame.iloc[i].to_numpy(), frame=FRAME),
    "a frame's columns": lambda: Items(
        lambda d, i: (d.frame.a.iloc[i], d.frame["y"].iloc[i], len(d.frame), d.frame.shape), frame=FRAME
    ),
    "a frame's cells": lambda: Items(lambda d, i: d.frame.at[f"id {i}", "a"] + d.frame.iat[i, 1], frame=FRAME),
    "some columns of a frame": lambda: Items(lambda d, i: d.frame[["a", "y"]].iloc[i], frame=FRAME),
    "rows of a group": lambda: Items(lambda d, i: [d.groups[j] for j in range(5 * i, 5 * i + 5)], groups=GROUPS),
}  # fmt: skip


@pytest.mark.parametrize("case", MIXING)
def test_a_data_set_that_makes_items_of_others_rows_is_refused(case: str) -> None:
    with pytest.raises(PrivacyError, match=r"which belong to other units.*unit_ids"):
        validate_items(MIXING[case]())


@pytest.mark.parametrize("case", SOUND)
def test_a_data_set_that_reads_its_own_rows_is_accepted(case: str, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO", logger="sparsedp"):
        validate_items(SOUND[case]())
    assert caplog.text == ""


def test_memory_mapped_rows_are_watched(tmp_path: Any) -> None:
    np.save(tmp_path / "x.npy", X.numpy())
    mapped = np.load(tmp_path / "x.npy", mmap_mode="r")
    validate_items(Items(lambda d, i: torch.as_tensor(np.array(d.map[i])), map=mapped))
    with pytest.raises(PrivacyError, match=r"Items\.map was read at one other row"):
        validate_items(Items(lambda d, i: (d.map[i], d.map[N - 1 - i]), map=mapped))


def test_rows_of_the_same_person_are_welcome() -> None:
    positive = Items(lambda d, i: (d.x[i], d.x[4 * (i // 4) + random.randrange(4)]))
    validate_items(positive, PEOPLE)
    with pytest.raises(PrivacyError, match="other row"):
        validate_items(positive)


def test_the_refusal_names_the_attribute_and_no_row() -> None:
    with pytest.raises(PrivacyError, match=r"Items\.array was read at several other rows,") as refused:
        validate_items(Items(lambda d, i: d.array[max(0, i - 2) : i + 3]))
    assert not any(character.isdigit() for character in str(refused.value))


def test_the_data_set_itself_is_left_alone_and_its_values_are_not_looked_at() -> None:
    class Silent(float):
        def __eq__(self, other: object) -> bool:
            raise AssertionError("a value was compared")

        __hash__ = float.__hash__

    data = Items(lambda d, i: (d.held[i], d.x[i]), held=[Silent(i) for i in range(N)])
    before = dict(vars(data))
    validate_items(data)
    assert all(vars(data)[name] is value for name, value in before.items())
    assert type(data) is Items


def test_what_cannot_be_watched_is_said_without_its_words(caplog: pytest.LogCaptureFixture) -> None:
    def odd(data: Any, index: int) -> Any:
        if type(data.labels) is not list:
            raise RuntimeError("the patient is Ada")
        return data.x[index]

    with caplog.at_level("INFO", logger="sparsedp"):
        validate_items(Items(odd))
    assert "RuntimeError" in caplog.text
    assert "Ada" not in caplog.text


# Collates: rows that look different in other company.

Rows = list[tuple[Tensor, int]]


class Sequences(Dataset[Any]):
    """Sequences of vectors, the first of length 2, one of them longer."""

    def __init__(self, long_row: int | None) -> None:
        self.long_row = long_row

    def __len__(self) -> int:
        return ROWS

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        generator = torch.Generator().manual_seed(index)
        length = 10 if index == self.long_row else 2
        return torch.randn(length, FEATURES, generator=generator), index % 3


class Mean(nn.Module):
    """The mean over the sequence, so padding counts."""

    def forward(self, inputs: Tensor) -> Tensor:
        return inputs.mean(dim=1)


def stacked(items: Rows, length: int | None = None) -> tuple[Tensor, Tensor]:
    longest = max(len(x) for x, _ in items) if length is None else length
    padded = [nn.functional.pad(x, (0, 0, 0, longest - len(x))) for x, _ in items]
    return torch.stack(padded), torch.tensor([y for _, y in items])


def fixed(items: Rows) -> tuple[Tensor, Tensor]:
    return stacked(items, 10)


def centred(items: Rows) -> tuple[Tensor, Tensor]:
    inputs, targets = fixed(items)
    return inputs - inputs.mean(dim=0), targets


def with_the_one_before(items: Rows) -> tuple[Tensor, Tensor]:
    inputs, targets = fixed(items)
    inputs[2:] = inputs[2:] + inputs[1:-1]
    return inputs, targets


def mixup(items: Rows) -> tuple[Tensor, Tensor]:
    inputs, targets = fixed(items)
    return 0.7 * inputs + 0.3 * inputs[torch.randperm(len(inputs))], targets


def run(dataset: Dataset[Any], **more: Any) -> int:
    plan = a_plan(get_method("dp-sgd"))
    model = nn.Sequential(Mean(), network())
    trainer = Trainer(model, dataset, loss_fn, plan=plan, optimizer=sgd, seed=0, data=DataConfig(**more))
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
        run(Sequences(3), collate_fn=collate)


@pytest.mark.parametrize("workers", [0, 1])
def test_a_long_record_beyond_the_first_rows_is_found_in_its_batch(workers):
    with pytest.raises(PrivacyError, match="fixed length") as refusal:
        run(Sequences(40), collate_fn=stacked, num_workers=workers)
    assert not any(character.isdigit() for character in str(refusal.value))


@pytest.mark.parametrize("workers", [0, 1])
def test_padding_to_a_fixed_length_trains(workers):
    assert run(Sequences(40), collate_fn=fixed, num_workers=workers) == 15


class Gathered(Sequences):
    """Gathers rows at once, and centres the batch."""

    def rows_at(self, indices: Tensor) -> object:
        return centred([self[int(i)] for i in indices])


def test_a_data_set_that_mixes_the_rows_it_gathers_is_refused():
    with pytest.raises(PrivacyError, match="rows_at makes something else"):
        run(Gathered(None))
