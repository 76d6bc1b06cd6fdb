"""The sources keep their shape: one meaning a name, one place for a file's name, few arguments, short recipes."""

import pytest

from house_counts import RUN_FILES, House, body_lines

HOUSE = House()
IMPORTERS = HOUSE.importers()

DOORS = {
    "auditing/audit.py audit",
    "cli/audit.py audit",
    "cli/compare.py compare",
    "cli/plan.py plan",
    "cli/sweep.py sweep",
    "cli/train.py train",
    "diagnostics/diagnose.py diagnose_nonprivate",
    "federated/server.py __init__",
    "own_loop/make_private.py make_private",
    "sklearn/classifier.py __init__",
    "training/fit.py fit",
    "training/trainer.py __init__",
}
"""What users call by keywords, where an argument is its own documentation."""
BY_ONE = {
    "privacy/mechanism.py _mean": 9,
    "privacy/mechanism.py private_mean": 9,
    "privacy/mechanism.py privatize": 9,
}
"""Not doors, and one argument over: the mechanism takes everything by name."""


def test_a_class_name_has_one_meaning():
    assert not {name: files for name, files in HOUSE.classes().items() if len(files) > 1}


@pytest.mark.parametrize("name", [*RUN_FILES, "nonprivate.json"])
def test_one_file_knows_the_name_of_a_runs_file(name):
    assert HOUSE.spelling(name) == {"runs/folder.py"}


def test_only_doors_have_more_than_eight_arguments():
    many = HOUSE.with_many_arguments()
    assert {name: count for name, count in many.items() if name not in DOORS} == BY_ONE
    assert set(many) >= DOORS


def test_a_functions_body_has_at_most_sixty_lines():
    assert not {f"{name} {node.name}" for name, node in HOUSE.functions() if body_lines(node) > 60}


def test_a_setting_of_the_plan_touches_the_spec_fit_and_the_settings_files():
    assert HOUSE.spelling("selection_budget") == {
        "methods/plan_config.py",
        "training/fit.py",
        "experiments/settings.py",
    }


@pytest.mark.parametrize("name", ["clicks", "ratings", "zipf"])
def test_a_data_set_touches_its_own_file_and_the_table(name):
    assert IMPORTERS[f"datasets/{name}.py"] == {"datasets/table.py"}


def test_a_command_touches_its_own_file_and_the_list():
    commands = {file for file in HOUSE.trees if file.startswith("cli/")}
    helpers = {"__init__", "app", "options", "output", "running"}
    for file in commands - {f"cli/{name}.py" for name in helpers}:
        shown_again = {"cli/demo.py"} if file == "cli/compare.py" else set()
        assert IMPORTERS[file] == {"cli/app.py"} | shown_again, file


def test_a_layer_touches_its_own_file_and_the_table():
    assert IMPORTERS["grad_sample/layers/norm.py"] == {"grad_sample/layers/table.py"}
