"""Micro-batches and per-sample losses: what is accepted, and what an error says."""

from __future__ import annotations

import functools

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from sparsedp.batch import MicroBatch, example_count, from_criterion, slice_batch, unreduced, validate_losses
from sparsedp.errors import DataError, SparseDPError


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
    assert example_count(rows) == MicroBatch(rows).example_count == 3
    assert example_count(slice_batch(rows, slice(1, 3))) == 2
    assert example_count(slice_batch(rows, slice(0, 0))) == 0


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
    assert MicroBatch(torch.zeros(4, 1), torch.tensor(units)).example_count == 4


def test_an_empty_batch_with_units_is_accepted():
    assert MicroBatch(torch.zeros(0, 1), torch.zeros(0, dtype=torch.int64)).example_count == 0


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
    assert torch.equal(validate_losses(losses, 3), losses)
    assert torch.equal(validate_losses(losses.unsqueeze(1), 3), losses)


@pytest.mark.parametrize("shape", [(), (1,), (4,), (3, 2), (1, 3)])
def test_a_reduced_loss_is_refused_with_the_remedy(shape):
    with pytest.raises(SparseDPError, match='reduction="none"'):
        validate_losses(torch.zeros(shape), 3)


def test_a_loss_that_is_no_tensor_is_refused():
    with pytest.raises(SparseDPError, match="float"):
        validate_losses(1.0, 3)


def test_supervised_pairs_inputs_with_targets():
    criterion = nn.CrossEntropyLoss(reduction="none")
    model = nn.Linear(2, 3)
    inputs, targets = torch.ones(4, 2), torch.tensor([0, 1, 2, 0])
    losses = from_criterion(criterion)(model, (inputs, targets))
    assert torch.equal(losses, criterion(model(inputs), targets))


@pytest.mark.parametrize("rows", [torch.zeros(2), {"inputs": torch.zeros(2)}, (torch.zeros(2),)])
def test_supervised_refuses_other_batches_and_names_the_way_out(rows):
    with pytest.raises(DataError, match="PerExampleLoss"):
        from_criterion(nn.MSELoss(reduction="none"))(nn.Identity(), rows)


CRITERIA = {
    "classes": (nn.CrossEntropyLoss, torch.randn(4, 3), torch.tensor([0, 1, 2, 0])),
    "classes of every token": (nn.CrossEntropyLoss, torch.randn(4, 3, 5), torch.randint(0, 3, (4, 5))),
    "squares": (nn.MSELoss, torch.randn(4, 2), torch.randn(4, 2)),
    "logits": (nn.BCEWithLogitsLoss, torch.randn(4), torch.rand(4)),
    "log-likelihoods": (nn.NLLLoss, torch.randn(4, 3).log_softmax(1), torch.tensor([0, 1, 2, 0])),
    "divergences": (nn.KLDivLoss, torch.randn(4, 3).log_softmax(1), torch.randn(4, 3).softmax(1)),
}


@pytest.mark.parametrize("reduction", ["mean", "sum", "batchmean"])
@pytest.mark.parametrize("name", CRITERIA)
@pytest.mark.filterwarnings("ignore:reduction. 'mean' divides")
def test_a_criterion_is_taken_apart_into_what_it_gives_for_each_example_alone(name, reduction):
    kind, output, target = CRITERIA[name]
    if reduction == "batchmean" and kind is not nn.KLDivLoss:
        pytest.skip("only KLDivLoss has it")
    criterion = kind(reduction=reduction)
    losses = unreduced(criterion)(output, target)
    alone = torch.stack([criterion(output[i : i + 1], target[i : i + 1]) for i in range(4)])
    torch.testing.assert_close(losses, alone)
    whole = criterion(output, target)
    torch.testing.assert_close(losses.sum() if reduction == "sum" else losses.mean(), whole)
    assert criterion.reduction == reduction  # a copy does not reduce, not the user's own


@pytest.mark.parametrize(
    "criterion",
    [F.cross_entropy, functools.partial(F.cross_entropy, reduction="sum"), nn.CrossEntropyLoss()],
    ids=["function", "partial", "module"],
)
def test_functions_are_taken_apart_as_modules_are(criterion):
    output, target = torch.randn(4, 3), torch.tensor([0, 1, 2, 0])
    expected = F.cross_entropy(output, target, reduction="none")
    assert torch.equal(unreduced(criterion)(output, target), expected)


def test_class_weights_and_ignored_targets_keep_their_meaning_for_an_example():
    weight, output = torch.tensor([1.0, 2.0, 5.0]), torch.randn(3, 3)
    target = torch.tensor([0, 2, -100])
    plain = F.cross_entropy(output, target, reduction="none")
    weighted = unreduced(nn.CrossEntropyLoss(weight=weight))(output, target)
    torch.testing.assert_close(weighted, plain * torch.tensor([1.0, 5.0, 0.0]))


def test_a_reduction_that_cannot_be_taken_apart_is_refused():
    criterion = nn.CrossEntropyLoss()
    criterion.reduction = "median"
    with pytest.raises(SparseDPError, match=r"reduction='median'.*PerExampleLoss"):
        unreduced(criterion)


@pytest.mark.filterwarnings("ignore:Using a target size")
def test_outputs_and_targets_that_are_broadcast_are_refused():
    with pytest.raises(SparseDPError, match=r"2 axes and targets of 1.*squeeze"):
        unreduced(F.smooth_l1_loss)(torch.zeros(4, 1), torch.zeros(4))
