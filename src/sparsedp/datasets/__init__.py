"""Data sets, and data-independent features of them."""

from sparsedp.datasets.arrays import npz
from sparsedp.datasets.bundle import DataBundle, Split, holdout
from sparsedp.datasets.cifar import cifar10
from sparsedp.datasets.download import Checksum, SourceStatus, get, status
from sparsedp.datasets.features import (
    CENTRED,
    CIFAR10_PUBLISHED,
    MNIST_PUBLISHED,
    UNIT,
    Dense,
    Features,
    PixelScale,
    Sparse,
)
from sparsedp.datasets.hospital import diabetes130
from sparsedp.datasets.house_numbers import svhn
from sparsedp.datasets.idx import fashion_mnist, mnist
from sparsedp.datasets.images import image_folder
from sparsedp.datasets.retinopathy import eyepacs
from sparsedp.datasets.reviews import imdb, imdb_tokens
from sparsedp.datasets.row import DatasetRow, PublicFiles
from sparsedp.datasets.scattering_features import scattering_bundle
from sparsedp.datasets.sklearn_digits import digits
from sparsedp.datasets.table import DATASETS, SOURCES, load

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
