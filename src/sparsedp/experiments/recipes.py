"""Settings that work, by data set and model: what `sparsedp train` takes when it is told nothing."""

from __future__ import annotations

from collections.abc import Mapping

from sparsedp.datasets import DATASETS
from sparsedp.datasets.row import Value
from sparsedp.methods.spec import CLIP_NORM, EPOCHS
from sparsedp.optimizers.rule import MOMENTUM

OWN_FILES_MODEL = "mlp"

_ANY: Mapping[str, Value] = {"epochs": EPOCHS, "clip_norm": CLIP_NORM, "momentum": MOMENTUM}
_ADAPTIVE_RATE = 0.001


def recipe_for(dataset: str, model: str | None, optimizer: str = "sgd") -> dict[str, Value]:
    """Settings for a data set and a model; the data set's own model if none is named.

    What its row does not know is left to `fit`, which takes values that follow from public numbers.
    """
    row = DATASETS.get(dataset)
    chosen = model or (OWN_FILES_MODEL if row is None else row.model)
    recipe = {} if row is None else row.recipes.get(chosen, {})
    known = {**_ANY, **recipe, "model": chosen}
    return known if optimizer == "sgd" else {**known, "lr": _ADAPTIVE_RATE}
