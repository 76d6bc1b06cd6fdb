"""Tables as PyTorch wants them: examples, labels, targets, units, and the two models that the estimators train."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from typing import Any, final

import numpy as np
import numpy.typing as npt
import torch
from scipy import sparse
from sklearn.utils import check_array
from sklearn.utils.validation import column_or_1d
from torch import Tensor, nn
from torch.utils.data import Dataset

from sparsedp.errors import DataError, PrivacyError, SparseDPError
from sparsedp.randomness import PublicRandomness, fork_generators
from sparsedp.training.data import given_units

_NAMES_SOMEBODY = re.compile(
    r"(.*_)?(id|mrn|ssn|nhs|pseudonym|(patient|person|subject|customer|client|user|member|case)(_?(id|no|nr|num|number|key|code))?)"
)


@final
class TableDataset(Dataset[tuple[Tensor, Tensor]]):
    """The rows (x, y) of a table in single precision; a sparse matrix is filled batch by batch."""

    def __init__(self, X: Any, y: Tensor) -> None:
        with np.errstate(over="ignore"):
            self.X = check_array(X, accept_sparse="csr", dtype=np.float32)
        self.y = y
        if sparse.issparse(self.X):
            self.X = self.X.copy()
            self.X.sum_duplicates()
        else:
            self.X = torch.from_numpy(np.array(self.X, order="C"))

    def __len__(self) -> int:
        return len(self.y)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        x, y = self.rows_at(torch.tensor([range(len(self))[index]]))
        return x[0], y[0]

    def rows_at(self, indices: Tensor) -> tuple[Tensor, Tensor]:
        """Many rows at once."""
        if isinstance(self.X, Tensor):
            return self.X.index_select(0, indices), self.y[indices]
        return torch.from_numpy(self.X[indices.numpy()].toarray()), self.y[indices]


@final
class PairWithZero(nn.Module):
    """Turns one logit z into the two-class logits (0, z), so that softmax gives sigmoid(z)."""

    def forward(self, logit: Tensor) -> Tensor:
        """Logits of shape [..., 2] from one of shape [..., 1]."""
        return torch.cat([torch.zeros_like(logit), logit], dim=-1)


def network(features: int, outputs: int, widths: tuple[int, ...], seed: int | None) -> nn.Sequential:
    """Layers of these widths with Tanh between them; without widths, a linear layer that starts at zero.

    Two outputs are two classes. They get one logit, paired with a constant zero: two would say the same thing and be
    noised apart. A linear model is convex, so a random start would add nothing but a starting error; that of a
    network follows from the seed, if there is one. The global generators are left alone.
    """
    public = PublicRandomness.fresh() if seed is None else PublicRandomness(seed)
    with fork_generators(public.generator_seed((0, 3)), torch.device("cpu")):
        torch.manual_seed(public.torch_seed((0, 3)))
        layers: list[nn.Module] = []
        for width in widths:
            layers += [nn.Linear(features, width), nn.Tanh()]
            features = width
        layers += [nn.Linear(features, 1), PairWithZero()] if outputs == 2 else [nn.Linear(features, outputs)]
    if not widths:
        for parameter in layers[0].parameters():
            nn.init.zeros_(parameter)
    return nn.Sequential(*layers)


def encode_labels(y: npt.NDArray[Any], declared: Any) -> tuple[npt.NDArray[Any], torch.Tensor]:
    """The sorted classes, and the place of each label among them.

    Formal guarantees:
        That a class exists can be one example's doing, so the set of classes has to be public.
    """
    classes = np.unique(y if declared is None else np.asarray(declared))
    if len(classes) < 2:
        got = "y" if declared is None else "classes"
        raise DataError(
            f"{got} has {len(classes)} class, expected at least 2; declare them with classes=[...]"
        )
    if not np.isin(y, classes).all():
        raise DataError(
            f"y has a label that is not among the declared classes {classes.tolist()} (which one is private, and not "
            "said here); declare every class there can be, or drop the rows of others"
        )
    return classes, torch.from_numpy(np.searchsorted(classes, y).astype(np.int64))


def encode_units(units: Any, rows: int) -> torch.Tensor | None:
    """Ids of any one type as whole numbers; None stays None."""
    if units is None:
        return None
    ids = column_or_1d(units)
    if len(ids) != rows:
        raise DataError(f"groups: got {len(ids)} ids for {rows} examples, expected one for each")
    return torch.from_numpy(np.unique(given_units(ids), return_inverse=True)[1].astype(np.int64))


def class_weights(choice: Any, classes: npt.NDArray[Any]) -> torch.Tensor | None:
    """A weight for each class, 1 where none is given, the largest scaled to 1; None when there are none at all.

    Formal guarantees:
        Weights scale the loss before the clip, which bounds each unit whatever they are. A weight above 1 would be
        taken back by the clip of gradients that are as long as it allows already; so only their ratios count, and
        the largest is 1.
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
    return torch.from_numpy((weights / weights.max()).astype(np.float32))


def widths_of(hidden: Any) -> tuple[int, ...]:
    """The widths of the hidden layers: one number, several, or none for a linear model."""
    widths = np.atleast_1d(np.asarray(hidden)).tolist()
    if not all(isinstance(width, int) and width > 0 for width in widths):
        raise SparseDPError(
            f"hidden_layer_sizes: got {hidden!r}, expected whole numbers > 0, or () for a linear model"
        )
    return tuple(widths)


def seed_of(random_state: Any) -> int | None:
    """None, the number given, or one drawn from a RandomState."""
    if isinstance(random_state, np.random.RandomState):
        return int(random_state.randint(np.iinfo(np.int32).max))
    return None if random_state is None else int(random_state)


def names_somebody(name: str) -> bool:
    """Whether a column's name looks like the id of a person: patient_id, PatientID, mrn."""
    return _NAMES_SOMEBODY.fullmatch(re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name).lower()) is not None


def named_after(column: str) -> str:
    """What the units are called whose ids are in a column of this name: patient, for patient_id."""
    return re.sub(r"(?<=[a-z])(_?id|ID|Id|_?no|_?nr|_?key|_?code)$", "", column) or column


def held_out_by_hash(ids: npt.NDArray[Any], share: float) -> npt.NDArray[np.bool_]:
    """Which examples are held out: those whose unit's id has a SHA-256 in the lowest share of all.

    Public and the same for ever: nobody's place depends on anybody else, and all examples of a unit are on one side.
    """
    texts, places = np.unique(np.array([str(one) for one in ids.tolist()]), return_inverse=True)
    digests = [hashlib.sha256(text.encode()).digest()[:8] for text in texts.tolist()]
    parts = np.array([int.from_bytes(digest, "big") / 2**64 for digest in digests])
    return (parts < share)[places]
