"""The list of planted leaks holds, and a leak that cannot be planted does not pass for caught."""

import pytest
from mutation_tests.__main__ import why_stale
from mutation_tests.leaks import Edit, StaleLeakError, read_leaks

LEAKS = read_leaks()


def test_leaks_have_names_of_their_own():
    assert len({leak.name for leak in LEAKS}) == len(LEAKS) >= 40


@pytest.mark.parametrize("leak", LEAKS, ids=lambda leak: leak.name)
def test_leak_can_be_planted_and_names_tests_that_exist(leak):
    assert why_stale(leak) is None


@pytest.mark.parametrize("body", ["return 'neither'", "return 'old', 'old'"])
def test_edit_of_text_that_is_gone_or_there_twice_is_stale(tmp_path, body):
    file = tmp_path / "src" / "sparsedp" / "file.py"
    file.parent.mkdir(parents=True)
    file.write_text(f"def f():\n    {body}\n\n\ndef g():\n    return 'old'\n")
    with pytest.raises(StaleLeakError, match="expected once"):
        Edit("f", "old", "new").apply(tmp_path)
    assert "new" not in file.read_text()


def test_edit_changes_the_named_function_of_a_copy_and_not_the_file_it_is_linked_to(tmp_path):
    original, copy = tmp_path / "original.py", tmp_path / "src" / "sparsedp" / "file.py"
    original.write_text("def f():\n    return 'old'\n\n\ndef g():\n    return 'old'\n")
    copy.parent.mkdir(parents=True)
    copy.hardlink_to(original)
    Edit("g", "old", "new").apply(tmp_path)
    assert copy.read_text() == original.read_text().replace("'old'\n", "'new'\n").replace("'new'", "'old'", 1)
