"""CIFAR-10 in its three forms, and pickles that want more than arrays."""

import io
import os
import pickle
import tarfile
import zipfile

import numpy as np
import pytest
import torch
from PIL import Image

from sparsedp.errors import DataError
from sparsedp_experiments.data import cifar10
from sparsedp_experiments.data.vision import CLASSES, read_binary_batch, read_python_batch

BATCHES = ["data_batch_1", "data_batch_2", "data_batch_3", "data_batch_4", "data_batch_5", "test_batch"]


def batch_arrays(seed, rows=4):
    rng = np.random.default_rng(seed)
    return rng.integers(0, 256, (rows, 3072), dtype=np.uint8), rng.integers(0, 10, rows).tolist()


def python_batch(seed):
    data, labels = batch_arrays(seed)
    return pickle.dumps(
        {b"data": data, b"labels": labels, b"batch_label": b"x", b"filenames": [b"a.png"]}, protocol=3
    )


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
    "python folder": lambda root: as_folder(root, "cifar-10-batches-py", "", python_batch),
    "python tar": lambda root: as_tar(
        root, "cifar-10-python.tar.gz", "cifar-10-batches-py", "", python_batch
    ),
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
            for number, name in enumerate(CLASSES):
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


class Malicious:
    def __reduce__(self):
        return (os.system, ("exit 1",))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (pickle.dumps(Malicious()), "asks for (posix|nt).system"),
        (pickle.dumps({b"data": eval, b"labels": []}), "asks for builtins.eval"),
        (pickle.dumps(io.BytesIO), "asks for _io.BytesIO"),
        (b"", "not a CIFAR-10 python batch"),
        (b"\x80\x02}q", "not a CIFAR-10 python batch"),
        (pickle.dumps([1, 2]), "got a pickled list"),
        (pickle.dumps({b"data": np.zeros((1, 3072), np.uint8)}, protocol=3), "expected data and labels"),
        (pickle.dumps({b"data": np.zeros((1, 3072)), b"labels": [0]}, protocol=3), "expected bytes of shape"),
        (
            pickle.dumps({b"data": np.zeros((1, 3072), np.uint8), b"labels": [0, 1]}, protocol=3),
            "one integer per",
        ),
        (
            pickle.dumps({b"data": np.zeros((1, 3072), np.uint8), b"labels": [10]}, protocol=3),
            "expected 0 to 9",
        ),
    ],
)
def test_a_pickle_that_is_not_a_batch_is_refused_and_runs_nothing(content, message):
    with pytest.raises(DataError, match=message):
        read_python_batch(content, "data_batch_1")


def test_a_python_2_pickle_is_read():
    """The official files name numpy's old module and store strings as Python 2 did."""
    data = bytes(range(256)) * 12
    array = b"cnumpy.core.multiarray\n_reconstruct\ncnumpy\nndarray\nK\x00\x85U\x01b\x87R"
    dtype = b"cnumpy\ndtype\nU\x02u1K\x00K\x01\x87R(K\x03U\x01|NNNJ\xff\xff\xff\xffJ\xff\xff\xff\xffK\x00tb"
    shape_and_bytes = (
        b"(K\x01K\x01M\x00\x0c\x86" + dtype + b"\x89T" + len(data).to_bytes(4, "little") + data + b"tb"
    )
    content = b"\x80\x02}(U\x04data" + array + shape_and_bytes + b"U\x06labels]K\x07au."
    images, labels = read_python_batch(content, "data_batch_1")
    assert images.tobytes() == data
    assert labels.tolist() == [7]


def test_a_binary_batch_of_a_wrong_length_or_label_is_refused():
    with pytest.raises(DataError, match="expected a multiple of 3073"):
        read_binary_batch(binary_batch(0)[:-1], "data_batch_1.bin")
    with pytest.raises(DataError, match="expected 0 to 9"):
        read_binary_batch(b"\x0a" + bytes(3072), "data_batch_1.bin")


def test_missing_batches_and_damaged_archives_are_named(tmp_path):
    FORMS["python folder"](tmp_path)
    (tmp_path / "cifar-10-batches-py" / "data_batch_3").unlink()
    with pytest.raises(DataError, match="data_batch_3 is missing"):
        cifar10(tmp_path)
    other = tmp_path / "other"
    other.mkdir()
    FORMS["python tar"](other)
    archive = other / "cifar-10-python.tar.gz"
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
        assert [sum(name.startswith(f"{side}/{c}/") for name in names) for c in CLASSES] == [each] * 10
