"""The networks by name: sizes, isolation of rows, pooling."""

import pytest
import torch
from torch import nn
from torch.func import functional_call, grad, vmap
from torch.nn.functional import cross_entropy

from sparsedp_experiments.models import (
    MODELS,
    adadpigu_cnn,
    bag_of_words,
    dp_cnn,
    embedding_bag,
    logistic,
    mlp,
    mnist_cnn,
    parameter_count,
    scatter_cnn,
    scatter_linear,
)
from sparsedp_experiments.models.networks import MaxPool2d

# The papers' parameter counts, and what every model must be to be trained with per-sample gradients.


INPUT_SHAPES = {
    "mnist-cnn": (1, 28, 28),
    "dp-cnn": (3, 32, 32),
    "adadpigu-cnn": (3, 32, 32),
    "scatter-linear": (81, 7, 7),
    "scatter-cnn": (81, 7, 7),
    "lite0-top": (320, 3, 3),
    "least-squares": (12,),
    "logistic": (12,),
    "mlp": (12,),
    "bag-of-words": (50,),
    "embedding-bag": (9,),
    "factorization": (9,),
}

TOKEN_MODELS = {"embedding-bag"}

MOST_CLASSES = {"factorization": 2}
"""A factorization machine scores one thing: liked or not, clicked or not."""

MAPPED = [name for name in MODELS if name not in {"least-squares", "factorization"}]
"""Least squares is trained by moments, not logits (test_least_squares.py); vmap has no rule for an EmbeddingBag."""


def build_for(name, classes):
    return MODELS[name](INPUT_SHAPES[name], min(classes, MOST_CLASSES.get(name, classes)))


def sample_inputs(name, count, seed=0):
    generator = torch.Generator().manual_seed(seed)
    shape = (count, *INPUT_SHAPES[name])
    if name in {*TOKEN_MODELS, "factorization"}:
        return torch.randint(0, 40, shape, generator=generator)
    return torch.randn(shape, generator=generator)


@pytest.mark.parametrize(
    ("model", "count"),
    [
        (mnist_cnn((1, 28, 28), 10), 26_010),
        (dp_cnn((3, 32, 32), 10), 550_570),
        (adadpigu_cnn((3, 32, 32), 10), 74_362),
        (scatter_linear((3969,), 10), 39_700),
        (scatter_linear((81, 7, 7), 10, groups=27), 39_700),
        (scatter_linear((243, 8, 8), 10), 155_530),
        (scatter_cnn((81, 7, 7), 10), 33_066),
        (scatter_cnn((243, 8, 8), 10, groups=27), 187_210),
        (scatter_cnn((81, 7, 7), 10, bypass=0.3), 33_066 + 39_700),
        (scatter_cnn((243, 8, 8), 10, groups=27, bypass=1.0), 187_210 + 155_530),
        (logistic((2516,), 2), 2_517),
        (logistic((64,), 10), 650),
        (mlp((20,), 2, hidden=(8, 4)), 20 * 8 + 8 + 8 * 4 + 4 + 4 + 1),
        (bag_of_words((2**14,), 2), 16_385),
        (embedding_bag((200,), 2), 2**14 * 16 + 17),
    ],
)
def test_parameter_counts_are_the_published_ones(model, count):
    assert parameter_count(model) == count


@pytest.mark.parametrize("name", MODELS)
def test_a_sample_does_not_see_its_neighbours_in_the_batch(name):
    torch.manual_seed(1)
    model = build_for(name, 3)
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.1)
    inputs = sample_inputs(name, 4)
    together = model(inputs)
    alone = torch.cat([model(inputs[i : i + 1]) for i in range(4)])
    torch.testing.assert_close(together, alone, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", MAPPED)
def test_vmap_gives_the_gradients_of_one_backward_per_sample(name):
    torch.manual_seed(2)
    model = build_for(name, 3)
    inputs, targets = sample_inputs(name, 3), torch.tensor([0, 2, 1]).clamp(max=MOST_CLASSES.get(name, 3) - 1)
    trained = {key: value for key, value in model.named_parameters() if value.requires_grad}
    parameters = {key: value.detach() for key, value in trained.items()}

    def loss(values, row, target):
        return cross_entropy(functional_call(model, values, (row.unsqueeze(0),)), target.unsqueeze(0))

    mapped = vmap(grad(loss), in_dims=(None, 0, 0))(parameters, inputs, targets)
    for i in range(3):
        one_loss = cross_entropy(model(inputs[i : i + 1]), targets[i : i + 1])
        one = torch.autograd.grad(one_loss, list(trained.values()))
        for key, expected in zip(trained, one, strict=True):
            torch.testing.assert_close(mapped[key][i], expected, rtol=1e-4, atol=1e-5)


def test_a_bypass_adds_a_linear_classifier_on_the_scaled_features_to_the_papers_network():
    torch.manual_seed(4)
    model = scatter_cnn((81, 7, 7), 10, groups=27, bypass=0.25)
    plain = scatter_cnn((81, 7, 7), 10, groups=27)
    weights = [parameter.detach() for parameter in model.parameters()]
    for parameter, weight in zip(plain.parameters(), weights[:-2], strict=True):
        parameter.data = weight
    features = torch.randn(3, 81, 7, 7)
    normed = nn.functional.group_norm(features, 27).flatten(1)
    expected = plain(features) + 0.25 * normed @ weights[-2].T + weights[-1]
    torch.testing.assert_close(model(features), expected)


@pytest.mark.parametrize("name", sorted(TOKEN_MODELS))
def test_padding_changes_nothing_and_an_empty_text_gives_finite_logits(name):
    torch.manual_seed(3)
    model = build_for(name, 2)
    ids = torch.tensor([[5, 7, 2, 0, 0, 0, 0, 0, 0]])
    before = model(ids)
    with torch.no_grad():
        embedding = next(module for module in model.modules() if isinstance(module, nn.Embedding))
        embedding.weight[0] += 100.0
    torch.testing.assert_close(model(ids), before)
    assert model(torch.zeros(1, 9, dtype=torch.int64)).isfinite().all()


# Pooling with the channels last gives what PyTorch's own layer gives: ties, NaN and per-sample gradients, too.


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
