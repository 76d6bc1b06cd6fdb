"""What is there of each public data set, and fetching what is not."""

from __future__ import annotations

import gzip
import hashlib
import urllib.error
import urllib.request
import zipfile
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from functools import lru_cache
from pathlib import Path
from typing import IO, cast

from sparsedp._files import replaced
from sparsedp.errors import DataError
from sparsedp_experiments.data.files import download_dir, search_roots
from sparsedp_experiments.data.row import PublicFiles, SourceFile
from sparsedp_experiments.data.table import SOURCES, source

_BLOCK = 1 << 20
_TIMEOUT_SECONDS = 60

Opener = Callable[[str], IO[bytes]]
Progress = Callable[[str, int, int | None], None]
"""Called with a file's name, the bytes that arrived, and the bytes there are (None if unknown)."""


class Checksum(Enum):
    """How a file compares with the public original."""

    OFFICIAL = "the public original"
    DIFFERENT = "not the public original"
    UNKNOWN = "no checksum known"


@dataclass(frozen=True, slots=True)
class FoundFile:
    """A file of a data set, and whether it is the public original."""

    path: Path
    checksum: Checksum


@dataclass(frozen=True, slots=True)
class SourceStatus:
    """What there is of one data set: the form found most complete, its files, and the names of those missing."""

    source: PublicFiles
    form: str
    found: tuple[FoundFile, ...]
    missing: tuple[str, ...]
    searched: tuple[Path, ...]

    @property
    def complete(self) -> bool:
        """Whether it can be loaded."""
        return not self.missing


def status(root: Path | str | None = None) -> list[SourceStatus]:
    """What there is of every public data set. Reads each file once, for its checksum."""
    return [_status_of(spec, root) for spec in SOURCES.values()]


@lru_cache(maxsize=8)
def public_checksum(name: str, root: Path | str | None = None) -> str | None:
    """The checksum of a public data set whose files are the originals: SHA-256 of theirs, one a line; else None.

    **Privacy.** It is made of the published checksums, so files that differ leave no trace but None.
    """
    found = _status_of(source(name), root)
    if not found.complete or any(file.checksum is not Checksum.OFFICIAL for file in found.found):
        return None
    published = "\n".join(file.sha256[0] for file in found.source.forms[found.form])
    return hashlib.sha256(published.encode()).hexdigest()


def get(
    name: str,
    opener: Opener | None = None,
    progress: Progress | None = None,
    destination: Path | str | None = None,
) -> list[Path]:
    """Download a data set from its official address into the per-user cache (or `destination`).

    A file is put in place only when its checksum is right; files already there and right are kept.

    Raises:
        DataError: the data set cannot be downloaded freely, the network does not answer, or a checksum is wrong.
    """
    spec = source(name)
    form = next((files for files in spec.forms.values() if all(file.url for file in files)), None)
    if form is None:
        raise DataError(
            f"{name}: cannot be downloaded freely. It comes from {spec.origin}: put it where it is looked for"
        )
    base = Path(destination) if destination is not None else download_dir()
    return [_fetch(file, base / spec.folders[0], opener or _open_address, progress) for file in form]


def compare(path: Path, known: tuple[str, ...]) -> Checksum:
    """Whether a file, or the one file compressed in it, is a public original."""
    if not known or path.is_dir():
        return Checksum.UNKNOWN
    if any(digest in known for digest in _digests(path)):
        return Checksum.OFFICIAL
    return Checksum.DIFFERENT


def _status_of(spec: PublicFiles, root: Path | str | None) -> SourceStatus:
    best: tuple[str, list[FoundFile], list[str]] | None = None
    for form, files in spec.forms.items():
        located = [(file, spec.search.first(file.candidates, root)) for file in files]
        found = [FoundFile(path, compare(path, file.sha256)) for file, path in located if path is not None]
        missing = [file.candidates[0] for file, path in located if path is None]
        if best is None or (not missing and best[2]):
            best = (form, found, missing)
    assert best is not None
    return SourceStatus(spec, best[0], tuple(best[1]), tuple(best[2]), search_roots(root))


def _digests(path: Path) -> list[str]:
    """Checksums of the file itself and, where it is one compressed file, of what is in it."""
    with path.open("rb") as stream:
        digests = [_digest(stream)]
    try:
        if path.suffix == ".gz" and not path.name.endswith(".tar.gz"):
            with gzip.open(path) as content:
                digests.append(_digest(cast("IO[bytes]", content)))
        elif path.suffix == ".zip":
            with zipfile.ZipFile(path) as archive:
                names = archive.namelist()
                if len(names) == 1:
                    with archive.open(names[0]) as member:
                        digests.append(_digest(member))
    except (OSError, EOFError, zlib.error, zipfile.BadZipFile):
        return digests
    return digests


def _digest(stream: IO[bytes]) -> str:
    digest = hashlib.sha256()
    while block := stream.read(_BLOCK):
        digest.update(block)
    return digest.hexdigest()


def _fetch(file: SourceFile, folder: Path, opener: Opener, progress: Progress | None) -> Path:
    assert file.url is not None
    path = folder / file.url.rsplit("/", 1)[-1]
    if path.exists() and compare(path, file.sha256) is Checksum.OFFICIAL:
        return path
    try:
        with replaced(path) as partial:
            digest = _save(file.url, partial, opener, progress)
            if digest not in file.sha256:
                raise DataError(
                    f"{file.url}: got a file with sha256 {digest}, expected {file.sha256[0]}; nothing was kept. The "
                    "address serves something else, or the transfer was damaged: try again"
                )
    except (OSError, urllib.error.URLError) as error:
        raise DataError(
            f"{file.url}: cannot be downloaded ({error}); fetch it by hand and put it in {folder}"
        ) from error
    return path


def _save(url: str, path: Path, opener: Opener, progress: Progress | None) -> str:
    digest = hashlib.sha256()
    done = 0
    with opener(url) as stream, path.open("wb") as out:
        headers = getattr(stream, "headers", None)
        length = headers.get("Content-Length") if headers is not None else None
        total = int(length) if length is not None else None
        while block := stream.read(_BLOCK):
            digest.update(block)
            out.write(block)
            done += len(block)
            if progress is not None:
                progress(url.rsplit("/", 1)[-1], done, total)
    if total is not None and done != total:
        raise OSError(f"got {done} of {total} bytes")
    return digest.hexdigest()


def _open_address(url: str) -> IO[bytes]:
    request = urllib.request.Request(url, headers={"User-Agent": "sparsedp"})
    return cast("IO[bytes]", urllib.request.urlopen(request, timeout=_TIMEOUT_SECONDS))
