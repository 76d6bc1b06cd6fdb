"""The examples run as they are, and Opacus counts what they spent as we do."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
import warnings
from pathlib import Path
from types import ModuleType

import pytest

from runs import loss_fn, network, rows
from sparsedp import fit
from sparsedp.privacy.calibration import NominalSplit
from sparsedp.privacy.ledger import Ledger
from sparsedp.training.planning import changed_method

EXAMPLES = Path(__file__).parents[2] / "examples"


def run_example(name: str, *arguments: str) -> str:
    done = subprocess.run(
        [sys.executable, str(EXAMPLES / name), *arguments],
        capture_output=True,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        check=False,
        timeout=280,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.nightly
def test_the_table_example_trains_dense_and_by_rows() -> None:
    shown = run_example("embedding_table.py", "--records", "2000", "--vocabulary", "500", "--epochs", "2")
    assert re.search(r"dp-sgd +epsilon 3.00  active 8,017 of 8,017 ", shown), shown
    assert re.search(r"tp-coherent +epsilon 3.00  active 160 of 8,017 ", shown), shown


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("name", "epsilon", "accuracy"),
    [("five_lines.py", 3.0, 0.8), ("own_loop.py", 8.0, 0.8)],
)
def test_an_example_trains_within_its_budget(name: str, epsilon: float, accuracy: float) -> None:
    found = re.search(r"accuracy ([0-9.]+) at epsilon ([0-9.]+)", run_example(name))
    assert found is not None
    assert float(found[1]) > accuracy
    assert float(found[2]) <= epsilon


@pytest.fixture(scope="module")
def mnist_example() -> ModuleType:
    spec = importlib.util.spec_from_file_location("train_mnist", EXAMPLES / "train_mnist.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Opacus's imports
        spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("method", ["dp-sgd", "tp-topk"])
def test_opacus_counts_a_ledger_as_we_do(method: str, mnist_example: ModuleType, tmp_path: Path) -> None:
    """RDP against RDP and PLD against PRV, within 2 %, from the ledger file alone."""
    fit(
        network(), rows(1), loss_fn, method=changed_method(method, split=NominalSplit(0.3)),
        epsilon=3, delta=1e-5, epochs=10, batch_size=6, seed=0,
        run_dir=tmp_path / "run", progress=False,
    )  # fmt: skip
    ledger = Ledger.read(tmp_path / "run" / "ledger.jsonl")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Opacus's advice on orders
        rdp, prv = mnist_example.counted_by_opacus(tmp_path / "run" / "ledger.jsonl", 1e-5)
    assert ledger.spent(accountant="pld") <= 3.0
    assert prv == pytest.approx(ledger.spent(accountant="pld"), rel=0.02)
    assert rdp == pytest.approx(ledger.spent(accountant="rdp"), rel=0.02)


@pytest.mark.nightly
@pytest.mark.data
def test_the_mnist_example_trains_on_real_mnist(tmp_path: Path) -> None:
    if not os.environ.get("SPARSEDP_DATA"):
        pytest.skip("set SPARSEDP_DATA to the folder with mnist")
    printed = run_example(
        "train_mnist.py", "--epochs", "1", "--epsilon", "8", "--out", str(tmp_path), "tp-coherent"
    )
    accuracy, epsilon = (float(word) for word in printed.splitlines()[1].split()[1:4:2])
    assert accuracy > 0.85
    assert epsilon <= 8.0


@pytest.mark.nightly
def test_the_loop_of_the_example_learns() -> None:
    shown = run_example("keep_your_loop.py")
    assert float(re.findall(r"accuracy ([\d.]+)", shown)[-1]) > 0.6, shown
    assert "epsilon 3.00" in shown or "epsilon 2.99" in shown, shown
