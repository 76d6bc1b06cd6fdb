"""Flat coordinates of a model, and sets of them."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from sparsedp.errors import ModelError, SparseDPError
from sparsedp.parameters import ParameterLayout, Support
from sparsedp_experiments.models import freeze_batch_norm

# The flat vector of trainable scalars.


def network() -> nn.Sequential:
    return nn.Sequential(nn.Conv2d(1, 2, 3), nn.Flatten(), nn.Linear(8, 5, bias=False), nn.LayerNorm(5))


def test_flatten_and_write_are_inverse_and_in_definition_order():
    model, other = network(), network()
    layout = ParameterLayout.of(model)
    vector = layout.flatten(model)
    assert torch.equal(vector, torch.cat([p.detach().reshape(-1) for p in model.parameters()]))
    assert [slot.name for slot in layout] == [name for name, _ in model.named_parameters()]
    layout.write(other, vector)
    assert torch.equal(layout.flatten(other), vector)


def test_flatten_is_a_copy():
    model = network()
    before = model[0].weight.detach().clone()
    ParameterLayout.of(model).flatten(model).zero_()
    assert torch.equal(model[0].weight, before)


def test_flatten_takes_the_widest_dtype():
    model = nn.Sequential(nn.Linear(2, 2).double(), nn.Linear(2, 2).bfloat16())
    assert ParameterLayout.of(model).flatten(model).dtype == torch.float64
    assert ParameterLayout.of(model[1:]).flatten(model[1:]).dtype == torch.float32


def test_an_unknown_name_is_refused_with_the_names_there_are():
    with pytest.raises(KeyError, match="weight"):
        ParameterLayout.of(nn.Linear(2, 2)).slot("gain")


def test_a_tied_parameter_appears_once_under_its_first_name():
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    model[1].weight = model[0].weight
    assert [slot.name for slot in ParameterLayout.of(model)] == ["0.weight", "0.bias", "1.bias"]


def test_frozen_parameters_are_left_out():
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    model[0].requires_grad_(False)
    layout = ParameterLayout.of(model)
    assert [slot.name for slot in layout] == ["1.weight", "1.bias"]
    assert layout.slot("1.weight").offset == 0


@pytest.mark.parametrize(
    "model", [nn.ReLU(), nn.Linear(3, 3).requires_grad_(False)], ids=["none", "all frozen"]
)
def test_a_model_without_trainable_parameters_is_refused_with_a_remedy(model):
    with pytest.raises(ModelError, match="unfreeze"):
        ParameterLayout.of(model)


@pytest.mark.filterwarnings("ignore:Lazy modules")
def test_an_uninitialised_parameter_is_refused_with_a_remedy():
    with pytest.raises(ModelError, match="run one forward pass"):
        ParameterLayout.of(nn.LazyLinear(3))


def test_parameters_on_several_devices_are_refused_by_name():
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2, device="meta"))
    with pytest.raises(ModelError, match=r"several devices.*'0.weight' on cpu.*'1.weight' on meta"):
        ParameterLayout.of(model)


def test_complex_parameters_are_refused_by_name():
    model = nn.Linear(2, 2, dtype=torch.complex64)
    with pytest.raises(ModelError, match=r"'weight'.*complex64.*[Ff]reeze"):
        ParameterLayout.of(model)


def test_a_model_that_changed_since_is_refused():
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    layout = ParameterLayout.of(model)
    assert layout.parameters(model) == list(model.parameters())
    model[0].requires_grad_(False)
    with pytest.raises(ModelError, match="changed since"):
        layout.parameters(model)
    model[0].requires_grad_(True)
    model[1] = nn.Linear(2, 3)
    with pytest.raises(ModelError, match=r"1\.weight"):
        layout.parameters(model)


def test_what_freezing_makes_of_a_batch_norm_is_a_norm():
    frozen = freeze_batch_norm(nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2)))
    assert [slot.name for slot in ParameterLayout.of(frozen) if slot.norm] == ["1.weight", "1.bias"]


# The set of active coordinates: immutable, sorted, unique.


@st.composite
def supports(draw) -> Support:
    dimension = draw(st.integers(1, 40))
    return Support(draw(st.lists(st.integers(0, dimension - 1), max_size=60)), dimension)


@given(st.lists(st.integers(0, 29), max_size=60))
def test_indices_are_the_sorted_set_of_what_was_given(indices):
    support = Support(indices, 30)
    assert support.indices.tolist() == sorted(set(indices))
    assert len(support) == support.size == len(set(indices))
    assert [index in support for index in range(30)] == [index in set(indices) for index in range(30)]


@given(supports())
def test_mask_and_from_mask_are_inverse(support):
    assert Support.from_mask(support.mask()) == support
    assert int(support.mask().sum()) == support.size


@given(supports())
def test_scatter_of_gather_keeps_the_support_and_fills_the_rest(support):
    stack = torch.arange(1.0, 3 * support.dimension + 1).reshape(3, -1)
    gathered = support.gather(stack)
    assert torch.equal(gathered, stack[:, support.mask()])
    restored = support.scatter(gathered[0], fill=-1.0)
    assert torch.equal(restored, torch.where(support.mask(), stack[0], -torch.ones(support.dimension)))


@given(st.lists(st.integers(-3, 3), min_size=1, max_size=40), st.data())
def test_top_k_takes_the_largest_scores_and_the_lower_index_of_ties(scores, data):
    k = data.draw(st.integers(0, len(scores)))
    expected = sorted(range(len(scores)), key=lambda index: (-scores[index], index))[:k]
    assert Support.top_k(torch.tensor(scores, dtype=torch.float32), k).indices.tolist() == sorted(expected)


def test_top_k_breaks_a_million_ties_by_index():
    assert torch.equal(Support.top_k(torch.zeros(1_000_000), 7).indices, torch.arange(7))


def test_top_k_ranks_infinities():
    scores = torch.tensor([0.0, torch.inf, -torch.inf, 5.0])
    assert Support.top_k(scores, 2).indices.tolist() == [1, 3]


@given(supports(), st.data())
def test_overlap_counts_shared_coordinates(support, data):
    other = Support(data.draw(st.lists(st.integers(0, support.dimension - 1))), support.dimension)
    shared = set(support.indices.tolist()) & set(other.indices.tolist())
    assert support.overlap(other) == other.overlap(support) == len(shared)


@given(supports())
def test_equal_supports_have_equal_hashes(support):
    same = Support(support.indices.flip(0), support.dimension)
    assert same == support
    assert hash(same) == hash(support)
    assert support != Support(support.indices, support.dimension + 1)


def test_full_and_empty():
    full, empty = Support.full(5), Support.empty(5)
    assert full.is_full
    assert full.active_ratio == 1
    assert not empty.is_full
    assert empty.active_ratio == 0
    assert empty.size == 0
    assert torch.equal(empty.scatter(torch.empty(0)), torch.zeros(5))


def test_mutating_what_it_was_built_from_changes_nothing():
    indices, mask = torch.tensor([0, 2, 3]), torch.tensor([True, False, True])
    support, from_mask = Support(indices, 5), Support.from_mask(mask)
    indices.fill_(4)
    mask.fill_(False)
    assert (support.indices.tolist(), from_mask.indices.tolist()) == ([0, 2, 3], [0, 2])


def test_mutating_what_it_gives_changes_nothing():
    support = Support([0, 2, 3], 5)
    before = hash(support)
    vector = torch.arange(5.0)
    support.indices.fill_(4)
    support.mask().fill_(True)
    support.gather(vector).fill_(9)
    full = Support.full(5)
    full.gather(vector).fill_(9)
    assert support == Support([0, 2, 3], 5)
    assert hash(support) == before
    assert torch.equal(vector, torch.arange(5.0))


def test_it_takes_no_new_attributes():
    with pytest.raises(AttributeError):
        Support([0], 2).note = "changed"


def test_per_parameter_masks_have_the_parameters_shapes_and_together_are_the_support():
    layout = ParameterLayout.of(nn.Sequential(nn.Conv1d(2, 3, 2), nn.Linear(4, 2)))
    support = Support(range(0, layout.dimension, 3), layout.dimension)
    masks = support.per_parameter(layout)
    assert {name: tuple(mask.shape) for name, mask in masks.items()} == {s.name: s.shape for s in layout}
    assert torch.equal(torch.cat([mask.reshape(-1) for mask in masks.values()]), support.mask())
    split = support.split(layout)
    assert {name: places.tolist() for name, places in split.items()} == {
        name: mask.reshape(-1).nonzero().reshape(-1).tolist() for name, mask in masks.items()
    }


@pytest.mark.parametrize(
    ("build", "complaint"),
    [
        (lambda: Support([5], 5), r"0\.\.4"),
        (lambda: Support([-1], 5), r"0\.\.4"),
        (lambda: Support(torch.tensor([0.5]), 5), "integers"),
        (lambda: Support(torch.tensor([True, False]), 2), "from_mask"),
        (lambda: Support(torch.zeros(1, 1, dtype=torch.int64), 2), "one axis"),
        (lambda: Support.from_mask(torch.zeros(3)), "bool"),
        (lambda: Support.from_mask(torch.zeros(3, 1, dtype=torch.bool)), "one-axis"),
        (lambda: Support.top_k(torch.zeros(3), 4), "k <= d"),
        (lambda: Support.top_k(torch.zeros(3), -1), "k <= d"),
        (lambda: Support.top_k(torch.zeros(3, 1), 1), "one axis"),
        (lambda: Support.top_k(torch.tensor([1.0, torch.nan]), 1), "NaN"),
        (lambda: Support([0], 3).gather(torch.zeros(2)), "d=3"),
        (lambda: Support([0], 3).scatter(torch.zeros(2)), r"\(1,\)"),
        (lambda: Support([0], 3).overlap(Support([0], 4)), "d=4"),
        (lambda: Support([0], 3).per_parameter(ParameterLayout.of(nn.Linear(1, 1))), "d=2"),
    ],
)
def test_misuse_is_refused_with_what_was_expected(build, complaint):
    with pytest.raises(SparseDPError, match=complaint):
        build()
