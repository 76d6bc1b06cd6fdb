"""Data as the laboratory holds it: splits, bundles, files with known checksums, downloads and the cache."""

import hashlib
import logging
import pickle
import stat

import numpy as np
import pytest
import torch
from scipy.sparse import csr_array
from torch.utils.data import DataLoader

from sparsedp.errors import DataError
from sparsedp.loading import BatchFetch
from sparsedp_experiments.data import SOURCES, DataBundle, Dense, Split, get, status
from sparsedp_experiments.data.bundle import Sparse, holdout
from sparsedp_experiments.data.files import cache_path, cached_arrays, fingerprint
from sparsedp_experiments.data.registry import public_checksum
from sparsedp_experiments.data.spec import PublicFiles, SourceFile

# Splits, bundles, and how inputs are kept.


def byte_split(rows=6, units=None):
    values = torch.arange(rows * 8, dtype=torch.uint8).reshape(rows, 2, 2, 2)
    return Split(Dense(values), torch.arange(rows) % 2, units)


def sparse_rows():
    """[[0, 2, 0, 1], [0, 0, 0, 0], [3, 0, 0, 0], [0, 0, 4, 5]]."""
    return Sparse(csr_array((np.arange(5) + 1.0, [1, 3, 0, 2, 3], [0, 2, 2, 3, 5]), shape=(4, 4)))


def test_bytes_become_floats_between_zero_and_one():
    split = byte_split()
    inputs, targets = split.rows_at(torch.tensor([5, 0]))
    assert inputs.dtype == torch.float32
    torch.testing.assert_close(inputs[1], torch.arange(8).reshape(2, 2, 2) / 255)
    assert targets.tolist() == [1, 0]


@pytest.mark.parametrize("dtype", [torch.uint8, torch.float16, torch.float32])
def test_a_large_fetch_equals_fetching_one_by_one(dtype):
    values = torch.randint(0, 200, (40, 3), generator=torch.Generator().manual_seed(0)).to(dtype)
    features = Dense(values)
    indices = torch.randint(0, 40, (1500,), generator=torch.Generator().manual_seed(1))
    assert torch.equal(
        features.batch(indices), values[indices].float() * (1 / 255 if dtype == torch.uint8 else 1)
    )


def test_a_selection_shares_its_values_and_can_be_selected_from():
    split = byte_split()
    chosen = split.select(torch.tensor([4, 1, 5]))
    assert torch.equal(chosen.inputs, split.inputs[[4, 1, 5]])
    assert torch.equal(chosen.select(torch.tensor([2, 0])).inputs, split.inputs[[5, 4]])
    assert chosen.features.values.data_ptr() == split.features.values.data_ptr()


def test_sparse_rows_are_fetched_dense_in_any_order():
    rows = sparse_rows()
    expected = torch.tensor([[0, 2, 0, 1], [0, 0, 0, 0], [3, 0, 0, 0], [0, 0, 4, 5.0]])
    expected[0] = torch.tensor([0, 1, 0, 2])
    order = torch.tensor([3, 1, 0, 0, 2])
    torch.testing.assert_close(rows.batch(order), expected[order])
    torch.testing.assert_close(rows.select(order).batch(torch.arange(5)), expected[order])
    assert rows.batch(torch.tensor([], dtype=torch.int64)).shape == (0, 4)


def test_a_split_is_a_data_set_for_the_sampler_and_the_data_loader():
    split = byte_split()
    assert isinstance(split, BatchFetch)
    batches = list(DataLoader(split, batch_size=4))
    torch.testing.assert_close(torch.cat([inputs for inputs, _ in batches]), split.inputs)
    one_input, one_target = split[-1]
    torch.testing.assert_close(one_input, split.inputs[5])
    assert one_target == 1
    with pytest.raises(IndexError):
        split[6]
    assert len(pickle.loads(pickle.dumps(split))) == 6


@pytest.mark.parametrize("fraction", [0.01, 0.3, 0.99])
def test_holdout_is_a_partition_that_depends_on_the_seed_alone(fraction):
    split = byte_split(rows=20)
    rest, held = holdout(split, fraction, seed=3)
    assert len(held) == min(max(round(20 * fraction), 1), 19)
    together = torch.cat([rest.inputs, held.inputs])
    assert torch.equal(torch.unique(together, dim=0), torch.unique(split.inputs, dim=0))
    assert torch.equal(held.inputs, holdout(split, fraction, seed=3)[1].inputs)
    others = [holdout(split, 0.3, seed=seed)[1].inputs for seed in range(5)]
    assert any(not torch.equal(others[0], other) for other in others[1:])


