"""Data sets, and data-independent features of them."""

from sparsedp_experiments.data.bundle import DataBundle, Dense, Split
from sparsedp_experiments.data.features import scattering_bundle
from sparsedp_experiments.data.registry import DATASETS, get, load, status
from sparsedp_experiments.data.spec import SOURCES, DatasetRow
from sparsedp_experiments.data.tables import diabetes130
from sparsedp_experiments.data.text import imdb, imdb_tokens, zipf_texts
from sparsedp_experiments.data.vision import cifar10, digits, eyepacs, fashion_mnist, mnist

__all__ = [
    "DATASETS", "SOURCES", "DataBundle", "DatasetRow", "Dense", "Split", "cifar10", "diabetes130", "digits",
    "eyepacs", "fashion_mnist", "get", "imdb", "imdb_tokens", "load", "mnist", "scattering_bundle", "status",
    "zipf_texts",
]  # fmt: skip
