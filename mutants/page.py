"""The table of planted leaks in docs/audit.md."""

from __future__ import annotations

from collections.abc import Sequence

from mutants.mutant import Mutant
from mutants.sandbox import ROOT

PAGE = ROOT / "docs" / "audit.md"
BEGIN, END = "<!-- mutants: made by `python -m mutants --docs` -->", "<!-- end of mutants -->"


def table(mutants: Sequence[Mutant]) -> str:
    """Every leak with what catches it."""
    rows = [f"| {one.leak} | `{one.edits[0].file}` | {_tests(one)} |" for one in mutants]
    head = f"{len(mutants)} leaks, all caught.\n\n| leak | planted in | caught by |\n|---|---|---|"
    return "\n".join([head, *rows])


def updated(text: str, mutants: Sequence[Mutant]) -> str:
    """The page with its table made anew."""
    before, _, rest = text.partition(BEGIN)
    _, mark, after = rest.partition(END)
    assert mark, f"{PAGE} has no place for the table ({BEGIN} ... {END})"
    return f"{before}{BEGIN}\n{table(mutants)}\n{END}{after}"


def update(mutants: Sequence[Mutant]) -> None:
    """Write it."""
    PAGE.write_text(updated(PAGE.read_text(), mutants))


def _tests(one: Mutant) -> str:
    names = (test.partition("::")[2].partition("[")[0].replace("_", " ") for test in one.caught_by)
    return "; ".join(dict.fromkeys(name.removeprefix("test ") for name in names))
