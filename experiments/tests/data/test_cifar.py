"""CIFAR-10 in its two forms."""

import io
import tarfile
import zipfile

import numpy as np
import pytest
import torch
from PIL import Image

from sparsedp.errors import DataError
from sparsedp_experiments.data import cifar10
from sparsedp_experiments.data.vision import CIFAR_CLASSES

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


def test_exact_pixels_are_preferred_to_jpeg(tmp_path):
    write_jpeg_zip(tmp_path / "cifar10-jpeg.zip")
    FORMS["binary tar"](tmp_path)
    assert cifar10(tmp_path).variant == "official binary"


def test_decoded_once_then_read_from_the_cache(tmp_path, monkeypatch):
    write_jpeg_zip(tmp_path / "cifar10-jpeg.zip")
    first = cifar10(tmp_path).train.inputs
    monkeypatch.setattr(
        "sparsedp_experiments.data.vision.decode_all", lambda *_: pytest.fail("decoded again")
    )
    assert torch.equal(cifar10(tmp_path).train.inputs, first)


def test_missing_batches_and_damaged_archives_are_named(tmp_path):
    FORMS["binary folder"](tmp_path)
    (tmp_path / "cifar-10-batches-bin" / "data_batch_3.bin").unlink()
    with pytest.raises(DataError, match=r"data_batch_3\.bin is missing"):
        cifar10(tmp_path)
    other = tmp_path / "other"
    other.mkdir()
    FORMS["binary tar"](other)
    archive = other / "cifar-10-binary.tar.gz"
    archive.write_bytes(archive.read_bytes()[:-500])
    with pytest.raises(DataError, match="truncated or damaged") as caught:
        cifar10(other)
    assert str(archive) in str(caught.value)


@pytest.mark.parametrize(
    ("member", "message"),
    [
        ("../escape.jpg", "points outside the archive"),
        ("/etc/x.jpg", "points outside the archive"),
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


def test_a_zip_member_that_fails_its_own_checksum_is_named(tmp_path):
    path = tmp_path / "cifar10-jpeg.zip"
    write_jpeg_zip(path, per_class=1)
    content = bytearray(path.read_bytes())
    start = content.index(b"train/cat/0000.jpg") + len("train/cat/0000.jpg")
    content[start + 100] ^= 0xFF
    path.write_bytes(bytes(content))
    with pytest.raises(DataError, match=r"member 'train/cat/0000\.jpg' cannot be read"):
        cifar10(tmp_path)


@pytest.mark.data
def test_the_real_archive_opens_and_is_balanced(real_data):
    path = real_data / "cifar10" / "cifar10-jpeg.zip"
    if not path.exists():
        pytest.skip("the JPEG zip of CIFAR-10 is not in SPARSEDP_DATA")
    with zipfile.ZipFile(path) as archive:
        names = archive.namelist()
    for side, each in (("train", 5000), ("test", 1000)):
        assert [sum(name.startswith(f"{side}/{c}/") for name in names) for c in CIFAR_CLASSES] == [each] * 10
