"""The audit table: made from its records, and never a bound above its claim."""

from __future__ import annotations

import tomllib

from sparsedp_experiments.attacks.audits import CONFIG as FILE
from sparsedp_experiments.runs.grid import RESULTS
from sparsedp_experiments.tabular import ROOT
from sparsedp_experiments.audits.table import line, read, table

CONFIG = tomllib.loads(FILE.read_text())
RECORDS = read(RESULTS)


def test_the_pages_say_what_the_records_do():
    assert table(RECORDS, CONFIG) in (ROOT / "docs" / "audit.md").read_text()
    assert line(RECORDS, CONFIG) in (ROOT / "README.md").read_text()


def test_honest_steps_are_bounded_within_a_quarter_and_never_beyond_their_claim():
    for method in CONFIG["methods"]:
        assert len(RECORDS[method]) == CONFIG["repeats"]
        for record in RECORDS[method]:
            step = record["one_step"]
            assert 0.75 * step["claimed_epsilon"] <= step["lower_bound"] <= step["claimed_epsilon"]
            assert record["lower_bound"] <= record["claimed_epsilon"]
            assert record["steps"] == record["planned_steps"] == 200
