"""Fixtures of the accounting tests: calibrations are not remembered from one test to the next."""

import pytest

from sparsedp.privacy.calibration import _solved


@pytest.fixture(autouse=True)
def nothing_remembered():
    _solved.cache_clear()
