"""EyePACS: fundus photographs graded for diabetic retinopathy, in Kaggle's format, split by patient."""

from __future__ import annotations

import csv
import re
from collections.abc import Mapping
from pathlib import Path, PurePosixPath
from types import MappingProxyType

import torch

from sparsedp.errors import DataError
from sparsedp_experiments.data.bundle import UNIT, DataBundle, Dense, PixelScale, Split
from sparsedp_experiments.data.files import (
    TEST_FRACTION,
    FileTree,
    cached_arrays,
    decode_all,
    fingerprint,
    hash_names,
    open_tree,
    public_share,
)
from sparsedp_experiments.data.spec import SOURCES

CLASSES = ("no retinopathy", "any retinopathy")
LABEL_FILES: Mapping[str, str] = MappingProxyType({"all": "trainLabels.csv", "natural": "naturalLabels.csv"})
"""Which images to use: every labelled one, or a list with the prevalence of the original."""

_IMAGE = re.compile(r"(\d+)_(left|right)")


def eyepacs(
    root: Path | str | None = None, prevalence: str = "all", size: int = 64, pixels: PixelScale = UNIT
) -> DataBundle:
    """EyePACS, any retinopathy (grade above 0), as 3 x size x size pictures.

    A fifth of the patients are the test set, by a public hash of the patient's number; both eyes go together.
    Pictures of another size are cropped to the centred square and resized. Decoded once and cached.
    """
    if prevalence not in LABEL_FILES:
        raise DataError(f"eyepacs: got prevalence {prevalence!r}, expected one of {', '.join(LABEL_FILES)}")
    source = SOURCES["eyepacs"]
    labels_path = source.search.require((LABEL_FILES[prevalence],), root)
    pictures_path = source.search.require(source.forms["kaggle"][1].names, root)
    grades = read_grades(labels_path)
    with open_tree(pictures_path) as tree:
        by_image = _by_image(tree)
        missing = [image for image in grades if image not in by_image]
        if missing:
            raise DataError(
                f"{pictures_path}: no picture for {len(missing)} of the {len(grades)} images in {labels_path.name}, "
                f"the first {missing[0]}"
            )
        listed = sorted(by_image)
        names = [by_image[image] for image in listed]
        key = fingerprint([pictures_path], "eyepacs", size) + hash_names(tree, names)
        arrays = cached_arrays(
            key, ("images",), lambda: {"images": decode_all(tree, names, size, channels=3)}
        )
    row = {image: number for number, image in enumerate(listed)}
    order = torch.tensor([row[image] for image in grades])
    targets = torch.tensor([int(grade > 0) for grade in grades.values()])
    patients = torch.tensor([patient_of(image) for image in grades])
    side = torch.tensor([public_share(f"eyepacs:{patient}") < TEST_FRACTION for patient in patients.tolist()])
    values = torch.from_numpy(arrays["images"])

    def part(chosen: torch.Tensor) -> Split:
        index = chosen.nonzero().squeeze(1)
        return Split(Dense(values, pixels, order[index]), targets[index], patients[index])

    return DataBundle(
        name="eyepacs",
        variant=f"{prevalence}, {size}x{size}",
        train=part(~side),
        test=part(side),
        classes=CLASSES,
        unit="patient",
        notes=("the test set is a fifth of the patients, not Kaggle's",),
        fingerprint=f"{key}|{prevalence}|{fingerprint([labels_path])}|{pixels}",
    )


def patient_of(image: str) -> int:
    """The patient's number: both eyes share what is before _left or _right."""
    match = _IMAGE.fullmatch(image)
    if match is None:
        raise DataError(f"eyepacs: got image name {image!r}, expected <number>_left or <number>_right")
    return int(match[1])


def read_grades(path: Path) -> dict[str, int]:
    """Grade (0 to 4) of every image of a label file with the columns image and level."""
    grades: dict[str, int] = {}
    try:
        with path.open(newline="", encoding="utf-8-sig") as stream:
            rows = csv.DictReader(stream)
            if not {"image", "level"} <= set(rows.fieldnames or ()):
                raise DataError(f"{path}: got columns {rows.fieldnames}, expected image and level")
            for number, row in enumerate(rows, start=2):
                image, level = row["image"], row["level"]
                if level is None or level not in "01234" or len(level) != 1:
                    raise DataError(
                        f"{path}, line {number}: got level {level!r}, expected a grade from 0 to 4"
                    )
                if image in grades:
                    raise DataError(f"{path}, line {number}: image {image!r} is listed twice")
                patient_of(image)
                grades[image] = int(level)
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise DataError(f"{path}: cannot be read as a table ({error})") from error
    if not grades:
        raise DataError(f"{path}: no images are listed")
    return grades


def _by_image(tree: FileTree) -> dict[str, str]:
    """Image name (10_left) to file name, for every eye picture of the tree."""
    stems = ((PurePosixPath(name).stem, name) for name in tree.names)
    return {stem: name for stem, name in stems if _IMAGE.fullmatch(stem)}
