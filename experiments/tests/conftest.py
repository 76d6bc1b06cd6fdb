"""Fixtures of the data tests: an empty cache, no inherited folders, and the real data where there is some."""

import os
from pathlib import Path

import pytest

REAL_DATA = os.environ.get("SPARSEDP_DATA")


@pytest.fixture(autouse=True)
def private_cache(tmp_path, monkeypatch):
    """Every test has a cache of its own and finds no data it did not make."""
    cache = tmp_path / "cache"
    monkeypatch.setenv("SPARSEDP_CACHE", str(cache))
    monkeypatch.delenv("SPARSEDP_DATA", raising=False)
    return cache


@pytest.fixture
def real_data():
    """The folder of real data sets; skips where there is none."""
    if not REAL_DATA or not Path(REAL_DATA).is_dir():
        pytest.skip("the real data sets are not here: set SPARSEDP_DATA to their folder")
    return Path(REAL_DATA)
