"""Pictures in their official formats: IDX, CIFAR-10 and EyePACS."""

import gzip
import io
import struct
import tarfile
import zipfile

import numpy as np
import pytest
import torch
from PIL import Image

from sparsedp.errors import DataError
from sparsedp_experiments.data import cifar10, eyepacs, fashion_mnist, load, mnist
from sparsedp_experiments.data.vision import CIFAR_CLASSES, read_grades

# IDX files: the official format, gzipped or not, and every way one can be broken.


NAMES = {
    "train_images": "train-images-idx3-ubyte",
    "train_labels": "train-labels-idx1-ubyte",
    "test_images": "t10k-images-idx3-ubyte",
    "test_labels": "t10k-labels-idx1-ubyte",
}


def idx_bytes(array):
    return struct.pack(f">HBB{array.ndim}I", 0, 8, array.ndim, *array.shape) + array.tobytes()


def write_idx(folder, compress=True):
    folder.mkdir(parents=True, exist_ok=True)
    rng = np.random.default_rng(0)
    arrays = {}
    for side, rows in (("train", 7), ("test", 3)):
        arrays[f"{side}_images"] = rng.integers(0, 256, (rows, 28, 28), dtype=np.uint8)
        arrays[f"{side}_labels"] = np.arange(rows, dtype=np.uint8)
    for key, array in arrays.items():
        content = idx_bytes(array)
        if compress:
            (folder / f"{NAMES[key]}.gz").write_bytes(gzip.compress(content))
        else:
            (folder / NAMES[key]).write_bytes(content)
    return arrays


@pytest.mark.parametrize("compress", [True, False])
@pytest.mark.parametrize("folder", ["mnist", "MNIST/raw", "."])
def test_the_four_official_files_are_read_as_they_are(tmp_path, compress, folder):
    arrays = write_idx(tmp_path / folder, compress)
    bundle = mnist(tmp_path)
    for split, side in ((bundle.train, "train"), (bundle.test, "test")):
        expected = torch.from_numpy(arrays[f"{side}_images"]).unsqueeze(1) / 255
        torch.testing.assert_close(split.inputs, expected)
        assert split.targets.tolist() == arrays[f"{side}_labels"].tolist()
    assert bundle.input_shape == (1, 28, 28)
    assert len(bundle.classes) == 10


def test_given_root_then_variable_then_cache(tmp_path, monkeypatch, private_cache):
    write_idx(private_cache / "datasets" / "fashion-mnist")
    assert len(fashion_mnist().train) == 7
    named = tmp_path / "named"
    (named / "fashion-mnist").mkdir(parents=True)
    monkeypatch.setenv("SPARSEDP_DATA", str(named))
    assert len(fashion_mnist().train) == 7
    write_idx(named / "fashion-mnist")
    (named / "fashion-mnist" / f"{NAMES['train_labels']}.gz").write_bytes(b"broken")
    with pytest.raises(DataError, match="named"):
        fashion_mnist()
    with pytest.raises(DataError, match="found none of"):
        fashion_mnist(tmp_path / "elsewhere")


@pytest.mark.parametrize(
    "damage",
    [
        lambda content: gzip.compress(content)[:-20],
        lambda content: gzip.compress(b"\x00\x00\x0d\x03" + content[4:]),
        lambda content: gzip.compress(content[:-5]),
        lambda content: gzip.compress(content + b"more"),
        lambda _: b"\x00\x00",
    ],
)
def test_a_damaged_file_is_named(tmp_path, damage):
    write_idx(tmp_path)
    victim = tmp_path / f"{NAMES['train_images']}.gz"
    victim.write_bytes(damage(gzip.decompress(victim.read_bytes())))
    with pytest.raises(DataError, match="cannot be read as IDX") as caught:
        mnist(tmp_path)
    assert str(victim) in str(caught.value)


