"""SIGKILL at random moments: the ledger never under-counts, nothing is corrupt, the budget is kept.

That some kill falls inside a block is left to chance: none of eight does with probability below 0.001.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

SCRIPT = Path(__file__).with_name("killed_run.py")
STEPS, BLOCK = 210, 2


def killed(folder: Path, seed: str, kills: int) -> dict[str, Any]:
    folder.mkdir()
    done = subprocess.run(
        [sys.executable, str(SCRIPT), str(folder), seed, str(kills)],
        capture_output=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        check=False,
        timeout=200,
    )
    assert done.returncode == 0, done.stderr.decode()
    return json.loads(done.stdout)


def test_an_unseeded_run_killed_twenty_times_is_never_under_counted(tmp_path: Path) -> None:
    seen = killed(tmp_path / "killed", "none", 20)
    before = 0
    for look in seen["looks"]:
        drawn = look["drawn"]
        assert len(drawn) == len(set(drawn))
        assert max(drawn, default=-1) < look["charged"] <= STEPS
        assert look["saved"] <= look["charged"]
        assert look["reasons"] == []
        assert look["charged"] >= before
        before = look["charged"]
    assert len(seen["looks"][-1]["drawn"]) < seen["looks"][-1]["charged"]
    assert seen["charged"] == STEPS
    assert seen["epsilon"] <= 8.0
    assert seen["epochs"] == sorted(set(seen["epochs"]))


def test_a_seeded_run_killed_eight_times_ends_with_the_bits_of_one_left_alone(tmp_path: Path) -> None:
    seen = killed(tmp_path / "killed", "3", 8)
    for look in seen["looks"]:
        assert max(look["drawn"], default=-1) < look["charged"] <= look["saved"] + BLOCK
        assert look["reasons"] == []
    assert len(seen["looks"][-1]["drawn"]) > len(set(seen["looks"][-1]["drawn"]))
    assert seen["same_as_alone"]
    assert seen["charged"] == STEPS
    assert seen["epochs"] == list(range(1, 71))
