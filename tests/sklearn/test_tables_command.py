"""Tables from the shell: a draft from the header alone, the estimator's own bits, predictions, the officer's page."""

import csv
import tomllib
import traceback

import numpy as np
import pandas as pd
import pytest
from typer.testing import CliRunner

from sparsedp import DataError, PrivacyError, SparseDPError, verify
from sparsedp.cli import app
from sparsedp.cli.tables import load_estimator, read_tables
from sparsedp.runs.run import Run
from sparsedp.sklearn import SparseDPClassifier
from sparsedp.sklearn.data import held_out_by_hash
from sparsedp.training.trainer import Trainer

pytestmark = [
    pytest.mark.usefixtures("checked_once"),
    pytest.mark.filterwarnings("ignore:.* units are few:UserWarning"),
]

HEADER = ["patient_id", "age", "visits", "insulin", "readmitted", "stay"]
DESCRIBED = """
[columns]
patient_id = "unit"
age = ["number", 0, 120]
visits = ["count", 50]
insulin = ["category", ["No", "Steady", "Up"]]
readmitted = ["category", ["no", "yes"]]
stay = ["number", 0, 30]
"""


@pytest.fixture
def folder(tmp_path):
    rng = np.random.default_rng(0)
    rows = 240
    visits, insulin = rng.poisson(2, rows), rng.choice(["No", "Steady", "Up"], rows)
    with open(tmp_path / "patients.csv", "w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(HEADER)
        ages = [str(age) if age % 7 else "" for age in rng.integers(20, 95, rows)]
        said = np.where(visits > 2, "yes", "no")
        writer.writerows(
            zip([f"p{n // 2}" for n in range(rows)], ages, visits, insulin, said, 2 * visits, strict=True)
        )
    (tmp_path / "columns.toml").write_text(DESCRIBED)
    return tmp_path


def run(*words):
    done = CliRunner().invoke(app, [str(word) for word in words])
    if done.exception is not None and not isinstance(done.exception, SystemExit):
        raise done.exception
    assert done.exit_code == 0, done.output
    return done.output


def trained(folder, *more, target="readmitted", to="run"):
    return run(
        "train", folder / "patients.csv", "--target", target, "--columns", folder / "columns.toml", "--epsilon", 3,
        "--run-dir", folder / to, "--seed", 1, "--epochs", 2, *more,
    )  # fmt: skip


def features_of(folder, target):
    table = read_tables([folder / "patients.csv"])
    return table.part([name for name in table.columns if name != target])


def test_a_draft_is_made_from_the_header_alone(folder):
    drawn = tomllib.loads(run("columns", folder / "patients.csv"))["columns"]
    assert list(drawn) == HEADER
    assert drawn["patient_id"] == "unit"
    assert drawn["age"] == "FILL IN"
    (folder / "header.csv").write_text(",".join(HEADER) + "\n")
    assert run("columns", folder / "header.csv") == run("columns", folder / "patients.csv")
    (folder / "columns.toml").write_text(run("columns", folder / "patients.csv"))
    with pytest.raises(PrivacyError, match="FILL IN"):
        trained(folder)


def test_the_shell_gives_the_estimators_own_bits_a_run_to_verify_and_a_page(folder):
    said = trained(folder)
    assert "one patient of" in said
    assert "auc" in said
    assert verify(folder / "run").passed
    page = (folder / "run" / "guarantee.html").read_text()
    for words in ("epsilon = 3<", "one patient", "Not for release"):
        assert words in page

    frame = pd.read_csv(folder / "patients.csv", dtype={"patient_id": str})
    told = tomllib.loads(DESCRIBED)["columns"]
    del told["readmitted"]
    apart = held_out_by_hash(frame["patient_id"].to_numpy(), 0.2)
    model = SparseDPClassifier(epsilon=3.0, classes=["no", "yes"], columns=told, random_state=1, epochs=2)
    X, y = frame.drop(columns="readmitted"), frame["readmitted"].to_numpy().astype(str)
    model.fit(X[~apart], y[~apart])
    assert model.result_.plan == Run.open(folder / "run").plan
    expected = model.predict_proba(X)
    np.testing.assert_array_equal(
        load_estimator(folder / "run").predict_proba(features_of(folder, "readmitted")), expected
    )
    X.drop(columns="patient_id").to_csv(folder / "new.csv", index=False)
    run("predict", folder / "run", folder / "new.csv", "--out", folder / "predicted.csv")
    predicted = pd.read_csv(folder / "predicted.csv")
    assert list(predicted.columns) == ["predicted", "p(no)", "p(yes)"]
    np.testing.assert_allclose(predicted[["p(no)", "p(yes)"]], expected, atol=1e-5)


def test_held_out_units_follow_from_their_ids_alone():
    ids = np.array([f"p{one % 500}" for one in range(1500)])
    apart = held_out_by_hash(ids, 0.2)
    assert 0.12 < apart.mean() < 0.28  # +-4.5 standard deviations of 500 units
    turned = np.random.default_rng(0).permutation(1500)
    np.testing.assert_array_equal(held_out_by_hash(ids[turned], 0.2), apart[turned])
    assert not set(ids[apart]) & set(ids[~apart])


def test_the_order_of_the_descriptions_changes_nothing(folder):
    trained(folder, "--model", "additive")
    head, *lines = DESCRIBED.strip().splitlines()
    (folder / "columns.toml").write_text("\n".join([head, *reversed(lines)]))
    trained(folder, "--model", "additive", to="turned")
    said = [run("predict", folder / name, folder / "patients.csv") for name in ("run", "turned")]
    assert said[0] == said[1]


def test_an_interrupted_run_goes_on_to_the_same_bits(folder, monkeypatch):
    trained(folder)
    taken = Trainer.step

    def interrupted(self, batch):
        taken(self, batch)
        if batch.step == 3:
            raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(Trainer, "step", interrupted)
        with pytest.raises(AssertionError, match="--resume"):
            trained(folder, to="stopped")
    trained(folder, "--resume", to="stopped")
    said = [run("predict", folder / name, folder / "patients.csv") for name in ("run", "stopped")]
    assert said[0] == said[1]
    assert verify(folder / "stopped").passed


def test_a_target_with_bounds_is_regressed_and_files_add_up(folder):
    lines = (folder / "patients.csv").read_text().splitlines(keepends=True)
    (folder / "one.csv").write_text("".join(lines[:100]))
    (folder / "two.csv").write_text("".join([lines[0], *lines[100:]]))
    run(
        "train", folder / "one.csv", folder / "two.csv", "--target", "stay", "--columns", folder / "columns.toml",
        "--epsilon", 3, "--run-dir", folder / "apart", "--seed", 1, "--epochs", 2,
    )  # fmt: skip
    trained(folder, target="stay", to="whole")
    shown = features_of(folder, "stay")
    predicted = [load_estimator(folder / name).predict(shown) for name in ("apart", "whole")]
    np.testing.assert_array_equal(*predicted)
    assert ((predicted[0] >= 0) & (predicted[0] <= 30)).all()


@pytest.mark.parametrize(
    ("target", "error", "message"),
    [
        ("insulin", DataError, "not among the declared"),
        ("visits", PrivacyError, r'expected \["category"'),
        ("height", DataError, "expected one of the columns described"),
    ],
)
def test_a_target_that_does_not_fit_is_refused_without_a_value(folder, target, error, message):
    text = DESCRIBED.replace('["No", "Steady", "Up"]', '["No", "Steady"]')
    (folder / "columns.toml").write_text(text)
    with pytest.raises(error, match=message) as refusal:
        trained(folder, target=target)
    assert "Up" not in str(refusal.value)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"age,ward\n71,\xe4rztehaus\n", "expected CSV in UTF-8"),
        (b"age;ward\n71;hiv+\n", "expected commas between the columns"),
        (b"age,ward\n71,hiv+\n72,hiv+,9\n", "line 3 has 3 values, expected 2"),
        (b"age,age\n71,hiv+\n", "a different name for each column"),
        (b"age,ward\n", "expected rows below the header"),
    ],
)
def test_a_file_that_cannot_be_read_is_told_without_a_value(tmp_path, content, message):
    (tmp_path / "ward.csv").write_bytes(content)
    with pytest.raises(DataError, match=message) as refusal:
        read_tables([tmp_path / "ward.csv"])
    shown = "".join(traceback.format_exception(refusal.value))
    assert not any(secret in shown for secret in ("71", "hiv", "rzte", "xe4"))
    (tmp_path / "ward.parquet").write_bytes(content)
    with pytest.raises(SparseDPError, match="Parquet"):
        read_tables([tmp_path / "ward.parquet"])


def test_parquet_is_read_with_its_types(folder):
    polars = pytest.importorskip("polars")
    frame = polars.read_csv(folder / "patients.csv")
    frame.write_parquet(folder / "patients.parquet")
    assert "declared" in run("columns", folder / "patients.parquet")
    read = read_tables([folder / "patients.parquet"])
    assert read.columns == HEADER
    assert len(read) == 240
