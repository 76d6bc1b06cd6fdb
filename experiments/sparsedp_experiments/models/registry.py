"""The models by name."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

from torch import nn

from sparsedp.errors import ModelError
from sparsedp_experiments.models.ids import embedding_bag, factorization, transformer
from sparsedp_experiments.models.least_squares import least_squares
from sparsedp_experiments.models.networks import (
    InputShape,
    adadpigu_cnn,
    bag_of_words,
    dp_cnn,
    logistic,
    mlp,
    mnist_cnn,
    resnet_gn,
    scatter_cnn,
    scatter_linear,
)
from sparsedp_experiments.models.pretrained import lite0, lite0_top

Builder = Callable[[InputShape, int], nn.Module]


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """One row of the table: what the model is, and how to build it for an input shape and a number of classes.

    `made_for` is the input shape and the number of classes it was made for, where they do not depend on the data.
    """

    title: str
    build: Builder
    made_for: tuple[InputShape, int] | None = None


_MNIST, _CIFAR, _SCATTERED, _TEXT = ((1, 28, 28), 10), ((3, 32, 32), 10), ((81, 7, 7), 10), ((256,), 2)

MODELS: Mapping[str, ModelSpec] = MappingProxyType(
    {
        "mnist-cnn": ModelSpec(
            "26,010-parameter CNN with Tanh (Tramèr and Boneh; AdaDPIGU Table 1)", mnist_cnn, _MNIST
        ),
        "dp-cnn": ModelSpec(
            "DP-CNN, 550,570 parameters on CIFAR-10, Tanh (Papernot et al.; RS)", dp_cnn, _CIFAR
        ),
        "adadpigu-cnn": ModelSpec(
            "AdaDPIGU's CIFAR-10 CNN (its Table 2), 74,362 parameters", adadpigu_cnn, _CIFAR
        ),
        "scatter-linear": ModelSpec("linear classifier on scattering features", scatter_linear, _SCATTERED),
        "scatter-cnn": ModelSpec("small CNN on scattering features, Tanh", scatter_cnn, _SCATTERED),
        "resnet-gn": ModelSpec("small pre-activation ResNet with GroupNorm", resnet_gn, _CIFAR),
        "lite0": ModelSpec("EfficientNet-Lite0 pretrained on ImageNet, its head or more trained", lite0),
        "lite0-top": ModelSpec("the part of EfficientNet-Lite0 above a cut, on kept features", lite0_top),
        "least-squares": ModelSpec("ridge classifier from one release of second moments", least_squares),
        "logistic": ModelSpec("logistic regression", logistic),
        "mlp": ModelSpec("perceptron with one hidden layer of 64, Tanh", mlp),
        "bag-of-words": ModelSpec("linear classifier on hashed word counts", bag_of_words, ((16384,), 2)),
        "embedding-bag": ModelSpec("mean of hashed token embeddings, then linear", embedding_bag, _TEXT),
        "factorization": ModelSpec(
            "factorization machine on ids, for recommenders and clicks", factorization
        ),
        "transformer": ModelSpec("two-layer transformer encoder on hashed tokens", transformer, _TEXT),
    }
)


def build(name: str, input_shape: InputShape, classes: int) -> nn.Module:
    """A fresh model by its name in `MODELS`; `mnist_cnn` and `mnist-cnn` name the same one."""
    spec = MODELS.get(name.replace("_", "-"))
    if spec is None:
        raise ModelError(f"no model named {name!r}; there are {', '.join(MODELS)}")
    return spec.build(input_shape, classes)
