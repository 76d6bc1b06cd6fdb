"""Data sets, and data-independent features of them."""

from sparsedp_experiments.data.arrays import npz
from sparsedp_experiments.data.bundle import DataBundle, Split, holdout
from sparsedp_experiments.data.cifar import cifar10
from sparsedp_experiments.data.download import Checksum, SourceStatus, get, status
from sparsedp_experiments.data.features import (
    CENTRED,
    CIFAR10_PUBLISHED,
    MNIST_PUBLISHED,
    UNIT,
    Dense,
    Features,
    PixelScale,
    Sparse,
)
from sparsedp_experiments.data.hospital import diabetes130
from sparsedp_experiments.data.house_numbers import svhn
from sparsedp_experiments.data.idx import fashion_mnist, mnist
from sparsedp_experiments.data.images import image_folder
from sparsedp_experiments.data.retinopathy import eyepacs
from sparsedp_experiments.data.reviews import imdb, imdb_tokens
from sparsedp_experiments.data.row import DatasetRow, PublicFiles
from sparsedp_experiments.data.scattering_features import scattering_bundle
from sparsedp_experiments.data.sklearn_digits import digits
from sparsedp_experiments.data.table import DATASETS, SOURCES, load

__all__ = [
    "CENTRED",
    "CIFAR10_PUBLISHED",
    "DATASETS",
    "MNIST_PUBLISHED",
    "SOURCES",
    "UNIT",
    "Checksum",
    "DataBundle",
    "DatasetRow",
    "Dense",
    "Features",
    "PixelScale",
    "PublicFiles",
    "SourceStatus",
    "Sparse",
    "Split",
    "cifar10",
    "diabetes130",
    "digits",
    "eyepacs",
    "fashion_mnist",
    "get",
    "holdout",
    "image_folder",
    "imdb",
    "imdb_tokens",
    "load",
    "mnist",
    "npz",
    "scattering_bundle",
    "status",
    "svhn",
]
