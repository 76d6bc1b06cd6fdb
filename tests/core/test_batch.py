"""Micro-batches and per-sample losses: what is accepted, and what an error says."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from sparsedp.core.batch import MicroBatch, check_losses, row_count, select_rows, supervised
from sparsedp.core.errors import DataError, SparseDPError


@pytest.mark.parametrize(
    "rows",
    [
        torch.zeros(3, 2),
        (torch.zeros(3, 2), torch.zeros(3)),
        {"inputs": torch.zeros(3, 2), "more": [torch.zeros(3), torch.zeros(3, 1)]},
    ],
    ids=["tensor", "pair", "nested"],
)
def test_rows_are_counted_and_selected_in_any_structure(rows):
    assert row_count(rows) == MicroBatch(rows).row_count == 3
    assert row_count(select_rows(rows, slice(1, 3))) == 2
    assert row_count(select_rows(rows, slice(0, 0))) == 0


@pytest.mark.parametrize(
    ("rows", "complaint"),
    [
        ((torch.zeros(3), torch.zeros(2)), r"first axis.*\(3,\), \(2,\)"),
        ((torch.zeros(3), torch.tensor(1.0)), "first axis"),
        ((), "no tensor"),
        ("text", "no tensor"),
    ],
)
def test_rows_that_do_not_line_up_are_refused(rows, complaint):
    with pytest.raises(DataError, match=complaint):
        MicroBatch(rows)


@pytest.mark.parametrize("units", [[0, 0, 1, 2], [0, 1, 2, 3], [0, 0, 0, 0]])
def test_units_whole_and_in_order_are_accepted(units):
    assert MicroBatch(torch.zeros(4, 1), torch.tensor(units)).row_count == 4


def test_an_empty_batch_with_units_is_accepted():
    assert MicroBatch(torch.zeros(0, 1), torch.zeros(0, dtype=torch.int64)).row_count == 0


@pytest.mark.parametrize(
    "units",
    [[1, 1, 2, 3], [0, 2, 2, 3], [0, 1, 0, 1], [0, 1, 2], [0.0, 0.0, 1.0, 1.0]],
    ids=["starts at 1", "skips", "split unit", "too short", "not integer"],
)
def test_units_that_could_be_clipped_twice_are_refused(units):
    with pytest.raises(DataError, match="units"):
        MicroBatch(torch.zeros(4, 1), torch.tensor(units))


def test_one_loss_per_row_is_accepted_also_as_a_column():
    losses = torch.arange(3.0)
    assert torch.equal(check_losses(losses, 3), losses)
    assert torch.equal(check_losses(losses.unsqueeze(1), 3), losses)


@pytest.mark.parametrize("shape", [(), (1,), (4,), (3, 2), (1, 3)])
def test_a_reduced_loss_is_refused_with_the_remedy(shape):
    with pytest.raises(SparseDPError, match='reduction="none"'):
        check_losses(torch.zeros(shape), 3)


def test_a_loss_that_is_no_tensor_is_refused():
    with pytest.raises(SparseDPError, match="float"):
        check_losses(1.0, 3)


def test_supervised_pairs_inputs_with_targets():
    criterion = nn.CrossEntropyLoss(reduction="none")
    model = nn.Linear(2, 3)
    inputs, targets = torch.ones(4, 2), torch.tensor([0, 1, 2, 0])
    losses = supervised(criterion)(model, (inputs, targets))
    assert torch.equal(losses, criterion(model(inputs), targets))


@pytest.mark.parametrize("rows", [torch.zeros(2), {"inputs": torch.zeros(2)}, (torch.zeros(2),)])
def test_supervised_refuses_other_batches_and_names_the_way_out(rows):
    with pytest.raises(DataError, match="PerExampleLoss"):
        supervised(nn.MSELoss(reduction="none"))(nn.Identity(), rows)
