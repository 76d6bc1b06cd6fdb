"""Sparse updates on the wire: values every step, indices once per refresh, against dense updates.

A message of indices is one byte that names the smaller of two encodings: a bitmap of d bits, or the gaps between
sorted indices with the number of bits that makes them shortest (Golomb-Rice: quotient in unary, remainder in that
many bits). Values are float32. Both ends know d and k.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import final

import numpy as np

from sparsedp.parameters import Support

VALUE_BYTES = 4


def support_bytes(support: Support) -> int:
    """The length of a message of indices."""
    gaps = np.diff(support.indices.numpy(), prepend=-1) - 1
    rice = (int((gaps >> bits).sum()) + support.size * (1 + bits) for bits in range(32))
    return 1 + math.ceil(min(support.dimension, *rice) / 8 if support.size else support.dimension / 8)


@final
@dataclass(frozen=True, slots=True)
class BytesSent:
    """Bytes sent by a run of updates."""

    steps: int  # number of updates
    values: int  # bytes of values
    indices: int  # bytes of supports, sent when they change
    dense: int  # bytes that dense updates would have taken

    @property
    def share(self) -> float:
        return (self.values + self.indices) / self.dense if self.dense else 1.0


def traffic(supports: Sequence[Support]) -> BytesSent:
    """Count the bytes of an update on each support.

    **Edge cases.** A support is sent when it differs from the one before; a full one needs no indices.
    """
    indices, before = 0, None
    for support in supports:
        if support != before and not support.is_full:
            indices += support_bytes(support)
        before = support
    values, dense = (
        VALUE_BYTES * sum(sizes) for sizes in zip(*((s.size, s.dimension) for s in supports), strict=True)
    )
    return BytesSent(len(supports), values, indices, dense)
