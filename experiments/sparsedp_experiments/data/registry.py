"""The data sets by name, what is there of their files, and fetching what is not.

What a name stands for is in `datasets.toml`; a new data set is a loader, named below, and its tables there.
"""

from __future__ import annotations

import gzip
import hashlib
import urllib.error
import urllib.request
import zipfile
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import IO, Any, cast

from sparsedp.errors import DataError
from sparsedp_experiments.data.bundle import DataBundle
from sparsedp_experiments.data.files import download_dir, replaced
from sparsedp_experiments.data.ratings import movielens
from sparsedp_experiments.data.spec import (
    FEATURES,
    SOURCES,
    TABLES,
    DatasetRow,
    PublicFiles,
    SourceFile,
)
from sparsedp_experiments.data.tables import adult, census_income, compas, diabetes130
from sparsedp_experiments.data.text import imdb, imdb_tokens, imdb_vectors, zipf_texts
from sparsedp_experiments.data.vision import cifar10, digits, eyepacs, fashion_mnist, mnist

_LOADERS: Mapping[str, Callable[..., DataBundle]] = {
    loader.__name__: loader
    for loader in (
        digits, mnist, fashion_mnist, cifar10, eyepacs, diabetes130, adult, census_income, compas, imdb,
        imdb_vectors, imdb_tokens, movielens, zipf_texts,
    )
}  # fmt: skip


def _row(name: str, told: Mapping[str, Any]) -> DatasetRow:
    rest = {key: value for key, value in told.items() if key not in ("files", "loader", "features")}
    return DatasetRow(
        name=name,
        source=SOURCES.get(told.get("files", "")),
        loader=_LOADERS[told["loader"]],
        features=FEATURES.get(told.get("features", "")),
        **rest,
    )


DATASETS: Mapping[str, DatasetRow] = {name: _row(name, told) for name, told in TABLES["datasets"].items()}

OFFICIAL, DIFFERENT, UNKNOWN = "official", "different", "unknown"
"""How a file compares with the public original: equal, not equal, or no checksum is known."""
_BLOCK = 1 << 20
_TIMEOUT_SECONDS = 60

Opener = Callable[[str], IO[bytes]]
Progress = Callable[[str, int, int | None], None]
"""Called with a file's name, the bytes that arrived, and the bytes there are (None if unknown)."""


def load(name: str, root: Path | str | None = None, **options: Any) -> DataBundle:
    """A data set by its name in `DATASETS`, with the options of its loader.

    Looked for in `root` if given, else in SPARSEDP_DATA and then in the per-user cache.
    """
    row = DATASETS.get(name.replace("_", "-"))
    if row is None:
        raise DataError(f"no data set named {name!r}; there are {', '.join(DATASETS)}")
    return row.load(root, **options)


def source(name: str) -> PublicFiles:
    """The public files of that name."""
    if name not in SOURCES:
        raise DataError(f"no data set named {name!r}; there are {', '.join(SOURCES)}")
    return SOURCES[name]


@dataclass(frozen=True, slots=True)
class SourceStatus:
    """What there is of a data set: the first complete form (else the first), its files, and those missing."""

    source: PublicFiles
    form: str
    files: tuple[tuple[SourceFile, Path], ...]
    missing: tuple[str, ...]

    def checksums(self) -> list[str]:
        """How each file compares with the public original; reads every file."""
        return [compare(path, file.sha256) for file, path in self.files]


def status(spec: PublicFiles, root: Path | str | None = None) -> SourceStatus:
    """What there is of a public data set."""
    forms = []
    for form, files in spec.forms.items():
        located = [(file, spec.first(file.names, root)) for file in files]
        found = tuple((file, path) for file, path in located if path is not None)
        missing = tuple(file.names[0] for file, path in located if path is None)
        forms.append(SourceStatus(spec, form, found, missing))
    return next((one for one in forms if not one.missing), forms[0])


@lru_cache(maxsize=8)
def public_checksum(name: str, root: Path | str | None = None) -> str | None:
    """The checksum of a public data set whose files are the originals: SHA-256 of theirs, one a line; else None.

    **Privacy.** It is made of the published checksums, so files that differ leave no trace but None.
    """
    found = status(source(name), root)
    if found.missing or set(found.checksums()) != {OFFICIAL}:
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


def compare(path: Path, known: tuple[str, ...]) -> str:
    """Whether a file, or the one file compressed in it, is a public original."""
    if not known or path.is_dir():
        return UNKNOWN
    return OFFICIAL if any(digest in known for digest in _digests(path)) else DIFFERENT


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
    if path.exists() and compare(path, file.sha256) == OFFICIAL:
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
    digest, done = hashlib.sha256(), 0
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
