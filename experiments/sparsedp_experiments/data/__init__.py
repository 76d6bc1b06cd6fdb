"""Data sets, and data-independent features of them."""

from sparsedp_experiments.data.bundle import (
    CENTRED,
    CIFAR10_PUBLISHED,
    MNIST_PUBLISHED,
    UNIT,
    DataBundle,
    Dense,
    Features,
    PixelScale,
    Sparse,
    Split,
    holdout,
)
from sparsedp_experiments.data.features import scattering_bundle
from sparsedp_experiments.data.registry import DATASETS, SOURCES, get, load, status
from sparsedp_experiments.data.retinopathy import eyepacs
from sparsedp_experiments.data.spec import DatasetRow, PublicFiles
from sparsedp_experiments.data.tables import diabetes130
from sparsedp_experiments.data.text import imdb, imdb_tokens
from sparsedp_experiments.data.vision import cifar10, digits, fashion_mnist, mnist

__all__ = [
    "CENTRED",
    "CIFAR10_PUBLISHED",
    "DATASETS",
    "MNIST_PUBLISHED",
    "SOURCES",
    "UNIT",
    "DataBundle",
    "DatasetRow",
    "Dense",
    "Features",
    "PixelScale",
    "PublicFiles",
    "Sparse",
    "Split",
    "cifar10",
    "diabetes130",
    "digits",
    "eyepacs",
    "fashion_mnist",
    "get",
    "holdout",
    "imdb",
    "imdb_tokens",
    "load",
    "mnist",
    "scattering_bundle",
    "status",
]
