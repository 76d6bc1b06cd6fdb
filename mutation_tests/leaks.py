"""The list of planted leaks: what each is, in which function it is planted, and which tests catch it.

`leaks.toml` names functions (`Plan.spends`) and tests (`test_golden_values`), not files or lines, so entries
survive moves. A name that is not unique is written `module:name`, for example `privacy.plan:_check` or
`test_plan:test_golden_values`.
"""

from __future__ import annotations

import ast
import functools
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import final

ROOT = Path(__file__).resolve().parents[1]
FILE = Path(__file__).with_name("leaks.toml")


class StaleLeakError(Exception):
    """A leak whose function, text or test is gone."""


@final
@dataclass(frozen=True, slots=True)
class Edit:
    """Text that stands exactly once in one function, class or module of the library, and its replacement."""

    function: str
    old: str
    new: str

    def place(self, root: Path) -> tuple[Path, str, int]:
        """The file, its text, and where the old text begins.

        Raises:
            StaleLeakError: no function of that name, or the text is not in it exactly once.
        """
        file, first, last = _find(root / "src" / "sparsedp", self.function)
        text = file.read_text(encoding="utf-8")
        lines = text.splitlines(keepends=True)
        start = sum(len(line) for line in lines[:first])
        body = "".join(lines[first:last])
        if body.count(self.old) != 1:
            raise StaleLeakError(
                f"{self.function} holds {body.count(self.old)} times, expected once: {self.old!r}"
            )
        return file, text, start + body.index(self.old)

    def apply(self, root: Path) -> None:
        """Change the file in a copy of the repository, never the file it may be linked to."""
        file, text, at = self.place(root)
        changed = text[:at] + self.new + text[at + len(self.old) :]
        ast.parse(changed)
        file.unlink()
        file.write_text(changed, encoding="utf-8")


@final
@dataclass(frozen=True, slots=True)
class Leak:
    """One leak. At least one of the tests in `caught_by` must fail when it is planted."""

    name: str
    leak: str
    edits: tuple[Edit, ...]
    caught_by: tuple[str, ...]

    def tests(self, root: Path = ROOT) -> list[str]:
        """The tests as pytest takes them."""
        return [_test_id(root / "tests", test) for test in self.caught_by]


def read_leaks(file: Path = FILE) -> list[Leak]:
    """All planted leaks."""
    entries = tomllib.loads(file.read_text(encoding="utf-8"))["leak"]
    return [
        Leak(
            e["name"],
            e["leak"],
            tuple(Edit(x["function"], x["old"], x["new"]) for x in e["edit"]),
            tuple(e["caught_by"]),
        )
        for e in entries
    ]


def _find(package: Path, function: str) -> tuple[Path, int, int]:
    """The file and the span of lines of a function, class or module."""
    module, _, name = function.rpartition(":")
    found = []
    for file in sorted(package.rglob("*.py")):
        dotted = ".".join(file.relative_to(package).with_suffix("").parts)
        if module and dotted != module:
            continue
        if name == "*":
            return file, 0, len(file.read_text(encoding="utf-8").splitlines())
        found += [
            (file, first, last)
            for known, first, last in _functions(file, file.stat().st_mtime_ns)
            if known == name
        ]
    if len(found) != 1:
        raise StaleLeakError(f"{function}: found {len(found)} functions of that name, expected one")
    return found[0]


@functools.cache
def _functions(file: Path, changed: int) -> tuple[tuple[str, int, int], ...]:
    def walk(node: ast.AST, prefix: str) -> Iterator[tuple[str, int, int]]:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.FunctionDef | ast.ClassDef | ast.AsyncFunctionDef):
                name = f"{prefix}{child.name}"
                first = min([child.lineno, *(d.lineno for d in child.decorator_list)]) - 1
                yield name, first, child.end_lineno or child.lineno
                yield from walk(child, f"{name}.")
            else:
                yield from walk(child, prefix)

    return tuple(walk(ast.parse(file.read_text(encoding="utf-8")), ""))


def _test_id(tests: Path, test: str) -> str:
    """`path::name[parameters]` of a test given as `name[parameters]` or `file:name[parameters]`."""
    bare, bracket, parameters = test.partition("[")
    module, _, name = bare.rpartition(":")
    files = [
        file
        for file in sorted(tests.rglob("test_*.py"))
        if (not module or file.stem == module)
        and any(known == name for known, _, _ in _functions(file, file.stat().st_mtime_ns))
    ]
    if len(files) != 1:
        raise StaleLeakError(f"{test}: found {len(files)} tests of that name, expected one")
    return f"{files[0].relative_to(tests.parent)}::{name}{bracket}{parameters}"
