"""What engines are given: coordinates of a model and sets of them, batches, losses, clips and clipping spaces."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from sparsedp.batch import MicroBatch, from_criterion, unreduced, validate_losses
from sparsedp.batch_norm import freeze_batch_norm
from sparsedp.clipping import ROUNDING_MARGIN, FlatClip, Identity, Standardized
from sparsedp.errors import DataError, ModelError, PrivacyError, SparseDPError
from sparsedp.parameters import ParameterLayout, Support

# The flat vector of trainable scalars, and sets of its coordinates.


def test_flatten_and_write_are_inverse_and_in_definition_order():
    model, other = (nn.Sequential(nn.Conv2d(1, 2, 3), nn.Linear(8, 5, bias=False)) for _ in range(2))
    layout = ParameterLayout.of(model)
    vector = layout.flatten(model)
    assert torch.equal(vector, torch.cat([p.detach().reshape(-1) for p in model.parameters()]))
    assert [slot.name for slot in layout] == [name for name, _ in model.named_parameters()]
    layout.write(other, vector)
    vector.zero_()  # a copy
    assert torch.equal(layout.flatten(other), layout.flatten(model))
    assert bool(model[0].weight.any())


def test_tied_parameters_appear_once_frozen_ones_never_and_the_widest_dtype_is_taken():
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3), nn.Linear(3, 3).double())
    model[1].weight = model[0].weight
    model[0].bias.requires_grad_(False)
    layout = ParameterLayout.of(model)
    assert [slot.name for slot in layout] == ["0.weight", "1.bias", "2.weight", "2.bias"]
    assert layout.slot("1.bias").offset == 9
    assert layout.flatten(model).dtype == torch.float64


def test_what_freezing_makes_of_a_batch_norm_is_a_norm():
    frozen = freeze_batch_norm(nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2)))
    assert [slot.name for slot in ParameterLayout.of(frozen) if slot.norm] == ["1.weight", "1.bias"]


@pytest.mark.filterwarnings("ignore:Lazy modules")
@pytest.mark.parametrize(
    ("model", "remedy"),
    [
        (nn.Linear(3, 3).requires_grad_(False), "unfreeze"),
        (nn.LazyLinear(3), "run one forward pass"),
        (nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2, device="meta")), r"'0.weight' on cpu.*'1.weight' on meta"),
        (nn.Linear(2, 2, dtype=torch.complex64), r"'weight'.*complex64.*[Ff]reeze"),
    ],
)  # fmt: skip
def test_a_model_that_cannot_be_flattened_is_refused_with_a_remedy(model, remedy):
    with pytest.raises(ModelError, match=remedy):
        ParameterLayout.of(model)


def test_a_model_with_another_layer_than_before_is_refused():
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    layout = ParameterLayout.of(model)
    model[1] = nn.Linear(2, 3)
    with pytest.raises(ModelError, match=r"1\.weight"):
        layout.parameters(model)


places = st.sets(st.integers(0, 29), max_size=30)


@given(places, places)
def test_a_support_is_a_sorted_set(one, other):
    support, stack = Support([*reversed(sorted(one)), *one], 30), torch.arange(1.0, 91).reshape(3, 30)
    assert support.indices.tolist() == sorted(one)
    assert torch.equal(support.mask().nonzero().flatten(), support.indices)
    assert hash(Support(support.indices, 30)) == hash(support)
    assert support != Support(support.indices, 31)
    gathered = support.gather(stack)
    assert torch.equal(gathered, stack[:, support.mask()])
    restored = support.scatter(gathered[0], fill=-1.0)
    assert torch.equal(restored, stack[0].where(support.mask(), -torch.ones(30)))
    others = Support(sorted(other), 30)
    assert set(support.union(others).indices.tolist()) == one | other
    assert set(support.without(others).indices.tolist()) == one - other


@pytest.mark.parametrize("support", [Support(torch.tensor([0, 2, 3]), 5), Support.full(5)])
def test_mutating_what_a_support_gives_changes_nothing(support):
    before, vector = support.indices, torch.arange(5.0)
    support.indices.fill_(4)
    support.mask().fill_(True)
    support.gather(vector).fill_(9)
    assert torch.equal(support.indices, before)
    assert torch.equal(vector, torch.arange(5.0))


@pytest.mark.parametrize(
    ("build", "complaint"),
    [
        (lambda: Support([5], 5), r"0\.\.4"),
        (lambda: Support([-1], 5), r"0\.\.4"),
        (lambda: Support(torch.tensor([0.5]), 5), "integers"),
        (lambda: Support(torch.tensor([True, False]), 2), "nonzero"),
        (lambda: Support([0], 3).gather(torch.zeros(2)), "d=3"),
        (lambda: Support([0], 3).scatter(torch.zeros(2)), r"\(1,\)"),
        (lambda: Support([0], 3).split(ParameterLayout.of(nn.Linear(1, 1))), "d=2"),
    ],
)
def test_misuse_of_a_support_is_refused_with_what_was_expected(build, complaint):
    with pytest.raises(SparseDPError, match=complaint):
        build()


# Micro-batches and per-sample losses.


@pytest.mark.parametrize(
    ("rows", "complaint"),
    [
        ((torch.zeros(3), torch.zeros(2)), r"first axis.*\(3,\), \(2,\)"),
        ((torch.zeros(3), torch.tensor(1.0)), "first axis"),
        ("text", "no tensor"),
        *(
            ((torch.zeros(9, 2), leaf), "cannot be taken apart")
            for leaf in (np.arange(9), [object()] * 9, {"a": {1, 2}})
        ),
    ],
)
def test_a_batch_that_cannot_be_taken_apart_by_example_is_refused(rows, complaint):
    """Every example would be given all of it: lengths in an array, for example."""
    with pytest.raises(DataError, match=complaint):
        MicroBatch(rows)


@pytest.mark.parametrize(
    "units",
    [[1, 1, 2, 3], [0, 2, 2, 3], [0, 1, 0, 1], [0, 1, 2], [0.0, 0.0, 1.0, 1.0]],
    ids=["starts at 1", "skips", "split unit", "too short", "not integer"],
)
def test_units_that_could_be_clipped_twice_are_refused(units):
    with pytest.raises(DataError, match="units"):
        MicroBatch(torch.zeros(4, 1), torch.tensor(units))


@pytest.mark.parametrize("shape", [(), (1,), (4,), (3, 2), (1, 3)])
def test_one_loss_per_row_is_accepted_and_a_reduced_one_refused_with_the_remedy(shape):
    losses = torch.arange(3.0)
    assert torch.equal(validate_losses(losses.unsqueeze(1), 3), validate_losses(losses, 3))
    with pytest.raises(SparseDPError, match='reduction="none"'):
        validate_losses(torch.zeros(shape), 3)


@pytest.mark.parametrize("rows", [torch.zeros(2), {"inputs": torch.zeros(2)}, (torch.zeros(2),)])
def test_a_criterion_takes_pairs_and_of_other_batches_names_the_way_out(rows):
    with pytest.raises(DataError, match="PerExampleLoss"):
        from_criterion(nn.MSELoss(reduction="none"))(nn.Identity(), rows)


def test_an_error_of_the_criterions_own_is_not_taken_for_one_of_shapes():
    loss = from_criterion(nn.CrossEntropyLoss(reduction="none"))
    with pytest.raises(IndexError, match="out of bounds"):
        loss(nn.Identity(), (torch.zeros(1, 3), torch.tensor([7])))


CRITERIA = {
    "classes": (nn.CrossEntropyLoss, torch.randn(4, 3), torch.tensor([0, 1, 2, 0])),
    "classes of every token": (nn.CrossEntropyLoss, torch.randn(4, 3, 5), torch.randint(0, 3, (4, 5))),
    "squares": (nn.MSELoss, torch.randn(4, 2), torch.randn(4, 2)),
    "logits": (nn.BCEWithLogitsLoss, torch.randn(4), torch.rand(4)),
    "divergences": (nn.KLDivLoss, torch.randn(4, 3).log_softmax(1), torch.randn(4, 3).softmax(1)),
}


@pytest.mark.parametrize(
    ("name", "reduction"),
    [
        *((name, reduction) for name in CRITERIA for reduction in ("mean", "sum")),
        ("divergences", "batchmean"),
    ],
)
@pytest.mark.filterwarnings("ignore:reduction. 'mean' divides")
def test_a_criterion_is_taken_apart_into_what_it_gives_for_each_example_alone(name, reduction):
    kind, output, target = CRITERIA[name]
    criterion = kind(reduction=reduction)
    losses = unreduced(criterion)(output, target)
    alone = torch.stack([criterion(output[i : i + 1], target[i : i + 1]) for i in range(4)])
    torch.testing.assert_close(losses, alone)
    whole = criterion(output, target)
    torch.testing.assert_close(losses.sum() if reduction == "sum" else losses.mean(), whole)
    assert criterion.reduction == reduction  # a copy does not reduce, not the user's own


def test_class_weights_and_ignored_targets_keep_their_meaning_for_an_example():
    weight, output, target = torch.tensor([1.0, 2.0, 5.0]), torch.randn(3, 3), torch.tensor([0, 2, -100])
    plain = F.cross_entropy(output, target, reduction="none")
    weighted = unreduced(nn.CrossEntropyLoss(weight=weight))(output, target)
    torch.testing.assert_close(weighted, plain * torch.tensor([1.0, 5.0, 0.0]))


@pytest.mark.filterwarnings("ignore:Using a target size")
def test_what_cannot_be_taken_apart_is_refused():
    criterion = nn.CrossEntropyLoss()
    criterion.reduction = "median"
    with pytest.raises(SparseDPError, match=r"reduction='median'.*PerExampleLoss"):
        unreduced(criterion)
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
    z = geometry.forward(gradient)
    torch.testing.assert_close(z, (gradient - centre) / scale)
    torch.testing.assert_close(geometry.inverse(z), gradient, rtol=1e-12, atol=1e-9)
    geometry = Standardized(centre, scale, gain)
    torch.testing.assert_close(geometry.undo(geometry.inverse(z)), z, rtol=1e-9, atol=1e-6)
    torch.testing.assert_close(geometry.noise_scale(3.0, len(scale)), 3 * gain * scale)
    assert Identity().inverse(gradient) is Identity().forward(gradient) is gradient


@pytest.mark.parametrize(
    ("centre", "scale"), [([0.0], [0.0]), ([0.0], [math.inf]), ([math.nan], [1.0]), ([0.0, 0.0], [1.0])]
)
def test_a_geometry_without_an_inverse_is_refused(centre, scale):
    with pytest.raises(SparseDPError, match="Standardized"):
        Standardized(torch.tensor(centre), torch.tensor(scale))


@given(st.lists(norms, min_size=1, max_size=10), st.floats(1e-6, 1e6))
def test_a_clipped_contribution_never_exceeds_the_sensitivity(values, bound):
    clip = FlatClip(bound)
    contributions = torch.tensor(values, dtype=torch.float64)
    assert bool((clip.factors(contributions) * contributions <= clip.sensitivity).all())


@given(st.floats(1e-6, 1e6), st.floats(0, 1), st.floats(1.1, 1e6))
def test_a_contribution_above_the_bound_is_scaled_down_to_it_but_for_the_margin(bound, share, times):
    most = bound * (1 - 1.1 * ROUNDING_MARGIN)
    norms = torch.tensor([share * most, times * bound], dtype=torch.float64)
    below, above = FlatClip(bound).factors(norms)
    assert below == 1
    assert most <= float(above * norms[1]) <= bound


@pytest.mark.parametrize("clip", [FlatClip(1.0), FlatClip(1e30)])
def test_a_contribution_that_is_not_finite_counts_as_absent(clip):
    norms = torch.tensor([math.nan, math.inf, 0.5], dtype=torch.float64)
    assert clip.factors(norms).tolist() == [0.0, 0.0, 1.0]


@pytest.mark.parametrize("norm", [0.0, -1.0, math.nan, math.inf])
def test_a_bound_that_bounds_nothing_is_refused(norm):
    with pytest.raises(PrivacyError, match="clip_norm"):
        FlatClip(norm)