@pytest.mark.data
@pytest.mark.parametrize(("name", "smallest_class"), [("mnist", 5421), ("fashion-mnist", 6000)])
def test_the_real_files_are_complete(real_data, name, smallest_class):
    bundle = load(name, real_data)
    assert (len(bundle.train), len(bundle.test)) == (60_000, 10_000)
    assert torch.bincount(bundle.train.targets).min() == smallest_class
    inputs, _ = bundle.train.rows_at(torch.arange(1000))
    assert inputs.min() == 0
    assert inputs.max() == 1


# CIFAR-10 in its two forms.


BATCHES = ["data_batch_1", "data_batch_2", "data_batch_3", "data_batch_4", "data_batch_5", "test_batch"]


def batch_arrays(seed, rows=4):
    rng = np.random.default_rng(seed)
    return rng.integers(0, 256, (rows, 3072), dtype=np.uint8), rng.integers(0, 10, rows).tolist()


def binary_batch(seed):
    data, labels = batch_arrays(seed)
    return b"".join(bytes([label]) + row.tobytes() for row, label in zip(data, labels, strict=True))


def as_folder(root, folder, suffix, make):
    (root / folder).mkdir()
    for number, name in enumerate(BATCHES):
        (root / folder / f"{name}{suffix}").write_bytes(make(number))


def as_tar(root, archive, folder, suffix, make):
    with tarfile.open(root / archive, "w:gz") as tar:
        for number, name in enumerate(BATCHES):
            content = make(number)
            info = tarfile.TarInfo(f"{folder}/{name}{suffix}")
            info.size = len(content)
            tar.addfile(info, io.BytesIO(content))


FORMS = {
    "binary folder": lambda root: as_folder(root, "cifar-10-batches-bin", ".bin", binary_batch),
    "binary tar": lambda root: as_tar(
        root, "cifar-10-binary.tar.gz", "cifar-10-batches-bin", ".bin", binary_batch
    ),
}


@pytest.mark.parametrize("form", FORMS)
def test_official_batches_are_read_exactly(tmp_path, form):
    FORMS[form](tmp_path)
    bundle = cifar10(tmp_path)
    expected = np.concatenate([batch_arrays(seed)[0] for seed in range(5)]).reshape(-1, 3, 32, 32)
    torch.testing.assert_close(bundle.train.inputs, torch.from_numpy(expected) / 255)
    assert bundle.train.targets.tolist() == [label for seed in range(5) for label in batch_arrays(seed)[1]]
    assert bundle.test.targets.tolist() == batch_arrays(5)[1]
    assert bundle.variant.startswith("official")
    assert bundle.notes == ()


def write_jpeg_zip(path, per_class=2):
    colours = {}
    with zipfile.ZipFile(path, "w") as archive:
        for side in ("train", "test"):
            for number, name in enumerate(CIFAR_CLASSES):
                for picture in range(per_class):
                    colour = (20 * number, 100, 50 * picture)
                    stream = io.BytesIO()
                    Image.new("RGB", (32, 32), colour).save(stream, "JPEG", quality=95)
                    archive.writestr(f"{side}/{name}/{picture:04d}.jpg", stream.getvalue())
                    colours[side, number, picture] = colour
    return colours


def test_jpeg_pictures_keep_their_class_and_colour_and_are_said_to_be_lossy(tmp_path):
    colours = write_jpeg_zip(tmp_path / "cifar10-jpeg.zip")
    bundle = cifar10(tmp_path)
    assert bundle.variant == "jpeg"
    assert "JPEG" in bundle.notes[0]
    assert torch.bincount(bundle.train.targets).tolist() == [2] * 10
    means = bundle.train.inputs.mean(dim=(2, 3)) * 255
    expected = torch.tensor(
        [colours["train", label, i % 2] for i, label in enumerate(bundle.train.targets.tolist())]
    )
    assert (means - expected).abs().max() < 4


