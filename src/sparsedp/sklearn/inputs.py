"""From scikit-learn's arrays to a data set: labels by declared classes, units by id."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from sklearn.utils.validation import column_or_1d

from sparsedp.errors import DataError, PrivacyError, PrivacyWarning
from sparsedp.training.data import given_units


def check_pair(eval_set: Any) -> None:
    """Refuse held-out data that is not (X, y).

    Raises:
        DataError: it is something else.
    """
    if not isinstance(eval_set, (tuple, list)) or len(eval_set) != 2:
        size = f" of {len(eval_set)}" if isinstance(eval_set, (tuple, list)) else ""
        raise DataError(f"eval_set: got {type(eval_set).__name__}{size}, expected one pair (X, y)")


def encode_labels(y: npt.NDArray[Any], declared: Any) -> tuple[npt.NDArray[Any], torch.Tensor]:
    """The sorted classes, and the place of each label among them.

    Without declared classes they are read off the labels, with a warning.

    **Privacy.** That a class exists can be one record's doing, so the set of classes has to be public.
    """
    if declared is None:
        warnings.warn(
            "classes was not given, so the classes are read off y: a class that one record alone has would reveal "
            "that record. Declare them: SparseDPClassifier(classes=[...])",
            PrivacyWarning,
            stacklevel=4,
        )
    try:
        classes = np.unique(y if declared is None else np.asarray(declared))
        known = np.isin(y, classes)
    except TypeError as error:
        raise DataError(
            f"classes: labels of mixed types cannot be ordered ({error}); use one type"
        ) from error
    if len(classes) < 2:
        got = "y" if declared is None else "classes"
        raise DataError(
            f"{got} has {len(classes)} class, expected at least 2; declare them with classes=[...]"
        )
    if not known.all():
        raise DataError(
            f"y has a label that is not among the declared classes {classes.tolist()} (which one is private, and not "
            "said here); declare every class there can be, or drop the rows of others"
        )
    return classes, torch.from_numpy(np.searchsorted(classes, y).astype(np.int64))


def encode_units(units: Any, rows: int) -> torch.Tensor | None:
    """Ids of any one type as whole numbers; None stays None.

    Raises:
        DataError: not one id for each row, or a missing one.
    """
    if units is None:
        return None
    ids = column_or_1d(units)
    if len(ids) != rows:
        raise DataError(f"units: got {len(ids)} ids for {rows} rows, expected one for each")
    return torch.from_numpy(np.unique(given_units(ids), return_inverse=True)[1].astype(np.int64))


def refuse_weights(sample_weight: Any) -> None:
    """Refuse weights of single records, and say why."""
    if sample_weight is not None:
        raise PrivacyError(
            "sample_weight is refused: a weight for each record, often computed from the others, makes one record's "
            "influence depend on the rest, which the guarantee does not cover. For public weights of whole classes "
            "give class_weight={label: weight}"
        )


def class_weights(choice: Any, classes: npt.NDArray[Any]) -> torch.Tensor | None:
    """A weight for each class, 1 where none is given; None when there are none at all.

    **Privacy.** Weights scale the loss before the clip, which bounds each unit whatever they are.
    """
    if choice is None:
        return None
    if not isinstance(choice, Mapping):
        raise PrivacyError(
            f"class_weight: got {choice!r}, expected {{label: weight}} with public weights. 'balanced' would count "
            "the training labels exactly, which no noise covers"
        )
    labels = classes.tolist()
    strangers = [label for label in choice if label not in labels]
    weights = np.array([choice.get(label, 1.0) for label in labels], dtype=np.float64)
    if strangers or not (np.isfinite(weights).all() and (weights > 0).all()):
        raise DataError(
            f"class_weight: got {choice!r}, expected a number > 0 for some of the classes {labels}"
        )
    return torch.from_numpy(weights.astype(np.float32))
