"""Starts ranks as a user does: through torchrun, on this machine."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

SCRIPT = Path(__file__).with_name("rank_jobs.py")
SOURCES = Path(__file__).parents[2] / "src"


def environment(**more: str) -> dict[str, str]:
    path = os.pathsep.join(filter(None, [str(SOURCES), os.environ.get("PYTHONPATH")]))
    return {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", **more}


def torchrun(
    ranks: int, *arguments: str, restarts: int = 0, timeout: float = 280, **more: str
) -> subprocess.CompletedProcess[str]:
    """Run a command under torchrun and wait for it."""
    command = [
        sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}",
        f"--max-restarts={restarts}", *arguments,
    ]  # fmt: skip
    return subprocess.run(
        command, env=environment(**more), capture_output=True, text=True, timeout=timeout, check=False
    )


def jobs(folder: Path, ranks: int, *names: str, restarts: int = 0, **more: str) -> dict[str, list[Any]]:
    """Do jobs of `rank_jobs` in one start; what each gave, rank by rank."""
    ended = torchrun(ranks, str(SCRIPT), str(folder), *names, restarts=restarts, **more)
    assert ended.returncode == 0, ended.stderr[-6000:]
    return {
        name: [json.loads((folder / f"{name}.{rank}.json").read_text()) for rank in range(ranks)]
        for name in names
    }
