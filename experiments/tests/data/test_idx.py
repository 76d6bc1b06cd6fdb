"""IDX files: the official format, gzipped or not, and every way one can be broken."""

import gzip
import struct

import numpy as np
import pytest
import torch

from sparsedp.errors import DataError
from sparsedp_experiments.data import digits, fashion_mnist, load, mnist

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


def test_missing_data_says_where_it_looked_and_how_to_get_it(tmp_path):
    with pytest.raises(DataError) as caught:
        load("mnist", tmp_path)
    message = str(caught.value)
    assert str(tmp_path) in message
    assert "sparsedp data get mnist" in message
    assert "SPARSEDP_DATA" in message


def break_gzip(path):
    path.write_bytes(path.read_bytes()[:-20])


def break_middle(path):
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 0xFF
    path.write_bytes(bytes(content))


def wrong_magic(path):
    content = gzip.decompress(path.read_bytes())
    path.write_bytes(gzip.compress(b"\x00\x00\x0d\x03" + content[4:]))


def short_data(path):
    path.write_bytes(gzip.compress(gzip.decompress(path.read_bytes())[:-5]))


def long_data(path):
    path.write_bytes(gzip.compress(gzip.decompress(path.read_bytes()) + b"more"))


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (break_gzip, "truncated or damaged"),
        (break_middle, "truncated or damaged"),
        (wrong_magic, "magic number 00000d03, expected 00000803"),
        (short_data, "bytes of data, expected 5488"),
        (long_data, "bytes of data, expected 5488"),
        (lambda path: path.write_bytes(b"\x00\x00"), "expected an IDX header"),
    ],
)
def test_a_damaged_file_is_named(tmp_path, damage, message):
    write_idx(tmp_path)
    victim = tmp_path / f"{NAMES['train_images']}.gz"
    damage(victim)
    with pytest.raises(DataError, match=message) as caught:
        mnist(tmp_path)
    assert str(victim) in str(caught.value)


def test_images_and_labels_must_fit(tmp_path):
    write_idx(tmp_path)
    labels = tmp_path / f"{NAMES['train_labels']}.gz"
    labels.write_bytes(gzip.compress(idx_bytes(np.zeros(6, dtype=np.uint8))))
    with pytest.raises(DataError, match="got 6 labels for the 7 images"):
        mnist(tmp_path)
    labels.write_bytes(gzip.compress(idx_bytes(np.full(7, 11, dtype=np.uint8))))
    with pytest.raises(DataError, match="got label 11, expected 0 to 9"):
        mnist(tmp_path)


def test_digits_are_always_there_and_cover_every_class():
    bundle = digits()
    assert (len(bundle.train), len(bundle.test)) == (1437, 360)
    assert bundle.input_shape == (1, 8, 8)
    assert 0 <= bundle.train.inputs.min() < bundle.train.inputs.max() == 1
    assert torch.bincount(bundle.train.targets).min() > 100
    assert torch.bincount(bundle.test.targets).min() > 20


@pytest.mark.data
@pytest.mark.parametrize(("name", "smallest_class"), [("mnist", 5421), ("fashion-mnist", 6000)])
def test_the_real_files_are_complete(real_data, name, smallest_class):
    bundle = load(name, real_data)
    assert (len(bundle.train), len(bundle.test)) == (60_000, 10_000)
    assert torch.bincount(bundle.train.targets).min() == smallest_class
    inputs, _ = bundle.train.rows_at(torch.arange(1000))
    assert inputs.min() == 0
    assert inputs.max() == 1
