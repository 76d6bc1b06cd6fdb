"""Watching the model: samples must not mix, and nothing may remember private rows without noise."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from hashlib import blake2b
from typing import final

import torch
from torch import Tensor, nn

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


@final
class StateGuard:
    """Refuses a model whose forward pass writes to its parameters or buffers, whatever it did when it was checked.

    Every step compares PyTorch's version counters, which cost nothing and show every ordinary write. A write through
    `.data` or a NumPy view does not move them, so at the first step and at the last of every epoch the values are
    compared too, by a digest: no second copy of a large frozen model is held, and reading it once an epoch is cheap.

    **Privacy.** A running mean, a counter of batches or a frozen weight that moves is computed from private rows
    without noise, and is saved with the model.
    **Edge cases.** State may be changed between steps, by ordinary writes. Frozen state whose digest changed while
    its counter did not is refused even if the write was in an earlier step of the epoch. A hidden write to trained
    weights is found only in the steps that compare values.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._digests: dict[str, tuple[Mark, bytes]] = {}

    @contextmanager
    def untouched(self, *, last_of_epoch: bool) -> Iterator[None]:
        """Watch the model while gradients are computed.

        Raises:
            PrivacyError: its state changed, and which.
        """
        by_value = last_of_epoch or not self._digests
        before = _state(self._model)  # holds the tensors, so that a new one cannot take the id of an old one
        marks = {name: _mark(tensor) for name, tensor in before.items()}
        if by_value:
            self._digests = {
                name: (marks[name], self._digest(name, tensor)) for name, tensor in before.items()
            }
        yield
        after = _state(self._model)
        changed = {name for name in before.keys() | after.keys() if name not in after or name not in before}
        changed |= {name for name in before.keys() & after.keys() if marks[name] != _mark(after[name])}
        if by_value:
            kept = after.keys() - changed
            changed |= {name for name in kept if self._digests[name][1] != digest(after[name])}
        if changed:
            raise PrivacyError(
                f"{sorted(changed)[:6]} of the model changed while it looked at private data, without any noise; "
                "switch off running statistics (track_running_stats=False) or move that state out of the model"
            )

    def _digest(self, name: str, tensor: Tensor) -> bytes:
        """The digest a frozen tensor had when it was last written in the open; of others the one it has now."""
        mark, known = self._digests.get(name, (None, b""))
        return known if mark == _mark(tensor) and not tensor.requires_grad else digest(tensor)


Mark = tuple[int, int]


def digest(tensor: Tensor) -> bytes:
    """A hash of a tensor's bytes."""
    plain = tensor.detach().to_dense() if tensor.layout is not torch.strided else tensor.detach()
    flat = plain.cpu().contiguous().reshape(-1)
    return blake2b(flat.view(torch.uint8).numpy().data if flat.numel() else b"", digest_size=16).digest()


def _mark(tensor: Tensor) -> Mark:
    return id(tensor), tensor._version


def _state(model: nn.Module) -> dict[str, Tensor]:
    return {**dict(model.named_parameters()), **dict(model.named_buffers())}
