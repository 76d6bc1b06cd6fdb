"""Evaluation on training rows is refused where it shows; held-out parts of the same tensors are not."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from runs import loss_fn, network, rows
from torch.utils.data import Dataset, Subset, TensorDataset

from sparsedp import fit
from sparsedp.core.errors import PrivacyError
from sparsedp.evaluation.evaluate import refuse_training_rows

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
        run(DATA, out=tmp_path / "run")
    assert list(tmp_path.iterdir()) == []


def test_an_evaluation_of_the_users_own_is_theirs_to_answer_for() -> None:
    assert run(DATA, evaluate=lambda model: {"one": 1.0}).metrics == {"one": 1.0}
