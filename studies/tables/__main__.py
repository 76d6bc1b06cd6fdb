"""The command: `python -m studies.tables` writes docs/results.md, what stands beside the records, and README's part.

With `--check` it writes nothing and exits with 1 if a file is out of date.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.readme import updated

from studies.tables.page import guide, over_all, page, side_files
from studies.tables.study import ROOT, Study, read_studies

PAGE = Path("docs") / "results.md"
GUIDE = Path("docs") / "fine-tuning.md"


def made_files(root: Path = ROOT, studies: Mapping[str, Study] | None = None) -> dict[Path, str]:
    """Every file made from records, by its place in the repository."""
    found = read_studies(root) if studies is None else studies
    files = {PAGE: page(found, root), **side_files(found), **over_all(found)}
    if (root / GUIDE).exists():
        files[GUIDE] = guide((root / GUIDE).read_text(encoding="utf-8"), found)
    readme = root / "README.md"
    if readme.exists():
        files[Path("README.md")] = updated(readme.read_text(encoding="utf-8"), root)
    return files


def out_of_date(root: Path = ROOT) -> list[Path]:
    """Files whose content is not what the records make, and files of records that are gone."""
    files = made_files(root)
    old = [path for path, text in files.items() if not _is(root / path, text)]
    return old + leftovers(root, files)


def leftovers(root: Path, files: Mapping[Path, str]) -> list[Path]:
    """Tables and pictures beside records that make none any more."""
    beside = [*root.glob("results/*/table.md"), *root.glob("results/*/figure.svg")]
    return [path.relative_to(root) for path in beside if path.relative_to(root) not in files]


def main(arguments: Sequence[str] | None = None) -> int:
    """Write every file, or say which are out of date."""
    parser = argparse.ArgumentParser(prog="python -m studies.tables", description=__doc__)
    parser.add_argument(
        "--check", action="store_true", help="write nothing; exit with 1 if a file is out of date"
    )
    given: Any = parser.parse_args(arguments)
    if given.check:
        old = out_of_date()
        for path in old:
            print(f"out of date: {path}; run make results")
        return int(bool(old))
    studies = read_studies()
    files = made_files(studies=studies)
    for path, text in files.items():
        if not _is(ROOT / path, text):
            (ROOT / path).parent.mkdir(parents=True, exist_ok=True)
            (ROOT / path).write_text(text, encoding="utf-8")
            print(f"wrote {path}")
    for path in leftovers(ROOT, files):
        (ROOT / path).unlink()
        print(f"removed {path}")
    for study in studies.values():
        if study.strangers:
            print(
                f"WARNING: {study.name}: {len(study.strangers)} records are of no run of its config; not used"
            )
    return 0


def _is(path: Path, text: str) -> bool:
    return path.exists() and path.read_text(encoding="utf-8") == text


if __name__ == "__main__":
    sys.exit(main())
