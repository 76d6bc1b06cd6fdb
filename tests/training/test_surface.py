"""The public names: few, documented, and cheap to import."""

from __future__ import annotations

import ast
import inspect
import subprocess
import sys
from pathlib import Path

import sparsedp


def test_every_public_name_resolves_to_something_documented() -> None:
    assert len(sparsedp.__all__) <= 33
    for name in sparsedp.__all__:
        value = getattr(sparsedp, name)
        assert inspect.getdoc(value), name
        assert name in dir(sparsedp)


def test_the_names_for_type_checkers_are_the_names_at_run_time() -> None:
    tree = ast.parse(Path(sparsedp.__file__).read_text())
    typed = {
        (alias.name, node.module)
        for block in tree.body
        if isinstance(block, ast.If)
        for node in block.body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }
    assert typed == set(sparsedp._HOMES.items())


def test_importing_the_package_loads_nothing_heavy() -> None:
    check = (
        "import sys, sparsedp; print([m for m in ('torch', 'rich') if m in sys.modules]);"
        "sparsedp.fit; print([m for m in ('dp_accounting', 'sklearn', 'scipy', 'matplotlib') if m in sys.modules]);"
        "print(sparsedp.sklearn.SparseDPClassifier.__name__)"
    )
    done = subprocess.run([sys.executable, "-c", check], capture_output=True, text=True, check=True)
    assert done.stdout.split("\n")[:3] == ["[]", "[]", "SparseDPClassifier"]


def test_training_needs_no_data_set_and_the_command_line_no_torch_until_it_is_asked_something() -> None:
    check = (
        "import sys; import sparsedp.cli; print('torch' in sys.modules); import sparsedp.training.fit;"
        "print([m for m in sys.modules if m == 'PIL' or m.startswith('sparsedp_experiments')])"
    )
    done = subprocess.run([sys.executable, "-c", check], capture_output=True, text=True, check=True)
    assert done.stdout.split("\n")[:2] == ["False", "[]"]


def test_an_unknown_name_is_an_attribute_error() -> None:
    assert not hasattr(sparsedp, "no_such_thing")
