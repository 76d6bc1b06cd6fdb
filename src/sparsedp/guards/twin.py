"""A twin of a model and its loss: what they would hold if they had looked at other rows."""

from __future__ import annotations

from copy import deepcopy
from typing import Any, Self, final

from torch import nn

from sparsedp.core.batch import PerSampleLoss, Rows
from sparsedp.guards.look import Look, Marks
from sparsedp.guards.namespaces import Owner, read, write


@final
class Twin:
    """A copy of a model, its loss and the variables that copies share, as they were when it was made.

    Parameters, buffers and all else in `Look.shared` are not copied.

    Attributes:
        model: the copy.
    """

    def __init__(
        self,
        model: nn.Module,
        loss: PerSampleLoss,
        variables: list[tuple[Owner, dict[str, Any]]],
        shared: list[Any],
    ) -> None:
        memo: dict[int, Any] = {id(each): each for each in shared}
        self._owners, self._shared = [owner for owner, _ in variables], shared
        self.model: nn.Module
        self.model, self._loss, self._contents = deepcopy(
            (model, loss, [content for _, content in variables]), memo
        )

    @classmethod
    def of(cls, model: nn.Module, loss: PerSampleLoss, look: Look) -> Self | None:
        """A twin of what a look has seen; None if something cannot be copied."""
        try:
            return cls(model, loss, [(owner, read(owner)) for owner in look.owners], look.shared)
        except Exception:  # a lock, a tensor with a graph: whatever deepcopy cannot do
            return None

    def again(self) -> Twin:
        """A twin of this one."""
        return Twin(
            self.model, self._loss, list(zip(self._owners, self._contents, strict=True)), self._shared
        )

    def marks_after(self, rows: Rows) -> Marks | None:
        """What is held, but for what is shared, after a look at rows; None if that fails.

        Functions and classes are the model's own: while the twin runs, their variables are the twin's.
        """
        before = [read(owner) for owner in self._owners]
        try:
            for owner, content in zip(self._owners, self._contents, strict=True):
                write(owner, content)
            self._loss(self.model, rows)
            return Look(self.model, self._loss, by_value=True, skip=[id(each) for each in self._shared]).marks
        except Exception:  # whatever a model may do with other rows
            return None
        finally:
            for owner, content in zip(self._owners, before, strict=True):
                write(owner, content)
