"""Puts tests/oracles on the path: the independent NumPy implementations are no part of the package."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1]))


@pytest.fixture(autouse=True, scope="session")
def own_cache(tmp_path_factory: pytest.TempPathFactory):
    """Calibrations are not remembered from one test run to the next."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SPARSEDP_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield
