from __future__ import annotations

import pytest

from sparsedp.auditing import draws, mechanism


@pytest.fixture
def quick(monkeypatch):
    """Fewer releases and draws: enough for leaks that are there or not, whatever their size."""
    monkeypatch.setattr(mechanism, "MOST_RELEASES", 24)
    monkeypatch.setattr(mechanism, "FEWEST_RELEASES", 24)
    monkeypatch.setattr(draws, "HITS", 0)
