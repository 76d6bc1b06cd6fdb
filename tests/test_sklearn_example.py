"""The page on the scikit-learn classifier and the hospital example."""

import importlib.util
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from scipy import sparse
from scipy.stats import ttest_rel

from sparsedp.sklearn import SparseDPClassifier
from sparsedp_experiments.data import DataBundle, Sparse, Split

ROOT = Path(__file__).parents[1]


def load_example():
    spec = importlib.util.spec_from_file_location("hospital_example", ROOT / "examples" / "hospital.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


hospital = load_example()


@pytest.mark.nightly
def test_the_code_on_the_page_runs_as_it_stands():
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "sklearn.md").read_text(), flags=re.DOTALL)
    assert blocks
    done = subprocess.run(
        [sys.executable, "-W", "error", "-W", "ignore::DeprecationWarning", "-c", "\n".join(blocks)],
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("table", [hospital.table, hospital.against_dense])
def test_the_tables_on_the_page_are_made_from_the_committed_results(table):
    rows = hospital.Results(ROOT / "experiments" / "results" / "hospital-sklearn.jsonl").rows()
    assert hospital.markdown(table(rows)) in (ROOT / "docs" / "sklearn.md").read_text()


def test_differences_are_paired_by_seed_with_students_interval():
    rows = [
        {"stage": "test", "method": method, "epsilon": 1.0, "seed": seed, "auc": auc}
        for method, aucs in {"dp-sgd": (0.60, 0.70, 0.65), "other": (0.61, 0.72, 0.68)}.items()
        for seed, auc in enumerate(aucs)
    ]
    lines = hospital.against_dense(rows)
    interval = ttest_rel((0.61, 0.72, 0.68), (0.60, 0.70, 0.65)).confidence_interval(0.95)
    assert lines[1:] == [["other", f"+0.0200 ± {(interval.high - interval.low) / 2:.4f}"]]


def test_the_page_lists_every_parameter_and_the_default_method():
    page = (ROOT / "docs" / "sklearn.md").read_text()
    assert [name for name in SparseDPClassifier().get_params() if f"| `{name}` |" not in page] == []
    assert f'| `method` | "{SparseDPClassifier().method}" |' in page


def hospital_split(rows, first_patient):
    rng = np.random.default_rng(first_patient)
    dense = rng.integers(0, 2, size=(rows, 6)).astype(np.float32)
    matrix = sparse.csr_matrix(dense)
    features = Sparse(
        torch.tensor(matrix.indptr, dtype=torch.int64),
        torch.tensor(matrix.indices),
        torch.tensor(matrix.data),
        6,
    )
    return Split(features, torch.tensor(dense[:, 0]).long(), first_patient + torch.arange(rows) // 2)


def test_the_hospital_example_tunes_before_it_tests_and_goes_on_where_it_stopped(tmp_path, monkeypatch):
    for name, value in {"RATES": (1.0,), "CLIP_NORMS": (0.4, 1.6), "EPOCHS": 2, "BATCH_SIZE": 8}.items():
        monkeypatch.setattr(hospital, name, value)
    bundle = DataBundle(
        "toy", "toy", hospital_split(80, 0), hospital_split(40, 1000), ("no", "yes"), "patient"
    )
    results = hospital.Results(tmp_path / "rows.jsonl")
    rows = hospital.compare(bundle, results, ["dp-sgd"], [3.0], [0, 1])
    written = results.path.read_text()
    assert [row["stage"] for row in results.rows()] == ["tune"] * 7 + ["test"] * 3
    assert {row["patients"] for row in rows if "patients" in row} == {40}
    assert hospital.compare(bundle, results, ["dp-sgd"], [3.0], [0, 1]) == rows
    assert results.path.read_text() == written
    assert hospital.markdown(hospital.table(rows)).startswith(
        "| method | AUC, epsilon 3 | recall, epsilon 3 |"
    )


def test_recall_counts_readmissions_among_the_fifth_with_the_highest_scores():
    y = np.array([1, 0, 1, 0, 1, 0, 0, 0, 0, 0])
    assert hospital.measures(np.arange(10, 0, -1.0), y) == {
        "auc": round(np.mean([[i < j for j in np.flatnonzero(y == 0)] for i in np.flatnonzero(y)]), 5),
        "recall": round(1 / 3, 5),
    }
