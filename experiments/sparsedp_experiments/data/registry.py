"""The data sets by name, what is there of their files, and fetching what is not.

What a name stands for is in `datasets.toml`; a new data set is a loader, named below, and its tables there.
"""

from __future__ import annotations

import hashlib
import shutil
import urllib.request
from collections.abc import Callable, Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

from sparsedp.errors import DataError
from sparsedp_experiments.data.bundle import DataBundle
from sparsedp_experiments.data.files import cache_dir, replaced
from sparsedp_experiments.data.ratings import movielens
from sparsedp_experiments.data.spec import FEATURES, SOURCES, TABLES, DatasetRow, PublicFiles, SourceFile
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

_TIMEOUT_SECONDS = 60


def load(name: str, root: Path | str | None = None, **options: Any) -> DataBundle:
    """A data set by its name in `DATASETS`, with the options of its loader.

    Looked for in `root` if given, else in SPARSEDP_DATA and then in the per-user cache.
    """
    row = DATASETS.get(name.replace("_", "-"))
    if row is None:
        raise DataError(f"no data set named {name!r}; there are {', '.join(DATASETS)}")
    return row.load(root, **options)


class SourceStatus(NamedTuple):
    """What there is of a data set: the first complete form (else the first), its files, and those missing."""

    source: PublicFiles
    form: str
    files: tuple[tuple[SourceFile, Path | None], ...]

    @property
    def missing(self) -> tuple[str, ...]:
        return tuple(file.names[0] for file, path in self.files if path is None)


def status(spec: PublicFiles, root: Path | str | None = None) -> SourceStatus:
    """What there is of a public data set."""
    forms = [
        SourceStatus(spec, form, tuple((file, spec.first(file.names, root)) for file in files))
        for form, files in spec.forms.items()
    ]
    return next((one for one in forms if not one.missing), forms[0])


@lru_cache(maxsize=8)
def public_checksum(name: str, root: Path | str | None = None) -> str | None:
    """The checksum of a public data set whose files are the originals: SHA-256 of theirs, one a line; else None.

    **Privacy.** It is made of the published checksums, so files that differ leave no trace but None.
    """
    found = status(SOURCES[name], root)
    if not all(is_original(path, file) for file, path in found.files):
        return None
    published = "\n".join(file.sha256[0] for file in found.source.forms[found.form])
    return hashlib.sha256(published.encode()).hexdigest()


def get(name: str) -> list[Path]:
    """Download a data set from its official address into the per-user cache.

    A file is put in place only when its checksum is right; files already there and right are kept.
    """
    if name not in SOURCES:
        raise DataError(f"no data set named {name!r}; there are {', '.join(SOURCES)}")
    spec = SOURCES[name]
    form = next((files for files in spec.forms.values() if all(file.url for file in files)), None)
    if form is None:
        raise DataError(
            f"{name}: cannot be downloaded freely. It comes from {spec.origin}: put it where it is looked for"
        )
    return [_fetch(file, cache_dir() / "datasets" / spec.folders[0]) for file in form]


def is_original(path: Path | None, file: SourceFile) -> bool:
    """Whether a file is there and has a checksum of the public original."""
    if path is None or not path.is_file():
        return False
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest() in file.sha256


def _fetch(file: SourceFile, folder: Path) -> Path:
    assert file.url is not None
    path = folder / file.url.rsplit("/", 1)[-1]
    if is_original(path, file):
        return path
    request = urllib.request.Request(file.url, headers={"User-Agent": "sparsedp"})
    try:
        with replaced(path) as partial:
            with (
                urllib.request.urlopen(request, timeout=_TIMEOUT_SECONDS) as stream,
                partial.open("wb") as out,
            ):
                shutil.copyfileobj(stream, out)
            if not is_original(partial, file):
                raise DataError(
                    f"{file.url}: got a file with another sha256 than {file.sha256[0]}; nothing was kept. The "
                    "address serves something else, or the transfer was damaged: try again"
                )
    except OSError as error:
        raise DataError(
            f"{file.url}: cannot be downloaded ({error}); fetch it by hand and put it in {folder}"
        ) from error
    return path
