"""What the name of a data set stands for: files and their checksums, loader, model, and settings that work."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from sparsedp.errors import SparseDPError
from sparsedp_experiments.data.bundle import PIXELS, UNIT, DataBundle, PixelScale
from sparsedp_experiments.data.features import lite0_bundle, scattering_bundle
from sparsedp_experiments.data.files import Search

Value = float | int | str

_NOT_OPTIONS = {"root", "bundle"}


@dataclass(frozen=True, slots=True)
class SourceFile:
    """One file of a data set: the names it may have, its known checksums, and where it can be downloaded.

    Checksums are of the public originals, as published by several independent projects; a file that can be told apart
    after decompression (IDX, the hospital table) also lists the checksum of its content.
    """

    candidates: tuple[str, ...]
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

    def require(self, root: Path | str | None) -> list[Path]:
        """The files of the first form, or an error that says where they were looked for and what to do."""
        files = next(iter(self.forms.values()))
        return [self.search.require(file.candidates, root) for file in files]

    @property
    def search(self) -> Search:
        """Where its files are looked for."""
        downloadable = any(file.url for files in self.forms.values() for file in files)
        command = (
            f"`python -m sparsedp_experiments data get {self.name}` downloads it. " if downloadable else ""
        )
        return Search(self.name, self.folders, f"{command}It comes from {self.origin}.")


@dataclass(frozen=True, slots=True, kw_only=True)
class DatasetRow:
    """What a name stands for.

    Attributes:
        name: as in `--dataset`.
        title: one line for the listing.
        source: the public files behind it; None where there is nothing to fetch.
        loader: called with a root and the options.
        chosen: options that the name stands for.
        features: what is loaded instead of its images, with options of its own; None for the images.
        model: the model trained when none is named.
        recipes: settings that work, by model. Found on validation splits of the training data, or published (Tramèr
            and Boneh, ICLR 2021; RS; AdaDPIGU). Finding them spent privacy that no epsilon here counts.
    """

    name: str
    title: str
    source: PublicFiles | None
    loader: Callable[..., DataBundle]
    model: str
    chosen: Mapping[str, Any] = field(default_factory=dict)
    features: Callable[..., DataBundle] | None = None
    recipes: Mapping[str, Mapping[str, Value]] = field(default_factory=dict)

    @property
    def options(self) -> tuple[str, ...]:
        """The names of the options it takes."""
        return (*options_of(self.loader), *self._feature_options)

    @property
    def _feature_options(self) -> tuple[str, ...]:
        return () if self.features is None else options_of(self.features)

    def load(self, root: Path | str | None = None, **options: Any) -> DataBundle:
        """The data set, with options of its loader and of its features given by name."""
        check_options(self.name, options, self.options)
        given = {**self.chosen, **options}
        featured = {name: given.pop(name) for name in self._feature_options if name in given}
        bundle = self.loader(root, **with_pixels(given))
        return bundle if self.features is None else self.features(bundle, **featured)


def scattering_of(row: DatasetRow, recipe: Mapping[str, Value] | None = None) -> DatasetRow:
    """The row of an image data set's scattering features, with a linear model."""
    made = replace(row, features=scattering_bundle, model="scatter-linear")
    return _features_of(made, "scattering", "scattering features", recipe)


def lite0_of(row: DatasetRow, recipe: Mapping[str, Value] | None = None) -> DatasetRow:
    """The row of an image data set's features by a pretrained network, with a linear model."""
    made = replace(row, features=lite0_bundle, model="logistic")
    return _features_of(made, "lite0", "features of a pretrained EfficientNet-Lite0", recipe)


def _features_of(row: DatasetRow, suffix: str, what: str, recipe: Mapping[str, Value] | None) -> DatasetRow:
    return replace(
        row,
        name=f"{row.name}-{suffix}",
        title=f"{row.title.partition(',')[0]}, {what}",
        recipes={} if recipe is None else {row.model: recipe},
    )


def options_of(loader: Callable[..., DataBundle]) -> tuple[str, ...]:
    """The options of a loader, by its signature."""
    return tuple(name for name in inspect.signature(loader).parameters if name not in _NOT_OPTIONS)


def check_options(what: str, given: Mapping[str, Any], known: tuple[str, ...]) -> None:
    """Refuse options that are not known.

    Raises:
        SparseDPError: with those that are.
    """
    unknown = sorted(set(given) - set(known))
    if unknown and not known:
        raise SparseDPError(f"data_options: {what} takes none, got {unknown}")
    if unknown:
        raise SparseDPError(f"data_options: {what} knows no {unknown}; expected some of {sorted(known)}")


def with_pixels(options: Mapping[str, Any]) -> dict[str, Any]:
    """Options with the pixel scale put in for its name."""
    pixels = options.get("pixels", UNIT)
    if isinstance(pixels, PixelScale):
        return dict(options)
    if pixels not in PIXELS:
        raise SparseDPError(f"pixels: got {pixels!r}, expected one of {', '.join(PIXELS)}")
    return {**options, "pixels": PIXELS[pixels]}
