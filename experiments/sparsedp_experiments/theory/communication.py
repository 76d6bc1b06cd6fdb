"""Sparse updates on the wire: values every step, indices once per refresh, against dense updates.

A message of indices is the smaller of two encodings: a bitmap of d bits, or the gaps between sorted indices with the
number of bits that makes them shortest (Golomb-Rice: quotient in unary, remainder in that many bits). Values are
little-endian float32. Both ends know d and k.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import final

import numpy as np
import torch
from torch import Tensor

from sparsedp.errors import DataError
from sparsedp.parameters import Support

_BITMAP = 255
VALUE_BYTES = 4


def encode_support(support: Support) -> bytes:
    """The indices as bytes: one byte that names the encoding, then the bits."""
    if support.size == 0:
        return bytes([_BITMAP]) + np.packbits(support.mask().numpy()).tobytes()
    gaps = np.diff(support.indices.numpy(), prepend=-1) - 1
    sizes = [int((gaps >> bits).sum()) + support.size * (1 + bits) for bits in range(32)]
    bits = int(np.argmin(sizes))
    if support.dimension <= sizes[bits]:
        return bytes([_BITMAP]) + np.packbits(support.mask().numpy()).tobytes()
    return bytes([bits]) + np.packbits(_rice(gaps, bits)).tobytes()


def decode_support(message: bytes, size: int, dimension: int) -> Support:
    """The support of `size` of `dimension` coordinates a message was made from.

    Raises:
        DataError: the message does not hold such a support.
    """
    if not message:
        raise DataError("support message: got no bytes, expected at least one")
    stream = np.unpackbits(np.frombuffer(message[1:], dtype=np.uint8))
    if message[0] == _BITMAP:
        indices = np.flatnonzero(stream[:dimension])
    else:
        indices = np.cumsum(_gaps(stream, message[0], size) + 1) - 1
    if len(indices) != size or (size and indices[-1] >= dimension):
        raise DataError(f"support message: does not hold {size} of {dimension} coordinates; it is damaged")
    return Support(torch.from_numpy(indices.astype(np.int64)), dimension)


def encode_values(values: Tensor) -> bytes:
    """The k values of an update, float32."""
    return values.detach().to("cpu", torch.float32).numpy().astype("<f4").tobytes()


@final
@dataclass(frozen=True, slots=True)
class BytesSent:
    """Bytes sent by a run of updates."""

    steps: int  # number of updates
    values: int  # bytes of values
    indices: int  # bytes of supports, sent when they change
    dense: int  # bytes that dense updates would have taken

    @property
    def per_step(self) -> float:
        """Mean bytes of an update, its share of the indices included."""
        return (self.values + self.indices) / self.steps if self.steps else 0.0

    @property
    def share(self) -> float:
        return (self.values + self.indices) / self.dense if self.dense else 1.0


def traffic(supports: Sequence[Support], messages: Sequence[bytes]) -> BytesSent:
    """Count real encoded updates: one support and one message of values per step.

    **Edge cases.** A support is sent when it differs from the one before; a full one needs no indices.
    """
    indices, before = 0, None
    for support in supports:
        if support != before and not support.is_full:
            indices += len(encode_support(support))
        before = support
    dense = sum(VALUE_BYTES * support.dimension for support in supports)
    return BytesSent(len(supports), sum(map(len, messages)), indices, dense)


def _rice(gaps: np.ndarray, bits: int) -> np.ndarray:
    """Per gap: quotient ones, a zero, then the remainder's bits, highest first."""
    quotients = gaps >> bits
    ends = np.cumsum(quotients + 1 + bits)
    stream = np.zeros(int(ends[-1]), dtype=np.uint8)
    starts = ends - (quotients + 1 + bits)
    ones = np.repeat(starts - (np.cumsum(quotients) - quotients), quotients) + np.arange(int(quotients.sum()))
    stream[ones] = 1
    for place in range(bits):
        stream[ends - 1 - place] = (gaps >> place) & 1
    return stream


def _gaps(stream: np.ndarray, bits: int, size: int) -> np.ndarray:
    """Undo `_rice`; zeros in remainders must not be taken for ends of quotients, so it goes gap by gap."""
    zeros = np.flatnonzero(stream == 0)
    gaps = np.empty(size, dtype=np.int64)
    position, weights = 0, 1 << np.arange(bits)[::-1]
    for item in range(size):
        place = np.searchsorted(zeros, position)
        if place == len(zeros) or zeros[place] + bits >= len(stream):
            raise DataError("support message: it ends too early; it is damaged")
        end = int(zeros[place])
        remainder = int(stream[end + 1 : end + 1 + bits] @ weights) if bits else 0
        gaps[item] = ((end - position) << bits) | remainder
        position = end + 1 + bits
    return gaps
