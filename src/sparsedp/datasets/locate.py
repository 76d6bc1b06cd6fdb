"""Where data files are looked for, and where derived ones are cached."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from sparsedp.core.errors import DataError

DATA_VARIABLE = "SPARSEDP_DATA"
CACHE_VARIABLE = "SPARSEDP_CACHE"


def cache_dir() -> Path:
    """The per-user cache: SPARSEDP_CACHE, else XDG_CACHE_HOME/sparsedp, else ~/.cache/sparsedp."""
    if explicit := os.environ.get(CACHE_VARIABLE):
        return Path(explicit)
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "sparsedp"


def download_dir() -> Path:
    """Where `get` puts the files it downloads."""
    return cache_dir() / "datasets"


def search_roots(root: Path | str | None) -> tuple[Path, ...]:
    """Folders to look in: the given one alone, else SPARSEDP_DATA and then the per-user cache.

    A given root is not backed up by the others: whoever names a folder means that folder.
    """
    if root is not None:
        return (Path(root),)
    named = os.environ.get(DATA_VARIABLE)
    return (*([Path(named)] if named else []), download_dir())


@dataclass(frozen=True, slots=True)
class Search:
    """One data set's possible folders under each root: `folders` relative to it, the root itself last."""

    name: str
    folders: tuple[str, ...]
    remedy: str

    def places(self, root: Path | str | None) -> list[Path]:
        """Every folder to look in, in order."""
        return [base / folder for base in search_roots(root) for folder in (*self.folders, ".")]

    def first(self, candidates: Sequence[str], root: Path | str | None) -> Path | None:
        """The first of the candidate paths that exists; all candidates are tried in one folder before the next."""
        for place in self.places(root):
            for candidate in candidates:
                if (place / candidate).exists():
                    return place / candidate
        return None

    def require(self, candidates: Sequence[str], root: Path | str | None) -> Path:
        """The first of the candidate paths that exists, or an error that says where it looked and what to do."""
        found = self.first(candidates, root)
        if found is None:
            looked = ", ".join(str(base) for base in search_roots(root))
            raise DataError(
                f"{self.name}: found none of {', '.join(candidates)} in {looked} (in {', '.join(self.folders)}). "
                f"{self.remedy} Point {DATA_VARIABLE} at the folder that holds it"
            )
        return found


def fingerprint(paths: Sequence[Path], *details: object) -> str:
    """A name for these files as they are now (path, size, time of change) and for what is made of them.

    **Privacy.** Contents are not hashed: a hash of private data would be a release.
    """
    parts = [str(detail) for detail in details]
    for path in paths:
        stat = path.stat()
        parts.append(f"{path.resolve()}:{stat.st_size}:{stat.st_mtime_ns}")
    return "|".join(parts)
