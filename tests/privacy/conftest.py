"""Fixtures of the accounting tests: calibrations are not remembered from one test to the next."""

import pytest


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    cache = tmp_path / "cache"
    monkeypatch.setenv("SPARSEDP_CACHE", str(cache))
    return cache