@pytest.mark.parametrize(
    ("member", "message"),
    [
        ("train/submarine/0000.jpg", "not train/<class>/<picture> of a CIFAR-10 class"),
        ("train/cat/broken.jpg", "cannot be decoded as a picture"),
    ],
)
def test_wrong_members_of_the_zip_are_named(tmp_path, member, message):
    write_jpeg_zip(tmp_path / "cifar10-jpeg.zip", per_class=1)
    with zipfile.ZipFile(tmp_path / "cifar10-jpeg.zip", "a") as archive:
        archive.writestr(member, b"not a picture")
    with pytest.raises(DataError, match=message) as caught:
        cifar10(tmp_path)
    assert member in str(caught.value)


# EyePACS.


def picture(colour=(10, 20, 30), size=(8, 8), kind="PNG"):
    stream = io.BytesIO()
    Image.new("RGB", size, colour).save(stream, kind)
    return stream.getvalue()


def write(root, name, content):
    path = root / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)


def write_eyepacs(root, grades, pictures=None, archive=True):
    root.mkdir(parents=True, exist_ok=True)
    lines = "".join(f"{image},{grade}\n" for image, grade in grades.items())
    (root / "trainLabels.csv").write_text("image,level\n" + lines)
    natural = "".join(f"{image},{grade}\n" for image, grade in list(grades.items())[::2])
    (root / "naturalLabels.csv").write_text("image,level\n" + natural)
    names = grades if pictures is None else pictures
    if archive:
        with zipfile.ZipFile(root / "train.zip", "w") as file:
            for image in names:
                file.writestr(
                    f"train/{image}.jpeg", picture((int(image.split("_")[0]) % 256, 0, 0), (64, 64), "JPEG")
                )
    else:
        for image in names:
            write(
                root, f"train/{image}.jpeg", picture((int(image.split("_")[0]) % 256, 0, 0), (64, 64), "JPEG")
            )


def some_grades(patients=40):
    return {
        f"{10 * p}_{eye}": (p + (eye == "left")) % 5 for p in range(patients) for eye in ("left", "right")
    }


@pytest.mark.parametrize("archive", [True, False])
def test_eyes_keep_their_grade_and_go_with_their_patient(tmp_path, archive):
    grades = some_grades()
    write_eyepacs(tmp_path / "eyepacs", grades, archive=archive)
    bundle = eyepacs(tmp_path)
    assert bundle.unit == "patient"
    assert len(bundle.train) + len(bundle.test) == len(grades)
    assert len(bundle.test) == 2 * bundle.test.unit_count > 0
    for split in (bundle.train, bundle.test):
        red = (split.inputs[:, 0].mean(dim=(1, 2)) * 255).round()
        assert (red - split.units % 256).abs().max() <= 2
        for patient in split.units.unique().tolist():
            expected = sorted(int(grades[f"{patient}_{eye}"] > 0) for eye in ("left", "right"))
            assert sorted(split.targets[split.units == patient].tolist()) == expected


def test_natural_prevalence_uses_its_own_list(tmp_path):
    write_eyepacs(tmp_path, some_grades())
    natural = eyepacs(tmp_path, prevalence="natural")
    assert len(natural.train) + len(natural.test) == 40
    whole = eyepacs(tmp_path)
    assert set(natural.test.units.tolist()) <= set(whole.test.units.tolist())
    with pytest.raises(DataError, match="expected one of all, natural"):
        eyepacs(tmp_path, prevalence="some")


@pytest.mark.parametrize(
    "content",
    [
        "image,level\n1_left,5\n",
        "image,level\n1_left\n",
        "image,level\n1_left,0\n1_left,1\n",
        "image,level\none_left,0\n",
        "picture,grade\n1_left,0\n",
        "image,level\n",
    ],
)
def test_unknown_grades_and_images_are_refused(tmp_path, content):
    path = tmp_path / "trainLabels.csv"
    path.write_text(content)
    with pytest.raises(DataError, match=r"trainLabels\.csv"):
        read_grades(path)
