"""The data sets by name, each with the options its name stands for."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

from sparsedp.core.errors import DataError
from sparsedp.datasets.bundle import DataBundle
from sparsedp.datasets.cifar import cifar10
from sparsedp.datasets.hospital import diabetes130
from sparsedp.datasets.house_numbers import svhn
from sparsedp.datasets.idx import fashion_mnist, mnist
from sparsedp.datasets.retinopathy import eyepacs
from sparsedp.datasets.reviews import imdb, imdb_tokens
from sparsedp.datasets.scattering_features import scattering_bundle
from sparsedp.datasets.sklearn_digits import digits

Loader = Callable[[Path | str | None], DataBundle]


@dataclass(frozen=True, slots=True)
class DatasetSpec:
    """One row of the table: what the name stands for, the public data set behind it, and its loader."""

    title: str
    source: str | None
    load: Loader


DATASETS: Mapping[str, DatasetSpec] = MappingProxyType(
    {
        "digits": DatasetSpec("scikit-learn's 8x8 digits, nothing to download", None, lambda root: digits()),
        "mnist": DatasetSpec("MNIST", "mnist", mnist),
        "fashion-mnist": DatasetSpec("Fashion-MNIST", "fashion-mnist", fashion_mnist),
        "cifar10": DatasetSpec("CIFAR-10, exact or from JPEG", "cifar10", cifar10),
        "mnist-scattering": DatasetSpec(
            "MNIST, scattering features", "mnist", lambda root: scattering_bundle(mnist(root))
        ),
        "fashion-mnist-scattering": DatasetSpec(
            "Fashion-MNIST, scattering features",
            "fashion-mnist",
            lambda root: scattering_bundle(fashion_mnist(root)),
        ),
        "cifar10-scattering": DatasetSpec(
            "CIFAR-10, scattering features", "cifar10", lambda root: scattering_bundle(cifar10(root))
        ),
        "svhn": DatasetSpec("SVHN, cropped digits", "svhn", svhn),
        "eyepacs": DatasetSpec("EyePACS, any retinopathy, all labelled images", "eyepacs", eyepacs),
        "eyepacs-natural": DatasetSpec(
            "EyePACS, any retinopathy, at the original prevalence",
            "eyepacs",
            lambda root: eyepacs(root, prevalence="natural"),
        ),
        "eyepacs-scattering": DatasetSpec(
            "EyePACS, scattering features", "eyepacs", lambda root: scattering_bundle(eyepacs(root))
        ),
        "diabetes130": DatasetSpec("hospital table, readmitted within 30 days", "diabetes130", diabetes130),
        "diabetes130-pooled": DatasetSpec(
            "hospital table, the three diagnosis columns pooled",
            "diabetes130",
            lambda root: diabetes130(root, diagnoses="pooled"),
        ),
        "imdb": DatasetSpec("movie reviews, hashed bag of words", "imdb", imdb),
        "imdb-tokens": DatasetSpec("movie reviews, hashed token ids", "imdb", imdb_tokens),
    }
)


def load(name: str, root: Path | str | None = None) -> DataBundle:
    """A data set by its name in `DATASETS`, with default options; the functions of its name take others.

    Looked for in `root` if given, else in SPARSEDP_DATA and then in the per-user cache.
    """
    spec = DATASETS.get(name.replace("_", "-"))
    if spec is None:
        raise DataError(f"no data set named {name!r}; there are {', '.join(DATASETS)}")
    return spec.load(root)
