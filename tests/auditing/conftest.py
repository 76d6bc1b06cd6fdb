from __future__ import annotations

from importlib import import_module

import pytest

from sparsedp.auditing import mechanism, sampling

attack = import_module("sparsedp.auditing.audit")  # the package gives the function of that name


@pytest.fixture
def quick(monkeypatch):
    """Fewer releases and draws: enough for leaks that are there or not, whatever their size."""
    monkeypatch.setattr(mechanism, "MOST_RELEASES", 24)
    monkeypatch.setattr(mechanism, "FEWEST_RELEASES", 24)
    monkeypatch.setattr(sampling, "HITS", 0)


@pytest.fixture
def quickest(quick, monkeypatch):
    """Hardly a record: for what does not hang on the model and the engine."""
    monkeypatch.setattr(attack, "UNITS_LEFT_OUT", 1)
    monkeypatch.setattr(attack, "RECORD_RELEASES", 4)
