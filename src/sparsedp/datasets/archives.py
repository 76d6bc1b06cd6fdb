"""Reading files out of folders, zips and tars without ever extracting them."""

from __future__ import annotations

import tarfile
import zipfile
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath

from sparsedp.core.errors import DataError


@dataclass(frozen=True, slots=True)
class FileTree:
    """Named files somewhere: `names` are relative paths with slashes, sorted; `read` gives one file's bytes."""

    origin: Path
    names: tuple[str, ...]
    read: Callable[[str], bytes] = field(repr=False)


@contextmanager
def open_tree(path: Path) -> Iterator[FileTree]:
    """A folder or a zip as a file tree.

    Raises:
        DataError: the zip is damaged, a member cannot be read, or a member's name leaves the archive. It names both.
    """
    if path.is_dir():
        names = sorted(entry.relative_to(path).as_posix() for entry in path.rglob("*") if entry.is_file())
        yield FileTree(path, tuple(names), lambda name: (path / name).read_bytes())
        return
    try:
        archive = zipfile.ZipFile(path)
    except (zipfile.BadZipFile, OSError) as error:
        raise DataError(f"{path}: cannot be opened as a zip ({error}); it is truncated or damaged") from error
    with archive:
        names = sorted(info.filename for info in archive.infolist() if not info.is_dir())
        for name in names:
            check_member(path, name)
        yield FileTree(path, tuple(names), lambda name: _read_zip(archive, path, name))


def tar_files(path: Path) -> Iterator[tuple[str, bytes]]:
    """Name and content of each regular file of a tar (compressed or not), in the order it has them.

    Raises:
        DataError: the archive is damaged or truncated, or a member's name leaves it.
    """
    try:
        with tarfile.open(path, mode="r|*") as archive:
            for member in archive:
                check_member(path, member.name)
                if member.isfile():
                    stream = archive.extractfile(member)
                    if stream is not None:
                        yield member.name, stream.read()
    except (tarfile.TarError, EOFError, OSError, zlib.error) as error:
        raise DataError(f"{path}: cannot be read as a tar ({error}); it is truncated or damaged") from error


def check_member(path: Path, name: str) -> None:
    """Refuse archive members with absolute names or names that climb out."""
    parts = PurePosixPath(name.replace("\\", "/"))
    if parts.is_absolute() or ".." in parts.parts or (parts.parts and parts.parts[0].endswith(":")):
        raise DataError(
            f"{path}: member {name!r} points outside the archive; this is no honest copy: do not use it"
        )


def _read_zip(archive: zipfile.ZipFile, path: Path, name: str) -> bytes:
    try:
        return archive.read(name)
    except (zipfile.BadZipFile, zlib.error, EOFError, OSError, RuntimeError, NotImplementedError) as error:
        raise DataError(f"{path}: member {name!r} cannot be read ({error}); the zip is damaged") from error
