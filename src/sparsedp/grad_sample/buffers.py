"""Buffers that outlive a chunk: fresh megabytes cost more in page faults than the arithmetic done in them."""

from __future__ import annotations

import ctypes
import math
from dataclasses import dataclass, field

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True, eq=False)
class Workspace:
    """Named buffers, re-used as long as they are large enough; every sampler has a name of its own among them.

    Their content is private and never read back. What a buffer holds is valid until it is asked for again.
    """

    name: str = ""
    buffers: dict[str, Tensor] = field(default_factory=dict)

    def of(self, name: str) -> Workspace:
        """The same buffers for a sampler of this name."""
        return Workspace(name, self.buffers)

    def result(self, shape: tuple[int, ...], like: Tensor, span: slice) -> Tensor:
        """Room for explicit gradients: of all examples the sampler's own, of some shared by all samplers."""
        return self._take(f"{self.name}/result" if span == slice(None) else "some examples", shape, like)

    def part(self, part: str, shape: tuple[int, ...], like: Tensor) -> Tensor:
        """Room for something else of this sampler's own."""
        return self._take(f"{self.name}/{part}", shape, like)

    def framed(self, frame: tuple[int, ...], shape: tuple[int, ...], like: Tensor) -> Tensor:
        """Room shared by all that write the same inner part of every example; the frame around it is zero."""
        return self._take(f"framed by {frame} to {shape[1:]}", shape, like)

    def scratch(self, shape: tuple[int, ...], like: Tensor) -> Tensor:
        """Room shared by all samplers."""
        return self._take("scratch", shape, like)

    def wide(self, part: str, values: Tensor) -> Tensor:
        """A float64 copy in room shared by all samplers."""
        like = torch.empty(0, dtype=torch.float64, device=values.device)
        return self._take(f"wide {part}", tuple(values.shape), like).copy_(values)

    def _take(self, key: str, shape: tuple[int, ...], like: Tensor) -> Tensor:
        size, buffer = math.prod(shape), self.buffers.get(key)
        kind = (like.dtype, like.device)
        if buffer is None or buffer.numel() < size or (buffer.dtype, buffer.device) != kind:
            buffer = self.buffers[key] = like.new_zeros(size)
        return buffer[:size].view(shape)


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
