"""A linear classifier by least squares from one private release of second moments (`dp-ls`).

Ridge regression needs only X'X and X'Y. Both are sums over records, so a single Gaussian release of the two, side
by side in one vector, gives the whole solution; what follows is post-processing. At small epsilon it beats many
noisy gradient steps (Mehta et al. 2022; DP-FC). It goes through the same door as every step: the moments are the
gradients of a loss that is linear in them.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.nn import functional

from sparsedp.batch import Batch, PerExampleLoss
from sparsedp.errors import ModelError
from sparsedp_experiments.models.networks import InputShape, flat_size

BALANCE = 1.0
"""Weight of X'Y beside X'X in the released vector: equal noise on both, relative to what one record adds."""
CONSTANT = 0.1
"""The constant beside a record of norm one: an intercept that takes little of the norm from the features."""
RIDGE = 0.25
"""The ridge as a share of the noise's spectral norm; found on a validation split of CIFAR-10's Lite0 features."""


@final
class LeastSquares(nn.Module):
    """Moments while it trains, a ridge classifier when it predicts.

    A record is x, scaled to unit norm, with a constant appended, and y, one-hot less its mean over classes. In
    training the "parameters" `gram` and `cross` receive the mean of x x' and of y x'. In evaluation the scores are
    x'(gram + ridge)^-1 cross.

    `ridge` is added to the diagonal of `gram`; public. `add_noise` sets it from the noise of what was released.

    **Privacy.** One record adds (x x', y x') with norm sqrt(|x|^4 + |x|^2 |y|^2), a public constant for unit
    records: set the clip norm to `record_norm` and nothing is clipped. `gram` is released whole; that it is
    symmetric halves the noise after the fact.
    """

    ridge: Tensor
    noise: Tensor

    def __init__(self, features: int, classes: int, ridge: float = 1e-3) -> None:
        super().__init__()
        if classes < 2:
            raise ModelError(f"classes: got {classes}, expected at least 2")
        self.classes = classes
        self.gram = nn.Linear(features + 1, features + 1, bias=False)
        self.cross = nn.Linear(features + 1, classes, bias=False)
        self.register_buffer("ridge", torch.tensor(float(ridge), dtype=torch.float64))
        self.register_buffer("noise", torch.zeros((), dtype=torch.float64))
        self._solved: tuple[tuple[int, int, float], Tensor] | None = None
        nn.init.zeros_(self.gram.weight)
        nn.init.zeros_(self.cross.weight)

    @property
    def record_norm(self) -> float:
        return math.sqrt(1.0 + BALANCE**2 * (1.0 - 1.0 / self.classes))

    def add_noise(self, std: float) -> None:
        """Tell of noise, of this deviation on each entry of `gram`; sets the ridge that holds down all of it so far.

        That is a share of the spectral norm of the symmetrised noise.
        """
        size = self.gram.weight.shape[0]
        with torch.no_grad():
            self.noise.fill_(math.hypot(float(self.noise), std))
            self.ridge.fill_(max(RIDGE * float(self.noise) * math.sqrt(2.0 * size), 1e-6))

    def forward(self, x: Tensor, targets: Tensor | None = None) -> Tensor:
        """Scores [n, classes]; with targets the loss per record whose gradients are minus (x x', y x')."""
        records = _records(x)
        if targets is None:
            return records @ self.solution().to(records)
        wanted = functional.one_hot(targets, self.classes).to(records) - 1.0 / self.classes
        scores: Tensor = -(self.gram(records) * records).sum(1) - BALANCE * (
            self.cross(records) * wanted
        ).sum(1)
        return scores

    def solution(self) -> Tensor:
        """The coefficients [features + 1, classes] in double precision, made anew when the moments have changed."""
        made_from = (self.gram.weight._version, self.cross.weight._version, float(self.ridge))
        if self._solved is None or self._solved[0] != made_from:
            with torch.no_grad():
                noisy = self.gram.weight.to(torch.float64)
                values, vectors = torch.linalg.eigh((noisy + noisy.T) / 2)
                cross = self.cross.weight.to(torch.float64).T / BALANCE
                inverse = (values.clamp_min(0) + self.ridge).reciprocal()
                self._solved = (made_from, vectors @ (inverse.unsqueeze(1) * (vectors.T @ cross)))
        return self._solved[1]


def least_squares(input_shape: InputShape, classes: int) -> LeastSquares:
    """For records of any shape, flattened."""
    return LeastSquares(flat_size(nn.Flatten(), input_shape), classes)


@final
class _MomentsLoss:
    """In training minus the moments of each record; on held-out rows the cross-entropy of the scores."""

    def __call__(self, model: Callable[..., Any], rows: Batch) -> Tensor:
        inputs, targets = rows
        moments: Tensor = model(inputs, targets)
        return moments

    def on_held_out(self, model: Callable[..., Any], rows: Batch) -> Tensor:
        inputs, targets = rows
        return functional.cross_entropy(model(inputs), targets, reduction="none")


def moments_loss() -> PerExampleLoss:
    """The loss that `fit` trains a `LeastSquares` model with. On held-out rows the model's scores are evaluated."""
    return PerExampleLoss(_MomentsLoss())


def keep_noise_down(model: LeastSquares) -> Callable[[Any], None]:
    """A callback for `fit` that sets the model's ridge from the noise of its releases, a public number.

    It is for SGD without momentum and weight decay: then `gram` is the sum of the releases times their rates. The
    ridge follows the noise of that sum; one release of all records is the simplest.
    """

    def tell(event: Any) -> None:
        released = getattr(event, "released", None)
        if released is not None:
            model.add_noise(max(event.learning_rates) * float(released.noise_scale.max()))

    return tell


def _records(x: Tensor) -> Tensor:
    """[n, features + 1]: flattened, with a constant, unit norm."""
    flat = functional.normalize(x.flatten(1), dim=1)
    constant = flat.new_full((len(flat), 1), CONSTANT)
    return torch.cat([flat, constant], dim=1) / math.sqrt(1.0 + CONSTANT**2)
