"""Copies of the repository to spoil: hard links, so that making one takes a moment."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PARTS = (
    "src",
    "tests",
    "benchmarks",
    "experiments",
    "docs",
    "README.md",
    "CHANGELOG.md",
    "pyproject.toml",
)


def make_sandbox(folder: Path) -> Path:
    """A copy of what tests need, in a new folder."""
    folder.mkdir(parents=True)
    for part in PARTS:
        source = ROOT / part
        if source.is_dir():
            shutil.copytree(source, folder / part, copy_function=_link)
        elif source.is_file():
            _link(source, folder / part)
    return folder


def _link(source: str | Path, target: str | Path) -> str:
    try:
        os.link(source, target)
    except OSError:  # another file system
        shutil.copy2(source, target)
    return str(target)
