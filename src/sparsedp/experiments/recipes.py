"""Settings that work, by data set and model: what `sparsedp train` takes when it is told nothing.

Found on validation splits of the training data, or published (Tramèr and Boneh, ICLR 2021; RS; AdaDPIGU). Finding
them spent privacy that no epsilon here counts.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

Value = float | int | str

DEFAULT_MODEL: Mapping[str, str] = MappingProxyType(
    {
        "digits": "mlp",
        "mnist": "mnist-cnn",
        "fashion-mnist": "mnist-cnn",
        "cifar10": "adadpigu-cnn",
        "svhn": "adadpigu-cnn",
        "mnist-scattering": "scatter-linear",
        "fashion-mnist-scattering": "scatter-linear",
        "cifar10-scattering": "scatter-linear",
        "eyepacs": "resnet-gn",
        "eyepacs-natural": "resnet-gn",
        "eyepacs-scattering": "scatter-linear",
        "diabetes130": "logistic",
        "diabetes130-pooled": "logistic",
        "imdb": "bag-of-words",
        "imdb-tokens": "embedding-bag",
    }
)

OWN_FILES_MODEL = "mlp"

_ANY: Mapping[str, Value] = {"epochs": 20, "clip_norm": 1.0, "momentum": 0.9}
_ADAPTIVE_RATE = 0.001

RECIPES: Mapping[tuple[str, str], Mapping[str, Value]] = MappingProxyType(
    {
        ("digits", "mlp"): {"epochs": 30, "batch_size": 128, "lr": 0.5, "clip_norm": 0.25},
        ("mnist", "mnist-cnn"): {"epochs": 20, "batch_size": 1024, "lr": 1.0, "clip_norm": 0.1},
        ("fashion-mnist", "mnist-cnn"): {"epochs": 20, "batch_size": 2048, "lr": 4.0, "clip_norm": 0.1},
        ("cifar10", "adadpigu-cnn"): {"epochs": 30, "batch_size": 1024, "lr": 1.0, "clip_norm": 0.1},
        ("cifar10", "dp-cnn"): {"epochs": 30, "batch_size": 1024, "lr": 1.0, "clip_norm": 0.1},
        ("mnist-scattering", "scatter-linear"): {
            "epochs": 30, "batch_size": 4096, "lr": 8.0, "clip_norm": 0.1,
        },
        ("fashion-mnist-scattering", "scatter-linear"): {
            "epochs": 40, "batch_size": 8192, "lr": 16.0, "clip_norm": 0.1,
        },
        ("cifar10-scattering", "scatter-linear"): {
            "epochs": 40, "batch_size": 8192, "lr": 4.0, "clip_norm": 0.1,
        },
        ("diabetes130", "logistic"): {"epochs": 10, "batch_size": 2048, "lr": 4.0, "clip_norm": 0.5},
        ("diabetes130-pooled", "logistic"): {"epochs": 10, "batch_size": 2048, "lr": 4.0, "clip_norm": 0.5},
        ("imdb", "bag-of-words"): {"epochs": 10, "batch_size": 1024, "lr": 8.0, "clip_norm": 0.5},
    }
)  # fmt: skip


def recipe_for(dataset: str, model: str | None, optimizer: str = "sgd") -> dict[str, Value]:
    """Settings for a data set and a model; the data set's own model if none is named.

    What the table does not know is left to `fit`, which takes values that follow from public numbers.
    """
    chosen = model or DEFAULT_MODEL.get(dataset, OWN_FILES_MODEL)
    known = {**_ANY, **RECIPES.get((dataset, chosen), {}), "model": chosen}
    return known if optimizer == "sgd" else {**known, "lr": _ADAPTIVE_RATE}
