"""Design section 2, lock 4, for reports: with the mechanism's output fixed, two data sets give the same page."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from report_runs import a_run, data

from every_day import by_method
from runs import fix_releases
from sparsedp import write_report
from sparsedp.methods import list_methods
from sparsedp.privacy import ledger
from sparsedp.randomness import PublicRandomness

PRIVATE = [method.name for method in list_methods()]


class _NoClock:
    @staticmethod
    def now(zone: Any) -> datetime:
        return datetime(2025, 1, 1, tzinfo=UTC)


@pytest.mark.parametrize("method", by_method(PRIVATE))
def test_the_page_does_not_depend_on_the_data_but_through_releases(method, tmp_path: Path, monkeypatch):
    fix_releases(monkeypatch)
    monkeypatch.setattr(ledger, "datetime", _NoClock)
    monkeypatch.setattr(PublicRandomness, "fresh", classmethod(lambda cls: cls(5)))
    pages = [
        write_report(a_run(tmp_path / name / "run", method, dataset=data(seed), epochs=3)).read_bytes()
        for name, seed in (("one", 1), ("other", 11))
    ]
    assert pages[0] == pages[1]
