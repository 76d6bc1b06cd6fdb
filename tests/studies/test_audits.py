"""The audit table: made from its records, and never a bound above its claim."""

from __future__ import annotations

import json
import tomllib

from studies.audits.__main__ import RESULTS, ROOT
from studies.audits.table import line, table

CONFIG = tomllib.loads((ROOT / "studies" / "audits" / "audit.toml").read_text())
RECORDS = {
    file.stem: [json.loads(text) for text in file.read_text().splitlines()]
    for file in RESULTS.glob("*.jsonl")
}


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
