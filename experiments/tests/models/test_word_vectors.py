"""Word vectors: files that are missing or damaged are told before they are read; no texts give no rows."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import SimpleNamespace

import pytest
import wordllama

from sparsedp.errors import DataError
from sparsedp_experiments.models import WordVectors

TOKENIZER = "tokenizers/l2_supercat_tokenizer_config.json"
VECTORS = "weights/l2_supercat_256.safetensors"


@pytest.fixture
def package(tmp_path, monkeypatch):
    """A copy of the package's folder with the vectors and no tokenizer."""
    for file in (TOKENIZER, VECTORS):
        (tmp_path / file).parent.mkdir()
    (tmp_path / VECTORS).symlink_to(Path(wordllama.__file__).parent / VECTORS)
    found = SimpleNamespace(origin=str(tmp_path / "__init__.py"))
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: found)
    return tmp_path


def test_no_texts_give_no_rows():
    vectors = WordVectors()
    assert vectors.means([]).shape == (0, 256)
    assert vectors.means([""]).tolist() == [[0.0] * 256]


def test_a_missing_tokenizer_is_told_with_what_to_install(package):
    with pytest.raises(DataError, match=r"tokenizer_config.json cannot be read.*sparsedp\[pretrained\]"):
        WordVectors()


def test_another_tokenizer_is_refused_before_it_is_read(package, monkeypatch):
    (package / TOKENIZER).write_text("{}")
    monkeypatch.setattr("tokenizers.Tokenizer", SimpleNamespace(from_file=pytest.fail))
    with pytest.raises(DataError, match=r"has SHA-256 44136fa3.*expected 93248f2a.*sparsedp\[pretrained\]"):
        WordVectors()
