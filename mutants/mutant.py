"""A planted leak: what is wrong, the text that makes it so, and what must notice."""

from __future__ import annotations

import importlib
import pkgutil
from dataclasses import dataclass
from pathlib import Path
from typing import final


class StaleMutantError(Exception):
    """A mutant whose text is no longer in the sources."""


@final
@dataclass(frozen=True, slots=True)
class Edit:
    """Text in a file below `src/sparsedp`, which must stand there exactly once, and what replaces it."""

    file: str
    old: str
    new: str

    def apply(self, root: Path) -> None:
        """Change the file in a copy of the repository.

        Raises:
            StaleMutantError: the text is not there, or more than once.
        """
        path = root / "src" / "sparsedp" / self.file
        text = path.read_text(encoding="utf-8") if path.is_file() else ""
        found = text.count(self.old)
        if found != 1:
            raise StaleMutantError(f"{self.file} holds {found} times, expected once: {self.old!r}")
        path.unlink()  # a hard link to the real file: never written through
        path.write_text(text.replace(self.old, self.new), encoding="utf-8")


@final
@dataclass(frozen=True, slots=True)
class Mutant:
    """One leak.

    Attributes:
        name: short, unique.
        leak: what is wrong, in words.
        edits: how the sources say so.
        caught_by: the fastest tests that notice; at least one of them must fail.
    """

    name: str
    leak: str
    edits: tuple[Edit, ...]
    caught_by: tuple[str, ...]


def mutant(name: str, leak: str, file: str, old: str, new: str, *caught_by: str) -> Mutant:
    """A leak that takes one edit."""
    return Mutant(name, leak, (Edit(file, old, new),), caught_by)


def all_mutants() -> list[Mutant]:
    """Every planted leak, in the order of the files that list them."""
    from mutants import leaks

    found: list[Mutant] = []
    for module in pkgutil.iter_modules(leaks.__path__):
        found += importlib.import_module(f"mutants.leaks.{module.name}").MUTANTS
    names = [one.name for one in found]
    assert len(set(names)) == len(names), "two mutants have one name"
    return found
