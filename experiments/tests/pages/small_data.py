"""Tiny data sets in the official formats, so that every experiment can run anywhere, scattering included."""

import csv
import gzip
import io
import struct
import tarfile
import zipfile
from pathlib import Path

import numpy as np
from PIL import Image
from tables_of_people import COMPAS_COLUMNS, adult_lines, census_lines, compas_rows

from sparsedp_experiments.data.encoding import Number
from sparsedp_experiments.data.tables import schema
from sparsedp_experiments.data.vision import CIFAR_CLASSES

TRAIN, TEST = 112, 40
PATIENTS = 48
"""Whose eyes are photographed: features of every picture are computed, however few are trained on."""


def write_all(root: Path) -> None:
    """Every data set the experiments name, about a hundred records each."""
    write_idx(root / "mnist")
    write_idx(root / "fashion-mnist")
    write_cifar(root / "cifar10")
    write_eyepacs(root / "eyepacs")
    write_hospital(root / "diabetes130")
    write_imdb(root / "imdb")
    write_movielens(root / "movielens" / "ml-100k")
    write_people(root)


def write_idx(folder: Path) -> None:
    folder.mkdir(parents=True)
    numbers = np.random.default_rng(0)
    for side, rows in (("train", TRAIN), ("t10k", TEST)):
        labels = (np.arange(rows) % 10).astype(np.uint8)
        images = numbers.integers(0, 256, (rows, 28, 28), dtype=np.uint8)
        for kind, array in ((f"{side}-images-idx3-ubyte", images), (f"{side}-labels-idx1-ubyte", labels)):
            head = struct.pack(f">HBB{array.ndim}I", 0, 8, array.ndim, *array.shape)
            (folder / f"{kind}.gz").write_bytes(gzip.compress(head + array.tobytes(), 1))


def write_cifar(folder: Path) -> None:
    folder.mkdir(parents=True)
    with zipfile.ZipFile(folder / "cifar10-jpeg.zip", "w") as archive:
        for side, per_class in (("train", TRAIN // 10 + 1), ("test", TEST // 10)):
            for number, name in enumerate(CIFAR_CLASSES):
                for picture in range(per_class):
                    archive.writestr(f"{side}/{name}/{picture:04d}.jpg", _jpeg(32, 20 * number, picture))


def write_eyepacs(folder: Path) -> None:
    folder.mkdir(parents=True)
    eyes = [f"{10 * patient}_{eye}" for patient in range(PATIENTS) for eye in ("left", "right")]
    lines = ["image,level", *(f"{eye},{number % 5}" for number, eye in enumerate(eyes))]
    for name in ("trainLabels.csv", "naturalLabels.csv"):
        (folder / name).write_text("\n".join(lines) + "\n")
    with zipfile.ZipFile(folder / "train.zip", "w") as archive:
        for number, eye in enumerate(eyes):
            archive.writestr(f"train/{eye}.jpeg", _jpeg(64, number, 40))


def write_hospital(folder: Path) -> None:
    folder.mkdir(parents=True)
    numbers = {column for block in schema() if isinstance(block, Number) for column in block.columns}
    columns = sorted({column for block in schema() for column in block.columns})
    with (folder / "diabetic_data.csv").open("w", newline="") as stream:
        writer = csv.writer(stream)
        writer.writerow([*columns, "patient_nbr", "readmitted"])
        for row in range(2 * TRAIN):
            shown = [str(1 + row % 5) if column in numbers else "?" for column in columns]
            writer.writerow([*shown, row // 2, ("<30", "NO", ">30")[row % 3]])


def write_imdb(folder: Path) -> None:
    folder.mkdir(parents=True)
    with tarfile.open(folder / "aclImdb_v1.tar.gz", "w:gz", compresslevel=1) as archive:
        for side, rows in (("train", TRAIN), ("test", TEST)):
            for number in range(rows):
                good = number % 2
                text = f"{'good' if good else 'bad'} film number {number}".encode()
                kind = "pos" if good else "neg"
                info = tarfile.TarInfo(f"aclImdb/{side}/{kind}/{number}_{9 if good else 2}.txt")
                info.size = len(text)
                archive.addfile(info, io.BytesIO(text))


def write_movielens(folder: Path) -> None:
    folder.mkdir(parents=True)
    users = range(1, TRAIN + 1)
    (folder / "u.user").write_text(
        "\n".join(f"{u}|{10 + u % 60}|{'MF'[u % 2]}|student|{u % 10}1234" for u in users)
    )
    ratings = [f"{u}\t{1 + (u * step) % 1682}\t{1 + (u + step) % 5}\t0" for u in users for step in (1, 7, 40)]
    (folder / "u.data").write_text("\n".join(ratings))


def _jpeg(size: int, red: int, green: int) -> bytes:
    stream = io.BytesIO()
    Image.new("RGB", (size, size), (red % 256, green % 256, 100)).save(stream, "JPEG")
    return stream.getvalue()


def write_people(root: Path) -> None:
    """The census tables and COMPAS."""
    for name, lines in (
        ("adult/adult.data", [*adult_lines(TRAIN // 2, "<=50K"), *adult_lines(TRAIN // 2, ">50K")]),
        ("adult/adult.test", [*adult_lines(TEST // 2, "<=50K."), *adult_lines(TEST // 2, ">50K.")]),
        ("census-income/census-income.data", census_lines(TRAIN)),
        ("census-income/census-income.test", census_lines(TEST)),
    ):
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text("\n".join(lines) + "\n")
    (root / "compas").mkdir()
    with (root / "compas" / "compas-scores-two-years.csv").open("w", newline="") as stream:
        writer = csv.DictWriter(stream, COMPAS_COLUMNS)
        writer.writeheader()
        writer.writerows(compas_rows(TRAIN + TEST))
