"""Data sets, how they are sampled, and data-independent features."""

from sparsedp.data.arrays import npz
from sparsedp.data.bundle import DataBundle, Split, holdout
from sparsedp.data.cifar import cifar10
from sparsedp.data.download import Checksum, SourceStatus, get, status
from sparsedp.data.features import (
    CENTRED,
    CIFAR10_PUBLISHED,
    MNIST_PUBLISHED,
    UNIT,
    Dense,
    Features,
    PixelScale,
    Sparse,
)
from sparsedp.data.hospital import diabetes130
from sparsedp.data.house_numbers import svhn
from sparsedp.data.idx import fashion_mnist, mnist
from sparsedp.data.images import image_folder
from sparsedp.data.registry import DATASETS, DatasetSpec, load
from sparsedp.data.retinopathy import eyepacs
from sparsedp.data.reviews import imdb, imdb_tokens
from sparsedp.data.scattering_features import scattering_bundle
from sparsedp.data.sklearn_digits import digits
from sparsedp.data.sources import SOURCES, Source

__all__ = [
    "CENTRED",
    "CIFAR10_PUBLISHED",
    "DATASETS",
    "MNIST_PUBLISHED",
    "SOURCES",
    "UNIT",
    "Checksum",
    "DataBundle",
    "DatasetSpec",
    "Dense",
    "Features",
    "PixelScale",
    "Source",
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
