"""Watching the model: samples must not mix."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Sequence
from itertools import count
from typing import final

import numpy as np
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from sparsedp.batch import PerSampleLoss, Rows
from sparsedp.errors import DataError
from sparsedp.grad_sample import BookkeepingEngine, Engine, ReferenceEngine
from sparsedp.grad_sample.alone import RowsAlone
from sparsedp.grad_sample.check import check_model
from sparsedp.grad_sample.witness import WatchedEngine
from sparsedp.randomness import PrivateRandomness

GUARD_DRAWS = 7
"""Keeps what the guard draws apart from a seeded run's batches."""


@final
class ModelGuard:
    """Checks a model before its first step, and again whenever a module was switched between `train` and `eval`.

    **Privacy.** A BatchNorm that was harmless in evaluation mode mixes samples in training mode, and then clipping
    protects nobody.
    """

    def __init__(
        self,
        model: nn.Module,
        loss: PerSampleLoss,
        some_rows: Callable[[], Rows],
        *,
        fast: bool,
        largest: int,
    ) -> None:
        self._model, self._loss, self._some_rows = model, loss, some_rows
        self._fast, self._largest = fast, largest
        self._checked: tuple[bool, ...] | None = None

    def check(self) -> None:
        """Probe the model if it is not in the modes it was last checked in.

        Raises:
            ModelError: it mixes samples or writes to its buffers.
            SparseDPError: the loss is not one number per row.
        """
        modes = tuple(module.training for module in self._model.modules())
        if modes != self._checked:
            rows = self._some_rows()
            _refuse_rows_of_nothing(rows)
            check_model(self._model, self._loss, rows, fast=self._fast, largest=self._largest)
            self._checked = modes


def _refuse_rows_of_nothing(rows: Rows) -> None:
    """A row that is not finite adds nothing to the sum; if all are such, a run would train on noise alone."""
    floats = [
        leaf for leaf in pytree.tree_leaves(rows) if isinstance(leaf, Tensor) and leaf.is_floating_point()
    ]
    if not floats or any(bool(leaf.isfinite().any()) for leaf in floats):
        return
    raise DataError(
        "every feature of every row that was looked at is NaN or infinite: such rows add nothing, so the run would "
        "train on noise alone. Look at how the data was read; fill missing values with a public constant"
    )


NOW_AND_THEN = 512
"""Besides the first step and one of each epoch, every step is looked at with one chance in so many."""


@final
class CompanyGuard:
    """Looks at some steps: rows of a random chunk must have the gradient in their company that they have alone.

    The first step, one of every epoch, now and then another, and the step after one in which a single row differed.
    Few rows are computed twice, so it costs little; it changes no result.

    **Privacy.** What the check at the start cannot have seen (other rows, other sizes, later weights) is found here
    before the release it would spoil. The steps are drawn from secret randomness.
    """

    def __init__(
        self,
        engine: Engine,
        model: nn.Module,
        loss: PerSampleLoss,
        epoch_ends: Sequence[int],
        randomness: PrivateRandomness,
    ) -> None:
        self._engine, self._randomness, self._epoch_ends = engine, randomness, epoch_ends
        self._alone = RowsAlone(model, loss)
        self._due: set[int] = set()
        self._epoch_end: int | None = None
        self._watched: WatchedEngine | None = None

    def engine_for(self, step: int) -> Engine:
        """The engine for a step: before a witness in those that are looked at."""
        suspicious = self._watched is not None and not self._watched.agreed
        self._watched = None
        if not (self._is_due(step) or suspicious) or not isinstance(
            self._engine, BookkeepingEngine | ReferenceEngine
        ):
            return self._engine
        draws = count(1)
        self._watched = WatchedEngine(
            self._engine, self._alone, lambda bound: self._below([bound], step, next(draws))[0]
        )
        return self._watched

    def _is_due(self, step: int) -> bool:
        if self._epoch_end is None or step >= self._epoch_end:
            first = self._epoch_end is None
            self._epoch_end = self._epoch_ends[bisect_right(self._epoch_ends, step)]
            left = self._epoch_end - step
            chances = self._below([left, *[NOW_AND_THEN] * left], step, 0)
            self._due = {step + chances[0], *(step + i for i in range(left) if chances[1 + i] == 0)}
            if first:
                self._due.add(step)
        return step in self._due

    def _below(self, bounds: list[int], step: int, draw: int) -> list[int]:
        found: list[int] = self._randomness.below(np.array(bounds), key=(step, GUARD_DRAWS, draw)).tolist()
        return found
