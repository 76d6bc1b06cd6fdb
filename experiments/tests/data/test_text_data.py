"""Reviews as bags, ids and word vectors."""

from __future__ import annotations

import io
import math
import tarfile
import zlib
from pathlib import Path

import numpy as np
import pytest
import torch
import wordllama
from safetensors.numpy import load_file
from tokenizers import Tokenizer

from sparsedp.errors import DataError
from sparsedp_experiments.data import imdb, imdb_tokens, load
from sparsedp_experiments.data.text import HashedTexts, bag_of_words, token_ids, tokens
from sparsedp_experiments.models.pretrained import WordVectors

# Tokens, hashes, and the movie reviews.


REVIEWS = {
    "train/pos/0_9.txt": "Great film! <br /><br />I don't regret it. Great.",
    "train/neg/1_2.txt": "Awful.",
    "test/pos/0_10.txt": "Ça va: 10 out of 10",
    "test/neg/1_1.txt": "???",
}


def write_archive(path, reviews, prefix="aclImdb/"):
    with tarfile.open(path, "w:gz") as archive:
        for name, text in reviews.items():
            content = text if isinstance(text, bytes) else text.encode()
            info = tarfile.TarInfo(prefix + name)
            info.size = len(content)
            archive.addfile(info, io.BytesIO(content))


def test_tokens_are_lower_case_words_without_markup():
    assert tokens("Great film! <br /><br />I DON'T regret it, 10/10.") == [
        "great", "film", "i", "don't", "regret", "it", "10", "10",
    ]  # fmt: skip
    assert tokens("...") == []


def test_the_bag_holds_each_bucket_once_and_has_unit_length():
    texts = HashedTexts.of(["spam spam eggs", "", "eggs"])
    buckets = 1000
    spam, eggs = zlib.crc32(b"spam") % buckets, zlib.crc32(b"eggs") % buckets
    binary = bag_of_words(texts, buckets).batch(torch.arange(3))
    expected = torch.zeros(3, buckets)
    expected[0, [spam, eggs]] = math.sqrt(0.5)
    expected[2, eggs] = 1
    torch.testing.assert_close(binary, expected)


def test_word_vectors_are_means_of_the_published_table(tmp_path):
    texts = ["A fine film, finely made.", "", "No."]
    package = Path(wordllama.__file__).parent
    (table,) = load_file(package / "weights" / "l2_supercat_256.safetensors").values()
    tokenizer = Tokenizer.from_file(str(package / "tokenizers" / "l2_supercat_tokenizer_config.json"))
    expected = np.zeros((3, table.shape[1]))
    for row in (0, 2):
        ids = tokenizer.encode(texts[row], add_special_tokens=False).ids
        mean = table[ids].astype(np.float64).mean(axis=0)
        expected[row] = mean / np.sqrt((mean**2).sum())
    np.testing.assert_allclose(WordVectors().means(texts).numpy(), expected, atol=1e-6)
    one_by_one = torch.cat([WordVectors().means([text]) for text in texts])
    torch.testing.assert_close(one_by_one, WordVectors().means(texts))


def test_reviews_as_word_vectors(tmp_path):
    (tmp_path / "imdb").mkdir()
    write_archive(tmp_path / "imdb" / "aclImdb_v1.tar.gz", REVIEWS)
    bundle = load("imdb-vectors", root=tmp_path)
    assert bundle.input_shape == (256,)
    assert any("wordllama" in note and "SHA-256" in note for note in bundle.notes)
    order = [int(target) for target in bundle.train.targets]
    said = {1: "Great film!   I don't regret it. Great.", 0: "Awful."}
    torch.testing.assert_close(
        bundle.train.features.batch(torch.arange(2)), WordVectors().means([said[label] for label in order])
    )


def test_token_ids_keep_the_order_pad_with_zero_and_never_use_it():
    texts = HashedTexts.of(["a b c d", "b", ""])
    ids = token_ids(texts, length=3, vocabulary=50).values
    expected = [zlib.crc32(word) % 49 + 1 for word in (b"a", b"b", b"c")]
    assert ids.tolist() == [expected, [expected[1], 0, 0], [0, 0, 0]]
    crowd = token_ids(
        HashedTexts.of([" ".join(f"w{i}" for i in range(500))]), length=500, vocabulary=8
    ).values
    assert set(crowd.flatten().tolist()) == set(range(1, 8))


def test_the_archive_is_read_in_the_official_layout(tmp_path):
    reviews = REVIEWS | {
        "train/unsup/5_0.txt": "ignored",
        "train/urls_pos.txt": "ignored",
        "README": "ignored",
    }
    write_archive(tmp_path / "aclImdb_v1.tar.gz", reviews)
    bundle = imdb(tmp_path)
    assert sorted(bundle.train.targets.tolist()) == [0, 1]
    assert bundle.input_shape == (16_384,)
    positive = bundle.train.targets.tolist().index(1)
    row, _ = bundle.train.rows_at(torch.tensor([positive]))
    words = {"great", "film", "i", "don't", "regret", "it"}
    assert set(row[0].nonzero().flatten().tolist()) == {zlib.crc32(word.encode()) % 16_384 for word in words}
    ids = imdb_tokens(tmp_path, length=4).train.features.values[positive]
    assert ids.tolist() == [zlib.crc32(w) % 16_383 + 1 for w in (b"great", b"film", b"i", b"don't")]


@pytest.mark.parametrize(
    ("reviews", "message"),
    [
        ({name: text for name, text in REVIEWS.items() if "train/neg" not in name}, "aclImdb/train/neg"),
        (REVIEWS | {"train/pos/2_7.txt": b"\xff\xfe"}, "train/pos/2_7.txt is not UTF-8"),
    ],
)
def test_wrong_archives_are_refused_with_the_reason(tmp_path, reviews, message):
    write_archive(tmp_path / "aclImdb_v1.tar.gz", reviews)
    with pytest.raises(DataError, match=message):
        imdb(tmp_path)


@pytest.mark.nightly
@pytest.mark.data
def test_the_real_reviews_are_complete_and_balanced(real_data):
    if not (real_data / "imdb").is_dir():
        pytest.skip("the movie reviews are not in SPARSEDP_DATA")
    bundle = load("imdb-tokens", real_data)
    for split in (bundle.train, bundle.test):
        assert torch.bincount(split.targets).tolist() == [12_500, 12_500]
        assert (split.features.values[:, 0] > 0).all()


# Word vectors: files that are missing or damaged are told before they are read; no texts give no rows.


TOKENIZER = "tokenizers/l2_supercat_tokenizer_config.json"

VECTORS = "weights/l2_supercat_256.safetensors"
