"""The papers' networks and a few more: builders by name, for an input shape and a number of classes."""

from collections.abc import Callable, Mapping

from torch import nn

from sparsedp.batch_norm import freeze_batch_norm
from sparsedp_experiments.models.ids import embedding_bag, factorization
from sparsedp_experiments.models.least_squares import (
    LeastSquares,
    keep_noise_down,
    least_squares,
    moments_loss,
)
from sparsedp_experiments.models.networks import (
    adadpigu_cnn,
    bag_of_words,
    dp_cnn,
    logistic,
    mlp,
    mnist_cnn,
    parameter_count,
    scatter_cnn,
    scatter_linear,
)
from sparsedp_experiments.models.pretrained import WordVectors, lite0_top, pretrained

__all__ = [
    "MODELS", "LeastSquares", "WordVectors", "adadpigu_cnn", "bag_of_words", "dp_cnn", "embedding_bag",
    "freeze_batch_norm", "keep_noise_down", "logistic", "mlp", "mnist_cnn", "moments_loss", "parameter_count",
    "pretrained", "scatter_cnn", "scatter_linear",
]  # fmt: skip

MODELS: Mapping[str, Callable[..., nn.Module]] = {
    "mnist-cnn": mnist_cnn,  # Tramèr and Boneh; AdaDPIGU Table 1
    "dp-cnn": dp_cnn,  # Papernot et al.; RS
    "adadpigu-cnn": adadpigu_cnn,  # its Table 2, for CIFAR-10
    "scatter-linear": scatter_linear,
    "scatter-cnn": scatter_cnn,
    "lite0-top": lite0_top,
    "least-squares": least_squares,
    "logistic": logistic,
    "mlp": mlp,
    "bag-of-words": bag_of_words,
    "embedding-bag": embedding_bag,
    "factorization": factorization,
}
