"""A run goes on after a full disk, after being killed twice, and after a resume that was refused."""

from __future__ import annotations

import errno
import json
from pathlib import Path

import pytest
from torch import Tensor, nn

from runs import a_trainer, advance
from sparsedp._files import write_atomically
from sparsedp.errors import ModelError, SparseDPError
from sparsedp.runs import directory
from sparsedp.runs.directory import CHECKPOINT
from sparsedp.runs.verify import verify

pytestmark = pytest.mark.usefixtures("checked_once")


class TwoLayers(nn.Module):
    """Two layers of one shape, whose parameters come in the order they are made in."""

    def __init__(self, names: tuple[str, str]) -> None:
        super().__init__()
        self.layers = nn.ModuleDict({name: nn.Linear(5, 3) for name in names})

    def forward(self, rows: Tensor) -> Tensor:
        """Both see the rows."""
        found: Tensor = self.layers["query"](rows) - self.layers["value"](rows)
        return found


def test_the_same_parameters_in_another_order_are_another_model(tmp_path: Path) -> None:
    out = tmp_path / "run"
    advance(a_trainer("dp-sgd", model=TwoLayers(("query", "value")), out=out, seed=7), 3).close()
    record = (out / "record.json").read_text()
    with pytest.raises(ModelError, match="in another order"):
        a_trainer("dp-sgd", model=TwoLayers(("value", "query")), out=out, resume=True, seed=None)
    assert (out / "record.json").read_text() == record
    assert not json.loads(record)["publishable"]


def test_a_run_goes_on_after_the_disk_was_full(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "run"
    trainer = advance(a_trainer("dp-sgd", out=out), 3)

    def full(path: Path, content: bytes) -> None:
        if path.name == CHECKPOINT:
            raise OSError(errno.ENOSPC, "No space left on device")
        write_atomically(path, content)

    with monkeypatch.context() as patch:
        patch.setattr(directory, "write_atomically", full)
        for _ in range(3):
            with pytest.raises(OSError, match="No space"):
                trainer.save()
    assert verify(out, independent=False).passed
    trainer.close()
    assert advance(a_trainer("dp-sgd", out=out, resume=True)).finish().complete


def test_a_run_goes_on_after_it_was_killed_twice_before_a_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "run"
    trainer = advance(a_trainer("dp-sgd", out=out), 3)

    def killed(path: Path, content: bytes) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(directory, "write_atomically", killed)
        with pytest.raises(KeyboardInterrupt):
            trainer.save()
        trainer._keeper._store.close()  # as the end of the process does
        with pytest.raises(KeyboardInterrupt):
            a_trainer("dp-sgd", out=out, resume=True)
    assert advance(a_trainer("dp-sgd", out=out, resume=True)).finish().complete


def test_a_refused_resume_gives_the_run_back_while_its_error_is_kept(tmp_path: Path) -> None:
    out = tmp_path / "run"
    advance(a_trainer("dp-sgd", out=out), 3).close()
    with pytest.raises(SparseDPError, match="not the run that was saved") as kept:
        a_trainer("dp-sgd", out=out, resume=True, ema_decay=0.5)
    assert advance(a_trainer("dp-sgd", out=out, resume=True)).finish().complete
    assert kept.value is not None
