"""NPZ files, the registry, the disk cache, downloads and the listing."""

import gzip
import hashlib
import io
import logging
import stat
import zipfile

import numpy as np
import pytest

from sparsedp._files import cache_dir
from sparsedp.errors import DataError
from sparsedp_experiments.data import DATASETS, SOURCES, get, load, status
from sparsedp_experiments.data.files import cache_path, cached_arrays, fingerprint
from sparsedp_experiments.data.registry import DIFFERENT, OFFICIAL, UNKNOWN, compare, public_checksum
from sparsedp_experiments.data.spec import PublicFiles, SourceFile


def test_an_unknown_name_lists_the_known_ones():
    with pytest.raises(DataError, match="no data set named 'cats'; there are digits, mnist"):
        load("cats")


def test_rows_of_one_source_share_it():
    assert {row.source.name: row.source for row in DATASETS.values() if row.source} == SOURCES
    assert all(SOURCES[row.source.name] is row.source for row in DATASETS.values() if row.source)
    assert len(load("digits").train) == 1437


def test_every_download_has_a_checksum_and_a_secure_or_checked_address():
    for spec in SOURCES.values():
        for files in spec.forms.values():
            for file in files:
                assert all(len(digest) == 64 and int(digest, 16) >= 0 for digest in file.sha256)
                assert file.url is None or file.sha256


def test_cache_folder_follows_the_variables(monkeypatch, tmp_path):
    monkeypatch.setenv("SPARSEDP_CACHE", str(tmp_path / "explicit"))
    assert cache_dir() == tmp_path / "explicit"
    monkeypatch.delenv("SPARSEDP_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert cache_dir() == tmp_path / "xdg" / "sparsedp"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert cache_dir() == tmp_path / ".cache" / "sparsedp"
    monkeypatch.setenv("XDG_CACHE_HOME", "relative/is/ignored")
    assert cache_dir() == tmp_path / ".cache" / "sparsedp"


def make_numbers():
    return {"numbers": np.arange(5)}


def test_the_cache_is_private_atomic_and_reused(private_cache):
    assert cached_arrays("key", ("numbers",), make_numbers)["numbers"].tolist() == [0, 1, 2, 3, 4]
    again = cached_arrays("key", ("numbers",), lambda: pytest.fail("made again"))
    assert again["numbers"].tolist() == [0, 1, 2, 3, 4]
    folder = private_cache / "decoded"
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert [path.suffix for path in folder.iterdir()] == [".safetensors"]
    assert stat.S_IMODE(cache_path("key", ".safetensors").stat().st_mode) == 0o600


@pytest.mark.parametrize("content", [b"", b"garbage" * 10])
def test_a_damaged_cache_file_is_made_again(private_cache, caplog, content):
    cached_arrays("key", ("numbers",), make_numbers)
    cache_path("key", ".safetensors").write_bytes(content)
    with caplog.at_level(logging.WARNING):
        assert cached_arrays("key", ("numbers",), make_numbers)["numbers"].tolist() == [0, 1, 2, 3, 4]
    assert "cannot be read" in caplog.text
    assert cached_arrays("key", ("numbers",), lambda: pytest.fail("made again"))["numbers"][4] == 4


def test_a_cache_of_other_arrays_is_made_again(private_cache):
    cached_arrays("key", ("other",), lambda: {"other": np.zeros(1)})
    assert "numbers" in cached_arrays("key", ("numbers",), make_numbers)


def test_a_cache_that_cannot_be_written_is_harmless(private_cache, caplog):
    private_cache.write_text("a file where the folder should be")
    with caplog.at_level(logging.WARNING):
        assert cached_arrays("key", ("numbers",), make_numbers)["numbers"][4] == 4
    assert "cannot be written" in caplog.text


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
    monkeypatch.setattr("sparsedp_experiments.data.registry.SOURCES", {"toy": spec})
    return spec


def test_a_download_is_checked_put_in_place_and_found(tmp_path, monkeypatch, private_cache):
    spec = toy_source(monkeypatch, tmp_path)
    assert status(spec).missing
    calls = []
    (path,) = get("toy", progress=lambda *call: calls.append(call))
    assert path == private_cache / "datasets" / "toys" / "toy.bin"
    assert path.read_bytes() == b"payload"
    assert calls == [("toy.bin", 7, 7)]
    assert status(spec).checksums() == [OFFICIAL]
    get("toy", opener=lambda _: pytest.fail("downloaded again"))


def test_a_wrong_checksum_keeps_nothing(tmp_path, monkeypatch, private_cache):
    toy_source(monkeypatch, tmp_path, digest="0" * 64)
    with pytest.raises(DataError, match="nothing was kept"):
        get("toy")
    assert list((private_cache / "datasets" / "toys").iterdir()) == []


class ShortAnswer(io.BytesIO):
    headers = {"Content-Length": "100"}  # noqa: RUF012


@pytest.mark.parametrize(
    ("opener", "message"),
    [
        (lambda _: ShortAnswer(b"payload"), "got 7 of 100 bytes"),
        (lambda _: (_ for _ in ()).throw(OSError("no route to host")), "no route to host"),
    ],
)
def test_a_broken_transfer_keeps_nothing_and_says_what_to_do(
    tmp_path, monkeypatch, private_cache, opener, message
):
    toy_source(monkeypatch, tmp_path)
    with pytest.raises(DataError, match=message) as caught:
        get("toy", opener=opener)
    assert "fetch it by hand" in str(caught.value)
    assert list((private_cache / "datasets" / "toys").iterdir()) == []


def test_what_cannot_be_downloaded_says_where_it_comes_from():
    with pytest.raises(DataError, match="Kaggle"):
        get("eyepacs")
    with pytest.raises(DataError, match="there are mnist"):
        get("cats")


def test_the_original_is_known_through_its_compression(tmp_path):
    content = b"the original"
    known = (hashlib.sha256(content).hexdigest(),)
    (tmp_path / "a.gz").write_bytes(gzip.compress(content))
    with zipfile.ZipFile(tmp_path / "a.zip", "w") as archive:
        archive.writestr("a.csv", content)
    (tmp_path / "b.gz").write_bytes(gzip.compress(b"another")[:-3])
    assert compare(tmp_path / "a.gz", known) is OFFICIAL
    assert compare(tmp_path / "a.zip", known) is OFFICIAL
    assert compare(tmp_path / "b.gz", known) is DIFFERENT
    assert compare(tmp_path / "a.gz", ()) is UNKNOWN


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


@pytest.mark.data
def test_the_real_originals_have_their_public_checksums(real_data):
    for name in ("mnist", "fashion-mnist", "diabetes130"):
        found = status(SOURCES[name], real_data)
        if not found.missing:
            assert set(found.checksums()) == {OFFICIAL}
