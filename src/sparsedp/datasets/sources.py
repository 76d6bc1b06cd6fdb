"""The public data sets: their files, official addresses and checksums. A table, and nothing else.

Checksums are of the public originals, as published by several independent projects; files that can be told apart
after decompression (IDX, the hospital table) also list the checksum of the content.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from sparsedp.core.errors import DataError
from sparsedp.datasets.locate import Search


@dataclass(frozen=True, slots=True)
class SourceFile:
    """One file of a data set: the names it may have, its known checksums, and where it can be downloaded."""

    candidates: tuple[str, ...]
    sha256: tuple[str, ...] = ()
    url: str | None = None


@dataclass(frozen=True, slots=True)
class Source:
    """A public data set: forms are alternatives, the first complete one is loaded."""

    name: str
    title: str
    records: str
    task: str
    origin: str
    folders: tuple[str, ...]
    forms: Mapping[str, tuple[SourceFile, ...]]

    @property
    def search(self) -> Search:
        """Where its files are looked for."""
        downloadable = any(file.url for files in self.forms.values() for file in files)
        command = (
            f"`sparsedp data get {self.name}` downloads it where there is a network. " if downloadable else ""
        )
        return Search(self.name, self.folders, f"{command}It comes from {self.origin}.")


def _idx_files(base: str, sums: dict[str, tuple[str, str]]) -> tuple[SourceFile, ...]:
    """The four IDX files: for each the checksum of the original archive and of its content."""
    return tuple(
        SourceFile((f"{name}.gz", name, name.replace("-idx", ".idx")), both, f"{base}{name}.gz")
        for name, both in sums.items()
    )


_MNIST = _idx_files(
    "https://ossci-datasets.s3.amazonaws.com/mnist/",
    {
        "train-images-idx3-ubyte": (
            "440fcabf73cc546fa21475e81ea370265605f56be210a4024d2ca8f203523609",
            "ba891046e6505d7aadcbbe25680a0738ad16aec93bde7f9b65e87a2fc25776db",
        ),
        "train-labels-idx1-ubyte": (
            "3552534a0a558bbed6aed32b30c495cca23d567ec52cac8be1a0730e8010255c",
            "65a50cbbf4e906d70832878ad85ccda5333a97f0f4c3dd2ef09a8a9eef7101c5",
        ),
        "t10k-images-idx3-ubyte": (
            "8d422c7b0a1c1c79245a5bcf07fe86e33eeafee792b84584aec276f5a2dbc4e6",
            "0fa7898d509279e482958e8ce81c8e77db3f2f8254e26661ceb7762c4d494ce7",
        ),
        "t10k-labels-idx1-ubyte": (
            "f7ae60f92e00ec6debd23a6088c31dbd2371eca3ffa0defaefb259924204aec6",
            "ff7bcfd416de33731a308c3f266cc351222c34898ecbeaf847f06e48f7ec33f2",
        ),
    },
)

_FASHION = _idx_files(
    "http://fashion-mnist.s3-website.eu-central-1.amazonaws.com/",
    {
        "train-images-idx3-ubyte": (
            "3aede38d61863908ad78613f6a32ed271626dd12800ba2636569512369268a84",
            "c59f468a2f672dc815687fe0f83887768d799fd8a3f3276145d20f83aa44d888",
        ),
        "train-labels-idx1-ubyte": (
            "a04f17134ac03560a47e3764e11b92fc97de4d1bfaf8ba1a3aa29af54cc90845",
            "bad3541b69d912435c50bb6ba87bec294ff4f6a2e1246121d8633921760443d9",
        ),
        "t10k-images-idx3-ubyte": (
            "346e55b948d973a97e58d2351dde16a484bd415d4595297633bb08f03db6a073",
            "5b4141f0afbad91edebe8549f8fcffe087ea10ca49f1dbef5c9a5cd8815ce37b",
        ),
        "t10k-labels-idx1-ubyte": (
            "67da17c76eaffca5446c3361aaab5c3cd6d1c2608764d35dfb1850b086bf8dd5",
            "0402a96d92fd2663957122ceb108a494c5af83dab82d92729df917d7dec38c34",
        ),
    },
)

_CIFAR10 = {
    "official": (
        SourceFile(
            ("cifar-10-batches-py", "cifar-10-python.tar.gz"),
            ("6d958be074577803d12ecdefd02955f39262c83c16fe9348329d7fe0b5c001ce",),
            "https://www.cs.toronto.edu/~kriz/cifar-10-python.tar.gz",
        ),
    ),
    "official binary": (
        SourceFile(
            ("cifar-10-batches-bin", "cifar-10-binary.tar.gz"),
            ("c4a38c50a1bc5f3a1c5537f2155ab9d68f9f25eb1ed8d9ddda3db29a59bca1dd",),
            "https://www.cs.toronto.edu/~kriz/cifar-10-binary.tar.gz",
        ),
    ),
    "jpeg": (SourceFile(("cifar10-jpeg.zip",)),),
}

_SVHN = (
    SourceFile(
        ("train_32x32.mat",),
        ("435e94d69a87fde4fd4d7f3dd208dfc32cb6ae8af2240d066de1df7508d083b8",),
        "http://ufldl.stanford.edu/housenumbers/train_32x32.mat",
    ),
    SourceFile(
        ("test_32x32.mat",),
        ("cdce80dfb2a2c4c6160906d0bd7c68ec5a99d7ca4831afa54f09182025b6a75b",),
        "http://ufldl.stanford.edu/housenumbers/test_32x32.mat",
    ),
)

_DIABETES = SourceFile(
    ("diabetic_data.csv", "diabetic_data.csv.zip", "diabetes+130-us+hospitals+for+years+1999-2008.zip"),
    (
        "f82ac129da2ddd2299391ff6fbae3a6a58b3edcf59ac9d7bd480c00fe453112a",
        "0689e7ec031237dc63031b938805c48377748761a3b26acab621567afa24df97",
    ),
    "https://archive.ics.uci.edu/static/public/296/diabetes+130-us+hospitals+for+years+1999-2008.zip",
)

_IMDB = SourceFile(
    ("aclImdb_v1.tar.gz",),
    ("c40f74a18d3b61f90feba1e17730e0d38e8b97c05fde7008942e91923d1658fe",),
    "https://ai.stanford.edu/~amaas/data/sentiment/aclImdb_v1.tar.gz",
)


def _source(
    name: str,
    title: str,
    records: str,
    task: str,
    origin: str,
    folders: tuple[str, ...],
    forms: Mapping[str, tuple[SourceFile, ...]],
) -> tuple[str, Source]:
    return name, Source(name, title, records, task, origin, folders, MappingProxyType(forms))


SOURCES: Mapping[str, Source] = MappingProxyType(
    dict(
        [
            _source(
                "mnist",
                "MNIST handwritten digits",
                "60,000 + 10,000 images, 28x28",
                "10 classes",
                "the official mirrors of the four IDX files",
                ("mnist", "MNIST/raw"),
                {"official": _MNIST},
            ),
            _source(
                "fashion-mnist",
                "Fashion-MNIST articles of clothing",
                "60,000 + 10,000 images, 28x28",
                "10 classes",
                "the official mirror (Zalando Research) of the four IDX files",
                ("fashion-mnist", "FashionMNIST/raw"),
                {"official": _FASHION},
            ),
            _source(
                "cifar10",
                "CIFAR-10 small colour photographs",
                "50,000 + 10,000 images, 3x32x32",
                "10 classes",
                "the University of Toronto (Krizhevsky); a JPEG copy loses some of each picture",
                ("cifar10",),
                _CIFAR10,
            ),
            _source(
                "svhn",
                "Street View House Numbers, cropped digits",
                "73,257 + 26,032 images, 3x32x32",
                "10 classes",
                "Stanford (Netzer et al.)",
                ("svhn",),
                {"official": _SVHN},
            ),
            _source(
                "eyepacs",
                "EyePACS fundus photographs, diabetic retinopathy",
                "35,126 labelled images (Kaggle's training set, or any part of it)",
                "any retinopathy (level > 0), per patient",
                "Kaggle, competition diabetic-retinopathy-detection (trainLabels.csv and the train images)",
                ("eyepacs",),
                {"kaggle": (SourceFile(("trainLabels.csv",)), SourceFile(("train.zip", "train")))},
            ),
            _source(
                "diabetes130",
                "130 US hospitals 1999-2008, diabetic inpatients",
                "101,766 encounters of 71,518 patients",
                "readmitted within 30 days, per patient",
                "the UCI repository, data set 296 (Strack et al. 2014)",
                ("diabetes130",),
                {"official": (_DIABETES,)},
            ),
            _source(
                "imdb",
                "Large Movie Review data",
                "25,000 + 25,000 reviews",
                "positive or negative",
                "Stanford (Maas et al. 2011)",
                ("imdb",),
                {"official": (_IMDB,)},
            ),
        ]
    )
)


def source(name: str) -> Source:
    """A data set's row of the table."""
    if name not in SOURCES:
        raise DataError(f"no data set named {name!r}; there are {', '.join(SOURCES)}")
    return SOURCES[name]
