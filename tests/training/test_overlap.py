"""Evaluation on training rows is refused where it shows; held-out parts of the same tensors are not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from torch.utils.data import DataLoader, Dataset, Subset, TensorDataset

from runs import loss_fn, network, rows
from sparsedp import fit
from sparsedp.errors import PrivacyError
from sparsedp.evaluation import refuse_training_arrays, refuse_training_rows

pytestmark = pytest.mark.usefixtures("checked_once")

INPUTS, TARGETS = rows(1, 40).tensors
DATA = TensorDataset(INPUTS, TARGETS)
CONSTANT = torch.zeros(1).expand(20)


def part(span: slice) -> TensorDataset:
    return TensorDataset(INPUTS[span], TARGETS[span])


OVERLAPPING = {
    "the same object": (DATA, DATA),
    "the same tensors": (DATA, TensorDataset(INPUTS, TARGETS)),
    "copied targets": (DATA, TensorDataset(INPUTS, TARGETS.clone())),
    "one row": (part(slice(21)), part(slice(20, None))),
    "a part of it": (DATA, Subset(DATA, [3])),
    "parts that share a row": (Subset(DATA, range(21)), Subset(DATA, range(20, 40))),
    "a part of a part": (Subset(DATA, range(10, 20)), Subset(Subset(DATA, range(15, 40)), [4])),
    "a part of the same tensors": (Subset(DATA, range(10)), part(slice(9, 12))),
}
APART = {
    "other tensors": (DATA, rows(7, 30)),
    "the two ends": (part(slice(20)), part(slice(20, None))),
    "every other row": (part(slice(0, None, 2)), part(slice(1, None, 2))),
    "parts": (Subset(DATA, range(20)), Subset(DATA, range(20, 40))),
    "a constant target": (TensorDataset(INPUTS[:20], CONSTANT), TensorDataset(INPUTS[20:], CONSTANT)),
}


@pytest.mark.parametrize("case", OVERLAPPING)
def test_rows_in_both_are_refused(case: str) -> None:
    with pytest.raises(PrivacyError, match="eval_dataset holds rows of train_dataset"):
        refuse_training_rows(*OVERLAPPING[case])


@pytest.mark.parametrize("case", APART)
def test_rows_held_out_are_accepted(case: str) -> None:
    refuse_training_rows(*APART[case])


def run(held_out: Dataset, **more: object) -> object:
    return fit(
        network(), DATA, loss_fn, method="dp-sgd", epsilon=8, delta=1e-3, epochs=1, accountant="rdp", progress=False,
        eval_dataset=held_out, **more,
    )  # fmt: skip


def test_fit_refuses_its_training_data_for_evaluation_and_writes_nothing(tmp_path: Path) -> None:
    with pytest.raises(PrivacyError, match="evaluate="):
        run(DATA, run_dir=tmp_path / "run")
    assert list(tmp_path.iterdir()) == []


def test_fit_refuses_a_part_of_its_training_data(tmp_path: Path) -> None:
    with pytest.raises(PrivacyError, match="evaluate="):
        run(Subset(DATA, range(3)), run_dir=tmp_path / "run")
    assert list(tmp_path.iterdir()) == []


def test_an_evaluation_of_the_users_own_is_theirs_to_answer_for() -> None:
    assert run(DATA, evaluate=lambda model: {"one": 1.0}).metrics == {"one": 1.0}


DOUBLE = INPUTS.double()
WIDE, NARROW = INPUTS.double().numpy(), TARGETS.numpy().astype(np.int32)
FRAME, SERIES = pd.DataFrame(WIDE), pd.Series(NARROW)
COLUMNS = np.asfortranarray(WIDE)


def over(X: Any) -> tuple[Any, Any]:
    """Some rows with targets of their own."""
    return X, np.zeros(len(X), dtype=np.int64)


CONVERTED: dict[str, tuple[Any, Any]] = {
    "the same arrays": ((WIDE, NARROW), (WIDE, NARROW)),
    "the same inputs": (over(WIDE), over(WIDE)),
    "the same targets": ((WIDE, NARROW), (WIDE.copy(), NARROW)),
    "a view": (over(WIDE), over(WIDE[3:5])),
    "some columns, by number": (over(COLUMNS), over(COLUMNS[9:12])),
    "a frame": (over(FRAME), over(FRAME)),
    "a part of a frame": (over(FRAME), over(FRAME[3:5])),
    "the array below a frame": (over(FRAME), over(FRAME.to_numpy()[:4])),
    "a series": ((WIDE, SERIES), (WIDE[7:].copy(), SERIES[7:])),
    "double tensors": (over(DOUBLE), over(DOUBLE)),
    "a tensor over an array": (over(WIDE), over(torch.from_numpy(WIDE)[30:])),
    "a data set over an array": (over(WIDE), TensorDataset(torch.from_numpy(WIDE)[1:2])),
    "loaders": (DataLoader(over(WIDE), 4), DataLoader(over(WIDE), 4)),  # type: ignore[arg-type]
}
CONVERTED_APART: dict[str, tuple[Any, Any]] = {
    "the two ends": (over(WIDE[:20]), over(WIDE[20:])),
    "every other row": (over(WIDE[::2]), over(WIDE[1::2])),
    "every other row, stored by column": (over(COLUMNS[::2]), over(COLUMNS[1::2])),
    "the two ends of a frame": (over(FRAME[:20]), over(FRAME[20:])),
    "the two ends, backwards": (over(WIDE[19::-1]), over(WIDE[:19:-1])),
    "a constant target": (
        (WIDE[:20], np.broadcast_to(NARROW[:1], 20)),
        (WIDE[20:], np.broadcast_to(NARROW[:1], 20)),
    ),
}


def trained_and_scored(train: Any, held_out: Any, **more: object) -> object:
    return fit(
        network(), train, loss_fn, method="dp-sgd", epsilon=8, delta=1e-3, epochs=1, accountant="rdp",
        batch_size=8, progress=False, eval_dataset=held_out, **more,
    )  # fmt: skip


@pytest.mark.parametrize("case", CONVERTED)
def test_rows_that_fit_converts_are_compared_as_they_were_given(case: str, tmp_path: Path) -> None:
    with pytest.raises(PrivacyError, match="eval_dataset holds rows of train_dataset"):
        trained_and_scored(*CONVERTED[case], run_dir=tmp_path / "run")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("case", CONVERTED_APART)
def test_parts_of_one_array_are_apart(case: str) -> None:
    assert trained_and_scored(*CONVERTED_APART[case]).metrics["loss"] > 0


def test_wide_frames_are_compared_too() -> None:
    wide = pd.DataFrame({str(place): np.zeros(2) for place in range(3000)})
    refuse_training_arrays([wide[:1]], [wide[1:]])
    with pytest.raises(PrivacyError):
        refuse_training_arrays([wide], [wide[1:]])
