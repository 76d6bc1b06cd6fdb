"""What engines are given: batches, losses, clips and clipping spaces."""

from __future__ import annotations

import functools
import math

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from sparsedp.batch import MicroBatch, example_count, from_criterion, slice_batch, unreduced, validate_losses
from sparsedp.clipping import ROUNDING_MARGIN, FlatClip, Identity, Standardized
from sparsedp.errors import DataError, PrivacyError, SparseDPError

# Micro-batches and per-sample losses: what is accepted, and what an error says.


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


# The clipping space, and the bound on one contribution.


numbers = st.floats(-1e3, 1e3)
positive = st.floats(1e-3, 1e3)
norms = st.floats(0, 1e300)


@given(st.lists(st.tuples(numbers, numbers, positive), min_size=1, max_size=10), st.floats(0.1, 10))
def test_the_inverse_undoes_standardizing(entries, gain):
    gradient, centre, scale = torch.tensor(entries, dtype=torch.float64).T
    geometry = Standardized(centre, scale)
    torch.testing.assert_close(geometry.inverse(geometry.forward(gradient)), gradient, rtol=1e-12, atol=1e-9)
    geometry, z = Standardized(centre, scale, gain), Standardized(centre, scale).forward(gradient)
    torch.testing.assert_close(geometry.undo(geometry.inverse(z)), z, rtol=1e-9, atol=1e-6)


def test_standardizing_is_gradient_minus_centre_over_scale():
    geometry = Standardized(torch.tensor([1.0, -2.0]), torch.tensor([2.0, 0.5]))
    assert geometry.forward(torch.tensor([[5.0, 1.0], [1.0, -2.0]])).tolist() == [[2.0, 6.0], [0.0, 0.0]]


def test_restored_noise_is_scaled_per_coordinate():
    geometry = Standardized(torch.zeros(2), torch.tensor([2.0, 0.5]))
    assert geometry.noise_scale(3.0, 2).tolist() == [6.0, 1.5]
    assert Identity().noise_scale(3.0, 2).tolist() == [3.0, 3.0]
    with pytest.raises(SparseDPError, match="2 entries"):
        geometry.noise_scale(3.0, 3)


def test_identity_changes_nothing():
    vector = torch.tensor([1.0, torch.nan])
    assert Identity().forward(vector) is vector
    assert Identity().inverse(vector) is vector


@pytest.mark.parametrize(
    ("centre", "scale"),
    [
        ([0.0], [0.0]),
        ([0.0], [-1.0]),
        ([0.0], [math.nan]),
        ([0.0], [math.inf]),
        ([math.nan], [1.0]),
        ([0.0, 0.0], [1.0]),
        ([[0.0]], [[1.0]]),
    ],
)
def test_a_geometry_without_an_inverse_is_refused(centre, scale):
    with pytest.raises(SparseDPError, match="Standardized"):
        Standardized(torch.tensor(centre), torch.tensor(scale))


@given(st.lists(norms, min_size=1, max_size=10), st.floats(1e-6, 1e6))
def test_a_clipped_contribution_never_exceeds_the_sensitivity(values, bound):
    clip = FlatClip(bound)
    contributions = torch.tensor(values, dtype=torch.float64)
    assert bool((clip.factors(contributions) * contributions <= clip.sensitivity).all())


@given(st.floats(1e-6, 1e6), st.floats(0, 1))
def test_a_contribution_clearly_below_the_bound_is_kept_as_it_is(bound, share):
    norm = torch.tensor([share * bound * (1 - 1.1 * ROUNDING_MARGIN)], dtype=torch.float64)
    assert FlatClip(bound).factors(norm).tolist() == [1.0]


@given(st.floats(1e-6, 1e6), st.floats(1.1, 1e6))
def test_a_contribution_above_the_bound_is_scaled_down_to_it_but_for_the_margin(bound, times):
    norm = torch.tensor([times * bound], dtype=torch.float64)
    clipped = float(FlatClip(bound).factors(norm) * norm)
    assert bound * (1 - 1.1 * ROUNDING_MARGIN) <= clipped <= bound


@pytest.mark.parametrize("clip", [FlatClip(1.0), FlatClip(1e30)])
def test_a_contribution_that_is_not_finite_counts_as_absent(clip):
    norms = torch.tensor([math.nan, math.inf, 0.5], dtype=torch.float64)
    assert clip.factors(norms).tolist() == [0.0, 0.0, 1.0]


@pytest.mark.parametrize("norm", [0.0, -1.0, math.nan, math.inf])
def test_a_bound_that_bounds_nothing_is_refused(norm):
    with pytest.raises(PrivacyError, match="clip_norm"):
        FlatClip(norm)
