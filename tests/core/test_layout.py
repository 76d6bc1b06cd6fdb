"""The flat vector of trainable scalars."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from sparsedp.errors import ModelError
from sparsedp.parameters import ParameterLayout
from sparsedp_experiments.models import freeze_batch_norm


def network() -> nn.Sequential:
    return nn.Sequential(nn.Conv2d(1, 2, 3), nn.Flatten(), nn.Linear(8, 5, bias=False), nn.LayerNorm(5))


@given(st.data())
def test_index_and_locate_are_inverse(data):
    layout = ParameterLayout.of(network())
    flat = data.draw(st.integers(0, layout.dimension - 1))
    name, position = layout.locate(flat)
    assert layout.index(name, position) == flat


def test_every_coordinate_has_its_own_place_in_definition_order():
    model = network()
    layout = ParameterLayout.of(model)
    vector = layout.flatten(model)
    parameters = dict(model.named_parameters())
    assert vector.numel() == layout.dimension == sum(p.numel() for p in parameters.values())
    for flat in range(layout.dimension):
        name, position = layout.locate(flat)
        assert vector[flat] == parameters[name][position]
    assert [slot.name for slot in layout] == list(parameters)


def test_flatten_is_a_copy():
    model = network()
    before = model[0].weight.detach().clone()
    ParameterLayout.of(model).flatten(model).zero_()
    assert torch.equal(model[0].weight, before)


def test_flatten_takes_the_widest_dtype():
    model = nn.Sequential(nn.Linear(2, 2).double(), nn.Linear(2, 2).bfloat16())
    assert ParameterLayout.of(model).flatten(model).dtype == torch.float64
    assert ParameterLayout.of(model[1:]).flatten(model[1:]).dtype == torch.float32


@pytest.mark.parametrize("flat", [-1, 35])
def test_locate_refuses_an_index_outside(flat):
    layout = ParameterLayout.of(nn.Linear(6, 5))
    with pytest.raises(IndexError, match="outside"):
        layout.locate(flat)


@pytest.mark.parametrize("position", [(5, 0), (0, 6), (-1, 0), (0,), (0, 0, 0)])
def test_index_refuses_a_position_outside(position):
    layout = ParameterLayout.of(nn.Linear(6, 5))
    with pytest.raises(IndexError, match="outside"):
        layout.index("weight", position)


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
