"""The papers' networks and a few more, by name or as functions of an input shape and a number of classes."""

from sparsedp.batch_norm import freeze_batch_norm
from sparsedp_experiments.models.ids import embedding_bag, transformer
from sparsedp_experiments.models.least_squares import (
    LeastSquares,
    keep_noise_down,
    least_squares,
    moments_loss,
)
from sparsedp_experiments.models.networks import (
    adadpigu_cnn,
    bag_of_words,
    classifier_head,
    dp_cnn,
    logistic,
    mlp,
    mnist_cnn,
    parameter_count,
    resnet_gn,
    scatter_cnn,
    scatter_linear,
)
from sparsedp_experiments.models.pretrained import (
    PRETRAINED,
    BlockMoments,
    WordVectors,
    pretrained,
    train_from,
)
from sparsedp_experiments.models.registry import MODELS, ModelSpec, build

__all__ = [
    "MODELS",
    "PRETRAINED",
    "BlockMoments",
    "LeastSquares",
    "ModelSpec",
    "WordVectors",
    "adadpigu_cnn",
    "bag_of_words",
    "build",
    "classifier_head",
    "dp_cnn",
    "embedding_bag",
    "freeze_batch_norm",
    "keep_noise_down",
    "least_squares",
    "logistic",
    "mlp",
    "mnist_cnn",
    "moments_loss",
    "parameter_count",
    "pretrained",
    "resnet_gn",
    "scatter_cnn",
    "scatter_linear",
    "train_from",
    "transformer",
]
