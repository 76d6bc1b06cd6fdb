"""The command line as a user types it, with one small run that `fit` made in a folder."""

import json
import shutil
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

import sparsedp
from sparsedp.cli import main


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


def train(folder: Path, *, resume: bool = False) -> sparsedp.Result:
    """A run of `tp-topk` with a warm-up, in a second."""
    x = torch.randn(80, 6, generator=torch.Generator().manual_seed(0))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 2))
    return sparsedp.fit(
        model, TensorDataset(x, (x[:, 0] > 0).long()), nn.CrossEntropyLoss(), method="tp-topk", epsilon=8, delta=1e-3,
        epochs=5, batch_size=20, seed=0, run_dir=folder, resume=resume, progress=False,
    )  # fmt: skip


@pytest.fixture(scope="session")
def trained(tmp_path_factory) -> tuple[Path, dict[str, Any]]:
    """A finished run, and its record."""
    folder = tmp_path_factory.mktemp("trained") / "run"
    train(folder)
    return folder, json.loads((folder / "record.json").read_text())


@pytest.fixture(scope="session")
def again() -> Callable[[Path], object]:
    """Takes the same run up again in a folder."""
    return lambda folder: train(folder, resume=True)


@pytest.fixture
def typed(monkeypatch, capsys) -> Callable[..., Finished]:
    """The entry point in this process: the same code, without the seconds a new process takes to load torch."""

    def run(*arguments: str | Path) -> Finished:
        monkeypatch.setattr("sys.argv", ["sparsedp", *map(str, arguments)])
        monkeypatch.setenv("COLUMNS", "120")
        monkeypatch.setattr(warnings, "showwarning", warnings.showwarning)
        with pytest.raises(SystemExit) as ended:
            main()
        return Finished(int(ended.value.code or 0), *capsys.readouterr())

    return run


@pytest.fixture
def run_copy(trained, tmp_path) -> Path:
    """A finished run to be spoilt."""
    return Path(shutil.copytree(trained[0], tmp_path / "run"))
