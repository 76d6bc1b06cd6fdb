"""A user's own files on the command line: what they need, whom they protect, and what is said of others."""

import numpy as np
import pytest
from typer.testing import CliRunner

from sparsedp.cli import Exit
from sparsedp_experiments.cli.app import app

SHORT = (
    "--classes", "no,yes", "--epochs", "1", "--batch-size", "10", "--seed", "0", "--set", "accountant=rdp",
)  # fmt: skip
HINT = "If a person can have several rows, add units_train"


@pytest.fixture
def write(monkeypatch, tmp_path):
    """Writes mine.npz: 40 rows of 20 people to train on, 10 others to test on."""
    monkeypatch.chdir(tmp_path)

    def made(**changes):
        rng = np.random.default_rng(0)
        arrays = {}
        for side, rows in (("train", 40), ("test", 10)):
            arrays |= {f"x_{side}": rng.random((rows, 3)), f"y_{side}": np.arange(rows) % 2}
        arrays["units_train"] = np.arange(40) // 2
        np.savez(
            tmp_path / "mine.npz", **{name: v for name, v in (arrays | changes).items() if v is not None}
        )
        return "train", "--dataset", tmp_path / "mine.npz", *SHORT

    return made


def test_help_names_the_arrays_and_the_unit():
    shown = CliRunner().invoke(app, ["train", "--help"], env={"COLUMNS": "200"}).output
    for name in ("x_train", "y_train", "units_train", "x_test", "y_test", "--unit"):
        assert name in shown


@pytest.mark.parametrize("more", [(), SHORT])
def test_a_table_is_told_where_tables_go(typed, tmp_path, more):
    (tmp_path / "big.csv").write_text("age,ill\n50,1\n")
    done = typed("train", "--dataset", tmp_path / "big.csv", *more)
    done.failed_with(Exit.DATA, "big.csv", "PublicEncoder", "docs/tables.md", ".npz", "docs/integrations.md")


def test_people_are_called_as_the_user_calls_them(typed, write):
    shown = typed(*write(), "--unit", "patient", "--out", "run")
    assert shown.code == 0, shown.err
    assert "per patient" in shown.out
    assert HINT not in shown.out
    assert "mine.npz by auto, in run\nepoch 1/1" in shown.err
    assert "Training logistic on " in shown.err


def test_rows_without_people_get_a_hint(typed, write):
    shown = typed(*write(units_train=None), "--out", "run")
    assert "per row" in shown.out
    assert HINT in " ".join(shown.out.split())


@pytest.mark.filterwarnings("always::sparsedp.errors.PrivacyWarning")
def test_rows_may_be_asked_for(typed, write):
    shown = typed(*write(), "--unit", "row", "--out", "run")
    assert "but rows are protected" in shown.err
    assert "per row" in shown.out
    assert HINT not in " ".join(shown.out.split())


@pytest.mark.parametrize(
    ("changes", "more", "code"),
    [
        ({"units_train": np.where(np.arange(40) % 7, np.arange(40) // 2, np.nan)}, (), Exit.DATA),
        ({"x_test": np.zeros((0, 3)), "y_test": np.zeros(0, int)}, (), Exit.DATA),
        ({}, ("--batch-size", "1000"), Exit.PRIVACY),
    ],
    ids=["ids", "empty", "batch"],
)
def test_a_run_that_cannot_be_is_not_announced(typed, write, tmp_path, changes, more, code):
    done = typed(*write(**changes), *more)
    done.failed_with(code)
    assert "Training" not in done.err
    assert not list((tmp_path).glob("runs/*/ledger.jsonl"))
