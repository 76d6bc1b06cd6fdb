"""The command: `python -m sparsedp_experiments.pages` writes experiments/RESULTS.md and README's part.

With `--check` it writes nothing and exits with 1 if a file is out of date.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.readme import updated

from sparsedp_experiments.pages.page import guide, page
from sparsedp_experiments.pages.study import ROOT, Study, read_studies

PAGE = Path("experiments") / "RESULTS.md"
GUIDE = Path("docs") / "fine-tuning.md"


def made_files(root: Path = ROOT, studies: Mapping[str, Study] | None = None) -> dict[Path, str]:
    """Every file made from records, by its place in the repository."""
    found = read_studies(root) if studies is None else studies
    files = {PAGE: page(found, root)}
    if (root / GUIDE).exists():
        files[GUIDE] = guide((root / GUIDE).read_text(encoding="utf-8"), found)
    readme = root / "README.md"
    if readme.exists():
        files[Path("README.md")] = updated(readme.read_text(encoding="utf-8"), root)
    return files


def out_of_date(root: Path = ROOT) -> list[Path]:
    """Files whose content is not what the records make."""
    return [path for path, text in made_files(root).items() if not _is(root / path, text)]


def main(arguments: Sequence[str] | None = None) -> int:
    """Write every file, or say which are out of date."""
    parser = argparse.ArgumentParser(prog="python -m sparsedp_experiments.pages", description=__doc__)
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
    for study in studies.values():
        if study.stale:
            print(f"WARNING: {study.name}: {len(study.stale)} records are of no run of its config; not used")
    return 0


def _is(path: Path, text: str) -> bool:
    return path.exists() and path.read_text(encoding="utf-8") == text


if __name__ == "__main__":
    sys.exit(main())
