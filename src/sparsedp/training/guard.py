"""Watching the model: samples must not mix, and nothing may remember private rows without noise."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import final

from torch import nn

from sparsedp.core.batch import PerSampleLoss, Rows
from sparsedp.core.errors import PrivacyError
from sparsedp.gradients.check import check_model


@final
class ModelGuard:
    """Checks a model before its first step, and again whenever a module was switched between `train` and `eval`.

    **Privacy.** A BatchNorm that was harmless in evaluation mode mixes samples in training mode, and then clipping
    protects nobody.
    """

    def __init__(self, model: nn.Module, loss: PerSampleLoss, some_rows: Callable[[], Rows]) -> None:
        self._model, self._loss, self._some_rows = model, loss, some_rows
        self._checked: tuple[bool, ...] | None = None

    def check(self) -> None:
        """Probe the model if it is not in the modes it was last checked in.

        Raises:
            ModelError: it mixes samples or writes to its buffers.
            SparseDPError: the loss is not one number per row.
        """
        modes = tuple(module.training for module in self._model.modules())
        if modes != self._checked:
            check_model(self._model, self._loss, self._some_rows())
            self._checked = modes


@contextmanager
def buffers_untouched(model: nn.Module) -> Iterator[None]:
    """Refuse a model whose forward pass writes to its buffers, whatever it did when it was checked.

    **Privacy.** A running mean or a counter of batches is computed from private rows without noise, and buffers are
    saved with the model.
    """
    before = _buffer_versions(model)
    yield
    after = _buffer_versions(model)
    if after != before:
        changed = sorted(name for name, version in after.items() if before.get(name) != version)
        raise PrivacyError(
            f"the model's buffers {changed[:6]} changed while it looked at private data, without any noise; "
            "switch off running statistics (track_running_stats=False) or move that state out of the model"
        )


def _buffer_versions(model: nn.Module) -> dict[str, tuple[int, int]]:
    return {name: (id(buffer), buffer._version) for name, buffer in model.named_buffers()}
