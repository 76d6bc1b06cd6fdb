"""A grey picture as a PNG, without a library; stored, not packed, so that every machine writes the same bytes."""

from __future__ import annotations

import base64
import struct
import zlib


def grey_png(pixels: bytes, width: int, height: int) -> bytes:
    """A PNG of 8-bit grey pixels, row by row."""
    if len(pixels) != width * height:
        raise ValueError(f"pixels: got {len(pixels)} bytes, expected {width} x {height}")
    rows = b"".join(b"\0" + pixels[width * row : width * (row + 1)] for row in range(height))
    head = struct.pack(">IIBBBBB", width, height, 8, 0, 0, 0, 0)
    parts = ((b"IHDR", head), (b"IDAT", zlib.compress(rows, 0)), (b"IEND", b""))
    return b"\x89PNG\r\n\x1a\n" + b"".join(_chunk(kind, data) for kind, data in parts)


def data_address(png: bytes) -> str:
    """A PNG as an address to put into an SVG."""
    return "data:image/png;base64," + base64.b64encode(png).decode()


def _chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
