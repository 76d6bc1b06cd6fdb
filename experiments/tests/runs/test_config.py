"""Experiment files: the grid they make, and what they refuse."""

import pytest

from sparsedp.errors import SparseDPError
from sparsedp_experiments.runs.grid import committed_families, parse_experiment, read_experiment


def experiment(**content):
    return parse_experiment({"base": {"dataset": "digits"}, **content}, "x")


def test_runs_are_the_product_of_the_axes_with_seeds_outermost():
    runs = experiment(seeds=2, grid={"epsilon": [1, 3.5], "method": ["dp-sgd", "tp-topk"]}).runs()
    seen = [(run.seed, run.settings.epsilon, run.settings.method) for run in runs]
    cells = [(1.0, "dp-sgd"), (1.0, "tp-topk"), (3.5, "dp-sgd"), (3.5, "tp-topk")]
    assert seen == [(seed, *cell) for seed in (0, 1) for cell in cells]
    assert all(run.settings.seed == run.seed for run in runs)
    assert runs[2].cell == {"epsilon": "3.5", "method": "dp-sgd"}
    assert len({run.name for run in runs}) == len(runs)
    assert all(set(run.name) <= set("abcdefghijklmnopqrstuvwxyz0123456789-_.") for run in runs)


def test_a_named_axis_changes_several_settings_at_once():
    tasks = [
        {"name": "small", "epochs": 1, "lr": 0.5},
        {"name": "large model", "model_options": {"hidden": [9]}},
    ]
    small, large = experiment(grid={"task": tasks}).runs()
    assert (small.settings.epochs, small.settings.lr) == (1, 0.5)
    assert large.settings.model_options.plain() == {"hidden": [9]}
    assert large.cell == {"task": "large model"}


def test_overrides_apply_where_they_match_and_later_ones_win():
    rules = [
        {"where": {"method": ["tp-topk", "tp-rand"]}, "set": {"lr": 1.0, "epochs": 2}},
        {"where": {"method": "tp-topk", "epsilon": 3.0}, "set": {"lr": 2.0}},
    ]
    grid = {"epsilon": [1, 3], "method": ["dp-sgd", "tp-rand", "tp-topk"]}
    runs = experiment(grid=grid, override=rules).runs()
    found = {tuple(run.cell.values()): (run.settings.lr, run.settings.epochs) for run in runs}
    assert found["1", "dp-sgd"] == (0.5, 30)
    assert found["3", "tp-rand"] == (1.0, 2)
    assert found["1", "tp-topk"] == (1.0, 2)
    assert found["3", "tp-topk"] == (2.0, 2)


def test_skipped_cells_are_left_out():
    grid = {"epsilon": [1, 3], "method": ["dp-sgd", "tp-topk"]}
    runs = experiment(grid=grid, skip=[{"where": {"method": "dp-sgd", "epsilon": 1}}]).runs()
    assert [tuple(run.cell.values()) for run in runs] == [("1", "tp-topk"), ("3", "dp-sgd"), ("3", "tp-topk")]


def test_a_longer_sweep_keeps_the_runs_of_a_shorter_one():
    short = experiment(seeds=1, grid={"method": ["dp-sgd"]}).runs()
    more = experiment(seeds=[0, 7], grid={"method": ["tp-rand", "dp-sgd"]}).runs()
    assert {run.name for run in short} < {run.name for run in more}


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ({"epochs": 3}, r"belong under \[base\]"),
        ({"axes": {}}, "expected some of title"),
        ({"base": {"dataset": "digits", "epoch": 3}}, "did you mean 'epochs'"),
        ({"base": {}}, "dataset: not given"),
        ({"base": {"dataset": "digitz"}}, "digitz"),
        ({"base": []}, r"\[base\]"),
        ({"seeds": 0}, "seeds"),
        ({"seeds": [1, 1]}, "seeds"),
        ({"seeds": 1.5}, "seeds"),
        ({"seeds": True}, "seeds"),
        ({"grid": {"method": "dp-sgd"}}, "expected a list"),
        ({"grid": {"method": []}}, "at least one"),
        ({"grid": {"method": ["dp-sgd", "dp-sgd"]}}, "every value once"),
        ({"grid": {"method": ["dp-sgd", "sgd"]}}, "sgd, seed 0: method: got 'sgd'"),
        ({"grid": {"epsilon": [1, "x"]}}, "epsilon: got 'x'"),
        ({"grid": {"task": [1, 2]}}, "tables with a name"),
        ({"grid": {"task": [{"name": "a", "speed": 1}]}}, "no setting 'speed'"),
        ({"grid": {"task": [{"name": "a"}, {"name": "b"}]}}, "the same run"),
        ({"grid": {"epsilon": [1]}, "override": [{"where": {"delta": 1}, "set": {}}]}, "an axis of the grid"),
        ({"grid": {"epsilon": [1]}, "override": [{"where": {"epsilon": 2}, "set": {}}]}, "expected one of"),
        ({"grid": {"epsilon": [1]}, "override": [{"where": {"epsilon": 1}}]}, "expected the tables"),
        ({"grid": {"epsilon": [1]}, "override": {"where": {}}}, r"\[\[override\]\]"),
        ({"grid": {"epsilon": [1]}, "skip": [{"where": {"epsilon": 1}, "set": {}}]}, "skip"),
        ({"grid": {"method": ["tp-topk"]}, "contrast": {"baseline": "dp-sgd"}}, "contrast"),
        ({"contrast": {"on": "method"}}, "contrast"),
    ],
)
def test_a_mistake_in_a_file_is_named(content, words):
    with pytest.raises(SparseDPError, match=words):
        experiment(**content).runs()


def test_a_file_that_is_not_toml_is_named(tmp_path):
    (tmp_path / "bad.toml").write_text("[base\n")
    with pytest.raises(SparseDPError, match=r"bad\.toml: not TOML"):
        read_experiment(tmp_path / "bad.toml")
    with pytest.raises(SparseDPError, match="cannot be read"):
        read_experiment(tmp_path / "none.toml")


def test_a_mistake_in_a_file_says_which_file(tmp_path):
    (tmp_path / "small.toml").write_text('[base]\ndataset = "digits"\nepoch = 3\n')
    with pytest.raises(SparseDPError, match=r"small\.toml: there is no setting 'epoch'"):
        read_experiment(tmp_path / "small.toml")


@pytest.mark.parametrize("name", sorted(committed_families()))
def test_every_committed_config_is_valid(name):
    runs = read_experiment(name).runs()
    assert runs
    assert len({run.name for run in runs}) == len(runs)
