"""Buffers that outlive a chunk: fresh megabytes cost more in page faults than the arithmetic done in them."""

from __future__ import annotations

import ctypes
import math
from dataclasses import dataclass

import torch
from torch import Tensor


class Workspace:
    """Named buffers, re-used as long as they are large enough. Their content is private and never read back."""

    def __init__(self) -> None:
        self._buffers: dict[str, Tensor] = {}
        self._framed: dict[str, tuple[int, ...]] = {}

    def take(self, key: str, shape: tuple[int, ...], like: Tensor) -> Tensor:
        """An uninitialised tensor; the previous one under this key becomes invalid."""
        size = math.prod(shape)
        buffer = self._buffers.get(key)
        if (
            buffer is None
            or buffer.numel() < size
            or buffer.dtype != like.dtype
            or buffer.device != like.device
        ):
            buffer = like.new_empty(size)
            self._buffers[key] = buffer
            self._framed.pop(key, None)
        return buffer[:size].view(shape)

    def take_framed(self, key: str, shape: tuple[int, ...], like: Tensor) -> Tensor:
        """A tensor whose frame is zero if the caller always writes the same inner part of every example."""
        tensor = self.take(key, shape, like)
        if self._framed.get(key) != shape[1:]:
            self._buffers[key].zero_()
            self._framed[key] = shape[1:]
        return tensor


@dataclass(frozen=True, slots=True)
class Space:
    """One sampler's share of the workspace."""

    workspace: Workspace
    name: str

    def result(self, shape: tuple[int, ...], like: Tensor, span: slice) -> Tensor:
        """Room for explicit gradients.

        Of all examples it is this sampler's own, valid until the next chunk; of some, shared by all samplers and
        valid until the next one asks.
        """
        key = f"{self.name}/result" if span == slice(None) else "some examples"
        return self.workspace.take(key, shape, like)

    def part(self, part: str, shape: tuple[int, ...], like: Tensor) -> Tensor:
        """Room for something else of this sampler's own; valid until the next chunk."""
        return self.workspace.take(f"{self.name}/{part}", shape, like)

    def framed(self, part: str, shape: tuple[int, ...], like: Tensor) -> Tensor:
        """Room for a zero-framed copy, shared by all samplers that frame this part in this shape.

        `part` must say what is framed: whoever asks for it writes the same inner part. Valid until the next one asks.
        """
        return self.workspace.take_framed(f"{part} in {shape[1:]}", shape, like)

    def scratch(self, shape: tuple[int, ...], like: Tensor) -> Tensor:
        """Room shared by all samplers; valid until the next one asks."""
        return self.workspace.take("scratch", shape, like)

    def wide(self, part: str, values: Tensor) -> Tensor:
        """A float64 copy in room shared by all samplers; valid until the next one asks for this part."""
        like = torch.empty(0, dtype=torch.float64, device=values.device)
        return self.workspace.take(f"wide {part}", tuple(values.shape), like).copy_(values)


_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3
"""Parameters of glibc's mallopt."""
_NEVER, _LARGE = 2**31 - 1, 2**30
_kept = False


def keep_freed_memory() -> bool:
    """Let this process keep freed memory below a gigabyte a piece instead of giving it back page by page.

    Every batch needs the same tens of megabytes again, and the page faults of asking for them anew can cost more than
    the arithmetic. For the whole process, so the command line calls it and `fit` does not; call it first thing in a
    program of your own. Results are the same to the bit.

    Returns:
        Whether the C library knows how; only glibc does.
    """
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError, TypeError):
        return False
    kept = bool(mallopt(_TRIM_THRESHOLD, _NEVER)) and bool(mallopt(_MMAP_THRESHOLD, _LARGE))
    global _kept
    _kept = _kept or kept
    return kept


def give_back_freed_memory() -> None:
    """Give memory that was freed back to the system, unless `keep_freed_memory` was asked to keep it.

    For use before something large is made; the pages are asked for again when they are needed.
    """
    if _kept:
        return
    try:
        ctypes.CDLL(None).malloc_trim(0)
    except (OSError, AttributeError, TypeError):
        return
