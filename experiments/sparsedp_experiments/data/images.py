"""Pictures into arrays, and sides of a split by a public hash."""

from __future__ import annotations

import hashlib
import io
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
from PIL import Image

from sparsedp.errors import DataError
from sparsedp_experiments.data.files import FileTree, shown

TEST_FRACTION = 0.2
_MODES = {1: "L", 3: "RGB"}


def decode(content: bytes, name: str, size: int, channels: int) -> npt.NDArray[np.uint8]:
    """One picture as bytes [channels, size, size]: the largest centred square, resized when it is not that size."""
    try:
        with Image.open(io.BytesIO(content)) as opened:
            picture = opened.convert(_MODES[channels])
    except (OSError, ValueError, SyntaxError, Image.DecompressionBombError) as error:
        raise DataError(
            f"{name}: cannot be decoded as a picture ({error}); it is damaged or no picture"
        ) from error
    if picture.size != (size, size):
        side = min(picture.size)
        left, top = (picture.width - side) // 2, (picture.height - side) // 2
        square = picture.crop((left, top, left + side, top + side))
        picture = square.resize(
            (size, size), Image.Resampling.BOX if side > size else Image.Resampling.BILINEAR
        )
    array = np.asarray(picture, dtype=np.uint8)
    return array[None] if channels == 1 else np.ascontiguousarray(array.transpose(2, 0, 1))


def decode_all(tree: FileTree, names: Sequence[str], size: int, channels: int) -> npt.NDArray[np.uint8]:
    """Many pictures of a tree, stacked."""
    out = np.empty((len(names), channels, size, size), dtype=np.uint8)
    for row, name in enumerate(shown(names, f"decoding {tree.origin.name}")):
        out[row] = decode(tree.read(name), f"{tree.origin}: {name}", size, channels)
    return out


def public_share(key: str) -> float:
    """A number in [0, 1) that depends on the key alone: decides sides of a split without looking at the data."""
    digest = hashlib.blake2b(key.encode(), digest_size=8, person=b"sparsedp-split").digest()
    return int.from_bytes(digest, "big") / 2**64


def hash_names(tree: FileTree, names: Sequence[str]) -> str:
    """Names, sizes and times of a folder's files, for the cache; a zip's own size and time say it already."""
    if not tree.origin.is_dir():
        return ""
    stats = (((tree.origin / name).stat(), name) for name in names)
    listing = "|".join(f"{name}:{stat.st_size}:{stat.st_mtime_ns}" for stat, name in stats)
    return hashlib.sha256(listing.encode()).hexdigest()
