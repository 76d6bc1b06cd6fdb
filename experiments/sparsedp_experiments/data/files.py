"""Data files: where they are looked for, folders, zips and tars, pictures in them, and a disk cache of what is made.

**Privacy.** Cached files hold private records, decoded. They stay on this machine, in a folder of mode 700. A cache
that cannot be read or written costs time, not correctness: it is logged and the work is done again.
"""

from __future__ import annotations

import hashlib
import io
import logging
import os
import tarfile
import tempfile
import zipfile
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
import torch
from PIL import Image
from rich.console import Console
from rich.progress import track
from safetensors import SafetensorError
from safetensors.numpy import load_file, save_file

from sparsedp.errors import DataError
from sparsedp_experiments.data.bundle import Split

DATA_VARIABLE = "SPARSEDP_DATA"

Item = TypeVar("Item")


def cache_dir() -> Path:
    """The per-user cache: SPARSEDP_CACHE, else XDG_CACHE_HOME/sparsedp, else ~/.cache/sparsedp."""
    explicit = os.environ.get("SPARSEDP_CACHE")
    if explicit:
        return Path(explicit)
    caches = Path(os.environ.get("XDG_CACHE_HOME", ""))
    return (caches if caches.is_absolute() else Path.home() / ".cache") / "sparsedp"


@contextmanager
def replaced(path: Path) -> Iterator[Path]:
    """A temporary path beside `path` that takes its place if the block succeeds, and vanishes if it does not.

    For caches: readable by its owner alone, in a folder that is made if need be, and not waited for.
    """
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=path.stem[:16], suffix=".partial")
    os.close(handle)
    partial = Path(name)
    try:
        yield partial
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)


def search_roots(root: Path | str | None) -> tuple[Path, ...]:
    """Folders to look in: the given one alone, else SPARSEDP_DATA and then the per-user cache.

    A given root is not backed up by the others: whoever names a folder means that folder.
    """
    if root is not None:
        return (Path(root),)
    named = os.environ.get(DATA_VARIABLE)
    return (*([Path(named)] if named else []), cache_dir() / "datasets")


def fingerprint(paths: Sequence[Path], *details: object) -> str:
    """A name for these files as they are now (path, size, time of change) and for what is made of them.

    **Privacy.** Contents are not hashed: a hash of private data would be a release.
    """
    parts = [str(detail) for detail in details]
    for path in paths:
        stat = path.stat()
        parts.append(f"{path.resolve()}:{stat.st_size}:{stat.st_mtime_ns}")
    return "|".join(parts)


@dataclass(frozen=True, slots=True)
class FileTree:
    """Named files somewhere: `names` are relative paths with slashes, sorted; `read` gives one file's bytes."""

    origin: Path
    names: tuple[str, ...]
    read: Callable[[str], bytes] = field(repr=False)


@contextmanager
def open_tree(path: Path) -> Iterator[FileTree]:
    """A folder or a zip as a file tree."""
    if path.is_dir():
        names = sorted(entry.relative_to(path).as_posix() for entry in path.rglob("*") if entry.is_file())
        yield FileTree(path, tuple(names), lambda name: (path / name).read_bytes())
        return
    try:
        with zipfile.ZipFile(path) as archive:
            names = sorted(info.filename for info in archive.infolist() if not info.is_dir())
            yield FileTree(path, tuple(names), archive.read)
    except (zipfile.BadZipFile, zlib.error, EOFError, NotImplementedError) as error:
        raise DataError(f"{path}: cannot be read as a zip ({error}); it is truncated or damaged") from error


def tar_files(path: Path) -> Iterator[tuple[str, bytes]]:
    """Name and content of each regular file of a tar (compressed or not), in the order it has them."""
    try:
        with tarfile.open(path, mode="r|*") as archive:
            for member in archive:
                if member.isfile():
                    stream = archive.extractfile(member)
                    if stream is not None:
                        yield member.name, stream.read()
    except (tarfile.TarError, EOFError, OSError, zlib.error) as error:
        raise DataError(f"{path}: cannot be read as a tar ({error}); it is truncated or damaged") from error


def shown(items: Sequence[Item], title: str) -> Iterator[Item]:
    """The items, with a bar that vanishes when they are done; silent where nobody watches."""
    console = Console(stderr=True)
    yield from track(
        items, description=title, console=console, transient=True, disable=not console.is_terminal
    )


logger = logging.getLogger(__name__)

Arrays = dict[str, npt.NDArray[Any]]


def cached_arrays(fingerprint: str, make: Callable[[], Arrays]) -> Arrays:
    """The arrays `make` returns, from disk when they were made before under the same fingerprint."""
    path = cache_path(fingerprint, ".safetensors")
    if path.exists():
        try:
            return load_file(path)
        except (OSError, SafetensorError) as error:
            logger.warning("cache file %s cannot be read (%s): made again", path, error)
    made = {name: np.ascontiguousarray(array) for name, array in make().items()}
    try:
        with replaced(path) as partial:
            save_file(made, partial)
    except (OSError, SafetensorError) as error:
        logger.warning("cache file %s cannot be written (%s): it will be made again next time", path, error)
    return made


def cache_path(fingerprint: str, suffix: str) -> Path:
    """The cache file of a fingerprint."""
    return cache_dir() / "decoded" / (hashlib.sha256(fingerprint.encode()).hexdigest()[:32] + suffix)


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


def parted(whole: Split, keys: Sequence[str]) -> tuple[Split, Split]:
    """The training part of a split, and the fifth that a public hash of each row's key puts into the test set."""
    share = {key: public_share(key) for key in set(keys)}
    test = torch.tensor([share[key] < TEST_FRACTION for key in keys])
    return whole.select((~test).nonzero().squeeze(1)), whole.select(test.nonzero().squeeze(1))


def hash_names(tree: FileTree, names: Sequence[str]) -> str:
    """Names, sizes and times of a folder's files, for the cache; a zip's own size and time say it already."""
    if not tree.origin.is_dir():
        return ""
    stats = (((tree.origin / name).stat(), name) for name in names)
    listing = "|".join(f"{name}:{stat.st_size}:{stat.st_mtime_ns}" for stat, name in stats)
    return hashlib.sha256(listing.encode()).hexdigest()
