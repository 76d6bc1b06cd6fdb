"""What the name of a data set stands for: files and their checksums, loader, model, and settings that work."""

from __future__ import annotations

import inspect
import tomllib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from sparsedp.errors import DataError, SparseDPError
from sparsedp_experiments.data.bundle import DataBundle
from sparsedp_experiments.data.features import lite0_bundle, scattering_bundle
from sparsedp_experiments.data.files import DATA_VARIABLE, search_roots

Value = float | int | str

_NOT_OPTIONS = {"root", "bundle"}


@dataclass(frozen=True, slots=True)
class SourceFile:
    """One file of a data set: the names it may have, its known checksums, and where it can be downloaded."""

    names: tuple[str, ...]
    sha256: tuple[str, ...] = ()
    url: str | None = None


@dataclass(frozen=True, slots=True)
class PublicFiles:
    """The public files behind a data set: forms are alternatives, the first complete one is loaded."""

    name: str
    title: str
    records: str
    task: str
    origin: str
    folders: tuple[str, ...]
    forms: Mapping[str, tuple[SourceFile, ...]]

    @property
    def remedy(self) -> str:
        """What to do where they are missing."""
        downloadable = any(file.url for files in self.forms.values() for file in files)
        command = (
            f"`python -m sparsedp_experiments data get {self.name}` downloads it. " if downloadable else ""
        )
        return f"{command}It comes from {self.origin}."

    def require(self, root: Path | str | None) -> list[Path]:
        """The files of the first form, or an error that says where they were looked for and what to do."""
        return [self.find(file.names, root) for file in next(iter(self.forms.values()))]

    def first(self, names: Sequence[str], root: Path | str | None) -> Path | None:
        """The first of these names there is; all are tried in one folder before the next, a root itself last."""
        for base in search_roots(root):
            for folder in (*self.folders, "."):
                for name in names:
                    if (base / folder / name).exists():
                        return base / folder / name
        return None

    def find(self, names: Sequence[str], root: Path | str | None) -> Path:
        """The same, or an error."""
        found = self.first(names, root)
        if found is None:
            looked = ", ".join(str(base) for base in search_roots(root))
            raise DataError(
                f"{self.name}: found none of {', '.join(names)} in {looked} (in {', '.join(self.folders)}). "
                f"{self.remedy} Point {DATA_VARIABLE} at the folder that holds it"
            )
        return found


FEATURES: Mapping[str, Callable[..., DataBundle]] = {"scattering": scattering_bundle, "lite0": lite0_bundle}
TABLES: Mapping[str, Mapping[str, Any]] = tomllib.loads(
    (Path(__file__).parent / "datasets.toml").read_text(encoding="utf-8")
)


def _file(told: Mapping[str, Any]) -> SourceFile:
    return SourceFile(tuple(told["names"]), tuple(told.get("sha256", ())), told.get("url"))


def _files(name: str, told: Mapping[str, Any]) -> PublicFiles:
    forms = {form: tuple(map(_file, files)) for form, files in told["forms"].items()}
    return PublicFiles(name, **{**told, "folders": tuple(told["folders"]), "forms": forms})


SOURCES: Mapping[str, PublicFiles] = {name: _files(name, told) for name, told in TABLES["files"].items()}


@dataclass(frozen=True, slots=True, kw_only=True)
class DatasetRow:
    """What a name of `--dataset` stands for.

    `chosen` are options that the name stands for, `features` what is loaded instead of the images, and `recipes`
    settings that work, by model.
    """

    name: str
    title: str
    loader: Callable[..., DataBundle]
    model: str
    source: PublicFiles | None = None
    chosen: Mapping[str, Any] = field(default_factory=dict)
    features: Callable[..., DataBundle] | None = None
    recipes: Mapping[str, Mapping[str, Value]] = field(default_factory=dict)

    def load(self, root: Path | str | None = None, **options: Any) -> DataBundle:
        """The data set, with options of its loader and of its features given by name."""
        of_features = () if self.features is None else options_of(self.features)
        known = {*options_of(self.loader), *of_features}
        if unknown := sorted(set(options) - known):
            raise SparseDPError(
                f"data_options: {self.name} knows no {unknown}; expected some of {sorted(known)}"
            )
        given = {**self.chosen, **options}
        featured = {name: given.pop(name) for name in of_features if name in given}
        bundle = self.loader(root, **given)
        return bundle if self.features is None else self.features(bundle, **featured)


def options_of(loader: Callable[..., DataBundle]) -> tuple[str, ...]:
    """The options of a loader, by its signature."""
    return tuple(name for name in inspect.signature(loader).parameters if name not in _NOT_OPTIONS)
