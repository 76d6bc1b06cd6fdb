"""The laboratory's commands as typed, in a process of their own or in this one, with nothing but digits."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from sparsedp.runs.checkpoint import read_checkpoint
from sparsedp_experiments.runs.cli import main


@dataclass(frozen=True)
class Finished:
    code: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        return json.loads(self.out)

    def failed_with(self, code: int, *words: str) -> None:
        """One clear message on standard error, and no traceback."""
        assert self.code == code, self
        assert "Traceback" not in self.err, self.err
        flat = " ".join(self.err.split())
        for word in words:
            assert word in flat, f"{word!r} is not in {flat!r}"


@dataclass(frozen=True)
class Shell:
    """Runs `python -m sparsedp_experiments` in a folder."""

    folder: Path
    environment: dict[str, str]

    train = (
        "train", "--dataset", "digits", "--method", "tp-topk", "--epochs", "8",
        "--set", "batch_size=64", "--seed", "0",
    )  # fmt: skip

    def __call__(self, *arguments: str | Path) -> Finished:
        process = self.start(*arguments)
        out, err = process.communicate()
        return Finished(process.returncode, out, err)

    def start(self, *arguments: str | Path) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [sys.executable, "-m", "sparsedp_experiments", *arguments],
            cwd=self.folder,
            env=self.environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            preexec_fn=_answer_to_interrupts,
        )


def _answer_to_interrupts() -> None:
    """A test run in the background ignores Ctrl-C, and so would what it starts."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


@pytest.fixture(scope="session")
def shell(tmp_path_factory) -> Shell:
    folder = tmp_path_factory.mktemp("shell")
    environment = {
        **{key: value for key, value in os.environ.items() if not key.startswith("SPARSEDP_")},
        "SPARSEDP_CACHE": str(folder / "cache"),
        "SPARSEDP_DATA": str(folder / "no-data"),
        "OMP_NUM_THREADS": "1",
        "COLUMNS": "120",
    }
    return Shell(folder, environment)


@pytest.fixture(scope="session")
def stopped(shell) -> tuple[Finished, int]:
    """A run stopped by Ctrl-C after its first epoch: how it ended, and how many steps its checkpoint has seen."""
    process = shell.start(*shell.train, "--out", "run")
    metrics = shell.folder / "run" / "metrics.jsonl"
    while not metrics.exists() or not metrics.read_text():
        assert process.poll() is None, process.communicate()
        time.sleep(0.005)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate()
    step = read_checkpoint(shell.folder / "run" / "checkpoint.safetensors").step
    return Finished(process.returncode, out, err), step


@pytest.fixture(scope="session")
def trained(stopped, shell) -> tuple[Path, dict[str, Any]]:
    """The same run resumed and finished, and what `train --resume --json` printed."""
    done = shell("train", "--resume", "run", "--json")
    assert done.code == 0, done.err
    return shell.folder / "run", done.json


@pytest.fixture
def typed(monkeypatch, capsys, shell) -> Callable[..., Finished]:
    """The entry point in this process: the same code, without the seconds a new process takes to load torch."""

    def run(*arguments: str | Path) -> Finished:
        monkeypatch.setattr("sys.argv", ["sparsedp", *map(str, arguments)])
        for name in ("SPARSEDP_CACHE", "SPARSEDP_DATA", "COLUMNS"):
            monkeypatch.setenv(name, shell.environment[name])
        monkeypatch.setattr(warnings, "showwarning", warnings.showwarning)
        with pytest.raises(SystemExit) as ended:
            main()
        return Finished(int(ended.value.code or 0), *capsys.readouterr())

    return run


@pytest.fixture
def run_copy(trained, tmp_path) -> Path:
    """A finished run to be spoilt."""
    return Path(shutil.copytree(trained[0], tmp_path / "run"))
