"""The data of a run: a named data set with options, or the user's own files. Loaded once per process."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import torch

from sparsedp._serialization import FrozenMap
from sparsedp.errors import DataError, SparseDPError
from sparsedp.randomness import PublicRandomness
from sparsedp_experiments import data as datasets
from sparsedp_experiments.data.bundle import DataBundle, Split
from sparsedp_experiments.data.row import check_options, options_of, with_pixels
from sparsedp_experiments.runs.settings import Settings

_SPLIT_SEED = 0
_SUBSET_KEY = (1,)
_OWN_FILES = (".npz", ".zip")


def load_data(settings: Settings) -> DataBundle:
    """The data set the settings name: its validation split in place of the test set, and a subset, if asked for."""
    return _load(
        settings.dataset, settings.data_options, settings.classes, settings.validation, settings.subset
    )


def check_dataset(name: str) -> None:
    """Refuse a data set that is neither in the table nor a file or folder that can be read here.

    Raises:
        DataError: with the names there are, or with what to do with a file of another kind.
    """
    if name in datasets.DATASETS:
        return
    if not Path(name).exists():
        raise DataError(
            f"no data set named {name!r}, and no file or folder of that name; there are "
            f"{', '.join(datasets.DATASETS)}"
        )
    if Path(name).is_file() and Path(name).suffix not in _OWN_FILES:
        raise DataError(
            f"{name}: tables are not read here, as their columns need public bounds; expected an .npz of arrays "
            "(docs/integrations.md), or pictures in a folder or .zip. From Python, encode a table with PublicEncoder "
            "and train on it with SparseDPClassifier (docs/tables.md), or save what is encoded as such an .npz"
        )


@lru_cache(maxsize=2)
def _load(
    name: str,
    options: FrozenMap,
    classes: tuple[str, ...] | None,
    validation: float | None,
    subset: int | None,
) -> DataBundle:
    check_dataset(name)
    if classes is not None and Path(name).suffix != ".npz":
        raise SparseDPError(f"classes: {name} has its own; they are named for an .npz file only")
    bundle = (
        datasets.load(name, **options.plain())
        if name in datasets.DATASETS
        else _own(Path(name), options.plain(), classes)
    )
    if validation is not None:
        bundle = bundle.validated(validation, _SPLIT_SEED)
    if not len(bundle.test):
        raise DataError(
            f"{name}: the test part (x_test) has no rows; give some, or evaluate on a share of the training part: "
            "--set validation=0.2"
        )
    if subset is None:
        return bundle
    notes = (*bundle.notes, f"a public random subset of at most {subset} {bundle.unit}s a side")
    train, test = _some(bundle.train, subset), _some(bundle.test, subset)
    return replace(bundle, train=train, test=test, notes=notes, fingerprint=None)


def _own(path: Path, options: dict[str, Any], classes: tuple[str, ...] | None) -> DataBundle:
    if path.suffix != ".npz":
        check_options(str(path), options, options_of(datasets.image_folder))
        return datasets.image_folder(path, **with_pixels({"size": 32, **options}))
    if classes is None:
        raise DataError(
            f"{path}: name its classes (classes, or --classes a,b,c): they are public, and counting them would look "
            "at the data"
        )
    check_options(str(path), options, options_of(datasets.npz))
    return datasets.npz(path, classes, **with_pixels(options))


def _some(split: Split, count: int) -> Split:
    """The rows of at most `count` units, in their old order."""
    if split.units is None:
        owner = torch.arange(len(split))
    else:
        owner = torch.from_numpy(np.unique(split.units.numpy(), return_inverse=True)[1])
    units = int(owner.max()) + 1
    chosen = torch.zeros(units, dtype=torch.bool)
    chosen[PublicRandomness(_SPLIT_SEED).permutation(units, key=_SUBSET_KEY)[:count]] = True
    return split.select(chosen[owner].nonzero().squeeze(1))
