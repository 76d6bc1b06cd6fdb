"""The shape of the sources, counted from their syntax; `python tests/house_counts.py [folder]` prints it.

A file's importers are the modules of the package that name it in an import statement, wherever that stands. Arguments
are counted without `self`; lines of a function's body without its signature and docstring. What is spelled where is
looked for in names, arguments, keywords, attributes and strings, parts of longer ones too, but not in docstrings or
comments.
"""

from __future__ import annotations

import ast
import sys
from collections import defaultdict
from collections.abc import Iterator
from functools import cached_property
from pathlib import Path
from statistics import median

SOURCE = Path(__file__).parents[1] / "src" / "sparsedp"
RUN_FILES = ("plan.json", "ledger.jsonl", "checkpoint.safetensors", "metrics.jsonl", "record.json")
Function = ast.FunctionDef | ast.AsyncFunctionDef


class House:
    """All modules of a package, parsed."""

    def __init__(self, source: Path = SOURCE) -> None:
        self.source = source
        self.trees = {
            str(file.relative_to(source)): ast.parse(file.read_text(encoding="utf-8"))
            for file in sorted(source.rglob("*.py"))
        }

    def lines(self) -> dict[str, int]:
        """How many each file has."""
        return {
            name: len((self.source / name).read_text(encoding="utf-8").splitlines()) for name in self.trees
        }

    def importers(self) -> dict[str, set[str]]:
        """By file, the files that import it."""
        modules = {_module(name): name for name in self.trees}
        found: dict[str, set[str]] = defaultdict(set)
        for name, tree in self.trees.items():
            for module in _imported(tree):
                if module in modules:
                    found[modules[module]].add(name)
                elif module.rpartition(".")[0] in modules:
                    found[modules[module.rpartition(".")[0]]].add(name)
        return found

    def functions(self) -> Iterator[tuple[str, Function]]:
        """Every function, with its file."""
        for name, tree in self.trees.items():
            for node in ast.walk(tree):
                if isinstance(node, Function):
                    yield name, node

    def with_many_arguments(self, most: int = 8) -> dict[str, int]:
        """Functions that have more, and how many."""
        found = {f"{name} {node.name}": _count_arguments(node) for name, node in self.functions()}
        return {name: count for name, count in found.items() if count > most}

    def classes(self) -> dict[str, list[str]]:
        """The files that define a class of some name."""
        found = defaultdict(list)
        for name, tree in self.trees.items():
            for node in ast.walk(tree):
                if isinstance(node, ast.ClassDef):
                    found[node.name].append(name)
        return found

    def spelling(self, word: str) -> set[str]:
        """The files that spell a word, or a longer one with it."""
        return {name for name, words in self.words.items() if any(word in said for said in words)}

    @cached_property
    def words(self) -> dict[str, set[str]]:
        """What each file spells."""
        return {name: set(_words(tree)) for name, tree in self.trees.items()}


def body_lines(node: Function) -> int:
    """Lines of a function's body."""
    body = node.body[1:] if ast.get_docstring(node) is not None else node.body
    return (body[-1].end_lineno or 0) - body[0].lineno + 1 if body else 0


def _module(name: str) -> str:
    return ".".join(["sparsedp", *Path(name).with_suffix("").parts]).removesuffix(".__init__")


def _imported(tree: ast.Module) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)


def _count_arguments(node: Function) -> int:
    given = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
    return len([argument for argument in given if argument.arg not in ("self", "cls")])


def _words(tree: ast.Module) -> Iterator[str]:
    said = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    for node in ast.walk(tree):
        match node:
            case ast.Constant(value=str(text)) if id(node) not in said:
                yield text
            case ast.Name(id=word) | ast.arg(arg=word) | ast.Attribute(attr=word):
                yield word
            case ast.keyword(arg=str(word)):
                yield word


def counts(source: Path) -> Iterator[str]:
    """The counts, a line each."""
    house = House(source)
    lines, importers = house.lines(), house.importers()
    alone = [name for name in house.trees if len(importers[name]) == 1]
    yield f"files {len(lines)}, lines {sum(lines.values())}, median {median(lines.values()):g}"
    yield f"files with exactly one importer: {len(alone)} ({len(alone) / len(lines):.0%})"
    yield f"functions with more than eight arguments: {house.with_many_arguments()}"
    bodies = sorted((body_lines(node), f"{name} {node.name}") for name, node in house.functions())
    yield f"longest bodies: {bodies[-3:]}"
    yield f"files over 300 lines: {[name for name, count in lines.items() if count > 300]}"
    for word in ("warmup_fraction", "selection_budget", "ema_decay", *RUN_FILES):
        yield f"files that spell {word}: {sorted(house.spelling(word))}"
    packages: dict[str, list[int]] = defaultdict(list)
    for name, count in lines.items():
        packages[name.split("/")[0]].append(count)
    yield from (
        f"{name}: {len(each)} files, {sum(each)} lines" for name, each in packages.items() if len(each) > 1
    )


if __name__ == "__main__":
    told = Path(sys.argv[1]) if len(sys.argv) > 1 else SOURCE
    sys.stdout.writelines(f"{line}\n" for line in counts(told))
