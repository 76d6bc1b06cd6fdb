"""Starts ranks as a user does: through torchrun, on this machine."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch.distributed as dist

SCRIPT = Path(__file__).with_name("rank_jobs.py")
TESTS = Path(__file__).parents[1]
SOURCES = TESTS.parent / "src"


def environment(**more: str) -> dict[str, str]:
    path = os.pathsep.join(
        filter(None, [str(SOURCES), str(TESTS), str(TESTS / "helpers"), os.environ.get("PYTHONPATH")])
    )
    quick = {"OMP_NUM_THREADS": "1", "TORCH_ELASTIC_SHUTDOWN_TIMEOUT": "3"}
    return {**os.environ, "PYTHONPATH": path, **quick, **more}


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


def jobs(
    folder: Path, ranks: int, *names: str, restarts: int = 0, timeout: float = 280, **more: str
) -> dict[str, list[Any]]:
    """Do jobs of `rank_jobs` in one start; what each gave, rank by rank."""
    ended = torchrun(ranks, str(SCRIPT), str(folder), *names, restarts=restarts, timeout=timeout, **more)
    assert ended.returncode == 0, ended.stderr[-6000:]
    return {
        name: [json.loads((folder / f"{name}.{rank}.json").read_text()) for rank in range(ranks)]
        for name in names
    }


@contextmanager
def group_of_one() -> Iterator[None]:
    """This process as a group that the user has made: what one rank under torchrun is, without its start."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()


def jobs_of_one(folder: Path, *names: str) -> dict[str, Any]:
    """Do jobs of `rank_jobs` as one rank, in this process."""
    from rank_jobs import JOBS

    with group_of_one():
        return {name: json.loads(json.dumps(JOBS[name](folder))) for name in names}
