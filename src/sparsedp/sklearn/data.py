"""Tables as PyTorch wants them: the rows as a data set, and the two models that the estimators train."""

from __future__ import annotations

import math
from typing import Any, final

import numpy as np
import torch
from scipy import sparse
from sklearn.utils import check_array
from torch import Tensor, nn
from torch.utils.data import Dataset

from sparsedp.randomness import PublicRandomness, own_generators


@final
class TableDataset(Dataset[tuple[Tensor, Tensor]]):
    """The rows (x, y) of a table in single precision; a sparse matrix is filled batch by batch.

    Raises:
        ValueError: a value does not fit into single precision.
    """

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
        if not -len(self) <= index < len(self):
            raise IndexError(f"row {index} of {len(self)}")
        x, y = self.rows_at(torch.tensor([index % len(self)]))
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


def linear_model(features: int, outputs: int) -> nn.Sequential:
    """A linear layer, started at zero: it is convex, so a random start would add nothing but a starting error.

    Two outputs are two classes. They get one logit, paired with a constant zero: two would say the same thing and be
    noised apart.
    """
    layers = [nn.Linear(features, 1), PairWithZero()] if outputs == 2 else [nn.Linear(features, outputs)]
    for parameter in layers[0].parameters():
        nn.init.zeros_(parameter)
    return nn.Sequential(*layers)


def network(features: int, outputs: int, widths: tuple[int, ...], seed: int | None) -> nn.Sequential:
    """Layers of these widths with Tanh between them; without widths, `linear_model`.

    Its random start follows from the seed, if there is one; the global generators are left alone.
    """
    if not widths:
        return linear_model(features, outputs)
    public = PublicRandomness.fresh() if seed is None else PublicRandomness(seed)
    with own_generators(public.generator_seed((0, 3)), torch.device("cpu")):
        torch.manual_seed(public.torch_seed((0, 3)))
        layers: list[nn.Module] = []
        for width in widths:
            layers += [nn.Linear(features, width), nn.Tanh()]
            features = width
        layers += [nn.Linear(features, 1), PairWithZero()] if outputs == 2 else [nn.Linear(features, outputs)]
    return nn.Sequential(*layers)


def coordinate_count(model: nn.Module) -> int:
    """The number of trainable scalars."""
    return sum(math.prod(p.shape) for p in model.parameters() if p.requires_grad)
