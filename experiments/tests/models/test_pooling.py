"""Pooling with the channels last gives what PyTorch's own layer gives: ties, NaN and per-sample gradients, too."""

import pytest
import torch
from torch import nn
from torch.func import grad, vmap

from sparsedp_experiments.models.networks import MaxPool2d


@pytest.mark.parametrize("stride", [1, 2])
@pytest.mark.parametrize("values", ["different", "tied", "not a number"])
def test_values_and_gradients_are_those_of_pytorch(stride, values):
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(6, 5, 9, 7, generator=generator)
    if values == "tied":
        inputs = inputs.round()
    if values == "not a number":
        inputs[0, 1, 3, 3] = torch.nan
    ours, theirs = MaxPool2d(2, stride=stride), nn.MaxPool2d(2, stride=stride)
    leaves = [inputs.clone().requires_grad_() for _ in range(2)]
    found, expected = ours(leaves[0]), theirs(leaves[1])
    assert found.is_contiguous()
    assert torch.equal(found.nan_to_num(nan=99.0), expected.nan_to_num(nan=99.0))
    weights = torch.randint(
        1, 9, expected.shape, generator=generator
    ).float()  # sums of whole numbers are exact
    found.backward(weights)
    expected.backward(weights)
    assert torch.equal(leaves[0].grad, leaves[1].grad)


def test_one_sample_at_a_time_under_vmap():
    inputs = torch.randn(4, 3, 6, 6, generator=torch.Generator().manual_seed(1))
    pool = MaxPool2d(2, stride=1)
    each = vmap(grad(lambda x: pool(x.unsqueeze(0)).square().sum()))(inputs)
    leaf = inputs.clone().requires_grad_()
    nn.MaxPool2d(2, stride=1)(leaf).square().sum().backward()
    assert torch.allclose(each, leaf.grad)


def test_a_single_picture_is_pooled_too():
    picture = torch.randn(3, 6, 6)
    assert torch.equal(MaxPool2d(2)(picture), nn.MaxPool2d(2)(picture))
