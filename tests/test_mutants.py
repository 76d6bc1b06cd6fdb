"""The suite of planted leaks: what it says of itself, and that a leak whose text is gone does not pass for caught."""

from __future__ import annotations

import ast

import pytest
from mutants.mutant import Edit, StaleMutantError, all_mutants
from mutants.page import PAGE, updated


def test_the_table_of_leaks_on_the_page_is_the_suite():
    assert updated(PAGE.read_text(), all_mutants()) == PAGE.read_text()  # python -m mutants --docs


def test_there_are_forty_leaks_and_each_names_what_catches_it():
    mutants = all_mutants()
    assert len(mutants) >= 40
    assert all(one.caught_by and one.edits and one.leak for one in mutants)


def test_the_text_of_every_leak_stands_once_in_the_sources_and_its_tests_exist():
    root, stale = PAGE.parents[1], []
    for one in all_mutants():
        texts: dict[str, str] = {}
        for edit in one.edits:
            path = root / "src" / "sparsedp" / edit.file
            text = texts.get(edit.file) or (path.read_text() if path.is_file() else "")
            if text.count(edit.old) != 1:
                stale.append((one.name, edit.file))
            texts[edit.file] = text.replace(edit.old, edit.new)
        stale += [
            (one.name, f"{file} with it is not Python") for file, text in texts.items() if not _parses(text)
        ]
        for test in one.caught_by:
            file, _, name = test.partition("::")
            known = (root / file).read_text() if (root / file).is_file() else ""
            if f"def {name.partition('[')[0]}(" not in known:
                stale.append((one.name, test))
    assert stale == []


def _parses(text: str) -> bool:
    """Whether a leak leaves Python behind; if not, any test would fail and it would pass for caught."""
    try:
        ast.parse(text)
    except SyntaxError:
        return False
    return True


@pytest.mark.parametrize("text", ["nothing of the kind", "old old"])
def test_a_leak_whose_text_is_gone_or_there_twice_is_stale(tmp_path, text):
    file = tmp_path / "src" / "sparsedp" / "file.py"
    file.parent.mkdir(parents=True)
    file.write_text(text)
    with pytest.raises(StaleMutantError, match="expected once"):
        Edit("file.py", "old", "new").apply(tmp_path)
    assert file.read_text() == text


def test_an_edit_leaves_the_file_it_was_linked_from_alone(tmp_path):
    original, copy = tmp_path / "original.py", tmp_path / "src" / "sparsedp" / "file.py"
    original.write_text("an old line")
    copy.parent.mkdir(parents=True)
    copy.hardlink_to(original)
    Edit("file.py", "old", "new").apply(tmp_path)
    assert (copy.read_text(), original.read_text()) == ("an new line", "an old line")
