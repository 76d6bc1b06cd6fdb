"""Ctrl-C in the middle of a run, and what comes after."""

from sparsedp.runs.checkpoint import read_checkpoint
from sparsedp_experiments.runs.execute import execute
from sparsedp_experiments.runs.settings import Settings


def test_ctrl_c_stops_between_two_steps_and_says_how_to_go_on(stopped):
    done, step = stopped
    assert done.code == 130
    assert "sparsedp train --resume run" in done.err
    assert "Traceback" not in done.err
    assert 0 < step < 8 * 22


def test_an_interrupted_run_resumes_to_the_weights_of_an_undisturbed_one(trained, tmp_path):
    folder, record = trained
    undisturbed = execute(Settings.from_json(record["config"]), out=tmp_path / "run")
    assert record["metrics"] == dict(undisturbed.metrics)
    assert record["epsilon_spent"] == undisturbed.ledger.epsilon
    resumed, whole = (read_checkpoint(run / "checkpoint.safetensors") for run in (folder, tmp_path / "run"))
    weights, expected = resumed.state["model"], whole.state["model"]
    assert weights.keys() == expected.keys()
    assert all((weights[name] == expected[name]).all() for name in weights)


def test_a_finished_run_is_not_taken_up_again(trained, typed):
    folder, record = trained
    before = (folder / "ledger.jsonl").read_bytes()
    done = typed("train", "--resume", folder)
    assert done.code == 0
    assert "is finished: every planned step is taken" in done.err
    assert typed("train", "--resume", folder, "--json").json["epsilon"] == record["epsilon"]
    assert (folder / "ledger.jsonl").read_bytes() == before
