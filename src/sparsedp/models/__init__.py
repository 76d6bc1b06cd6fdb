"""The papers' networks and a few more, by name or as functions of an input shape and a number of classes."""

from sparsedp.models.convolutional import adadpigu_cnn, dp_cnn, mnist_cnn, resnet_gn
from sparsedp.models.efficientnet import BlockMoments
from sparsedp.models.folding import fold_batch_norm, freeze_batch_norm
from sparsedp.models.heads import classifier_head, parameter_count
from sparsedp.models.least_squares import LeastSquares, keep_noise_down, least_squares, moments_loss
from sparsedp.models.pretrained import PRETRAINED, pretrained, train_from
from sparsedp.models.registry import MODELS, ModelSpec, build, usual_layout
from sparsedp.models.scattering import scatter_cnn, scatter_linear
from sparsedp.models.tabular import bag_of_words, logistic, mlp
from sparsedp.models.text import embedding_bag, transformer
from sparsedp.models.word_vectors import WordVectors

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