def test_holdout_never_splits_a_unit():
    units = torch.tensor([7, 7, 3, 3, 3, 9, 1, 1, 4, 4])
    rest, held = holdout(byte_split(rows=10, units=units), 0.4, seed=0)
    assert held.unit_count == 2
    assert not set(rest.units.tolist()) & set(held.units.tolist())
    assert len(rest) + len(held) == 10


def test_a_unit_on_both_sides_is_refused():
    train = byte_split(4, units=torch.tensor([1, 1, 2, 3]))
    test = byte_split(2, units=torch.tensor([3, 4]))
    with pytest.raises(DataError, match="1 patients are in both train and test"):
        DataBundle("toy", "made", train, test, ("a", "b"), unit="patient")


# The registry, the disk cache and downloads.


def test_every_download_has_a_checksum_and_a_secure_or_checked_address():
    for spec in SOURCES.values():
        for files in spec.forms.values():
            for file in files:
                assert all(len(digest) == 64 and int(digest, 16) >= 0 for digest in file.sha256)
                assert file.url is None or file.sha256


def make_numbers():
    return {"numbers": np.arange(5)}


def test_the_cache_is_private_atomic_and_reused(private_cache):
    assert cached_arrays("key", make_numbers)["numbers"].tolist() == [0, 1, 2, 3, 4]
    again = cached_arrays("key", lambda: pytest.fail("made again"))
    assert again["numbers"].tolist() == [0, 1, 2, 3, 4]
    folder = private_cache / "decoded"
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert [path.suffix for path in folder.iterdir()] == [".safetensors"]
    assert stat.S_IMODE(cache_path("key", ".safetensors").stat().st_mode) == 0o600


@pytest.mark.parametrize("content", [b"", b"garbage" * 10])
def test_a_damaged_cache_file_is_made_again(private_cache, caplog, content):
    cached_arrays("key", make_numbers)
    cache_path("key", ".safetensors").write_bytes(content)
    with caplog.at_level(logging.WARNING):
        assert cached_arrays("key", make_numbers)["numbers"].tolist() == [0, 1, 2, 3, 4]
    assert "cannot be read" in caplog.text
    assert cached_arrays("key", lambda: pytest.fail("made again"))["numbers"][4] == 4


def test_the_fingerprint_follows_the_file_and_not_its_content(tmp_path):
    path = tmp_path / "file"
    path.write_bytes(b"first")
    before = fingerprint([path], "v1")
    assert fingerprint([path], "v1") == before
    assert fingerprint([path], "v2") != before
    path.write_bytes(b"longer content")
    assert fingerprint([path], "v1") != before
    assert hashlib.sha256(b"longer content").hexdigest() not in fingerprint([path], "v1")


def toy_source(monkeypatch, folder, content=b"payload", digest=None):
    (folder / "remote").mkdir(parents=True)
    (folder / "remote" / "toy.bin").write_bytes(content)
    digest = digest or hashlib.sha256(content).hexdigest()
    file = SourceFile(("toy.bin",), (digest,), (folder / "remote" / "toy.bin").as_uri())
    spec = PublicFiles("toy", "Toy", "1", "none", "the toy shop", ("toys",), {"official": (file,)})
    monkeypatch.setattr("sparsedp_experiments.data.registry.SOURCES", {"toy": spec})
    return spec


def test_a_download_is_checked_put_in_place_and_found(tmp_path, monkeypatch, private_cache):
    spec = toy_source(monkeypatch, tmp_path)
    assert status(spec).missing
    (path,) = get("toy")
    assert path == private_cache / "datasets" / "toys" / "toy.bin"
    assert path.read_bytes() == b"payload"
    assert not status(spec).missing
    (tmp_path / "remote" / "toy.bin").unlink()
    assert get("toy") == [path]


def test_a_wrong_checksum_keeps_nothing(tmp_path, monkeypatch, private_cache):
    toy_source(monkeypatch, tmp_path, digest="0" * 64)
    with pytest.raises(DataError, match="nothing was kept"):
        get("toy")
    assert list((private_cache / "datasets" / "toys").iterdir()) == []


def test_a_record_gets_the_published_checksums_and_nothing_of_other_files(tmp_path, monkeypatch):
    spec = toy_source(monkeypatch, tmp_path)
    for root, content in (("original", b"payload"), ("mine", b"private rows")):
        (tmp_path / root / "toys").mkdir(parents=True)
        (tmp_path / root / "toys" / "toy.bin").write_bytes(content)
    (file,) = spec.forms["official"]
    published = hashlib.sha256(file.sha256[0].encode()).hexdigest()
    assert public_checksum("toy", tmp_path / "original") == published
    assert public_checksum("toy", tmp_path / "mine") is None
    assert public_checksum("toy", tmp_path / "nowhere") is None
