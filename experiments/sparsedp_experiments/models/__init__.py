"""The papers' networks and a few more, by name or as functions of an input shape and a number of classes."""

from sparsedp.batch_norm import fold_batch_norm, freeze_batch_norm
from sparsedp_experiments.models.convolutional import adadpigu_cnn, dp_cnn, mnist_cnn, resnet_gn
from sparsedp_experiments.models.efficientnet import BlockMoments
from sparsedp_experiments.models.heads import classifier_head, parameter_count
from sparsedp_experiments.models.least_squares import (
    LeastSquares,
    keep_noise_down,
    least_squares,
    moments_loss,
)
from sparsedp_experiments.models.pretrained import PRETRAINED, pretrained, train_from
from sparsedp_experiments.models.registry import MODELS, ModelSpec, build, usual_layout
from sparsedp_experiments.models.scattering import scatter_cnn, scatter_linear
from sparsedp_experiments.models.tabular import bag_of_words, logistic, mlp
from sparsedp_experiments.models.text import embedding_bag, transformer
from sparsedp_experiments.models.word_vectors import WordVectors

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
    "fold_batch_norm",
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
    "usual_layout",
]
