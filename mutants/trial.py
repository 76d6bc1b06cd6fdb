"""Tests on a copy of the sources, in a forked process: what is heavy to import is imported once, before the fork."""

from __future__ import annotations

import os
import sys
import time
import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import final

LIMIT = 60
"""Seconds a single test may take."""


@final
@dataclass(frozen=True, slots=True)
class Outcome:
    """How tests ended: pytest's exit code, seconds, the tests that failed, and all that was printed."""

    code: int
    seconds: float
    failed: tuple[str, ...]
    output: str


def import_what_is_heavy() -> None:
    """Third-party packages only: `sparsedp` itself must come from the copy."""
    os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_FP16")  # as tests/conftest.py
    import dp_accounting  # noqa: F401
    import hypothesis  # noqa: F401
    import numpy  # noqa: F401
    import pytest  # noqa: F401
    import safetensors.torch  # noqa: F401
    import scipy.optimize
    import scipy.special
    import scipy.stats  # noqa: F401
    import torch
    import torch.func
    import torch.utils.data

    torch.set_num_threads(1)
    assert not any(name.split(".")[0] == "sparsedp" for name in sys.modules)


def start(root: Path, tests: Sequence[str]) -> int:
    """Fork a process that runs tests in a copy of the repository; gives its id."""
    child = os.fork()
    if child:
        return child
    code = 70
    try:
        code = _run(root, tests)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def finish(root: Path, status: int, began: float) -> Outcome:
    """What a process that ended said."""
    output = (root / "output.txt").read_text(errors="replace")
    failed = tuple(
        line.split(" ")[1] for line in output.splitlines() if line.startswith(("FAILED ", "ERROR "))
    )
    return Outcome(os.waitstatus_to_exitcode(status), time.monotonic() - began, failed, output)


def _run(root: Path, tests: Sequence[str]) -> int:
    file = os.open(root / "output.txt", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(file, 1)
    os.dup2(file, 2)
    os.chdir(root)
    places = [str(root / "src"), str(root)]
    sys.path[:0] = places
    os.environ["PYTHONPATH"] = os.pathsep.join(places)
    os.environ["SPARSEDP_CACHE"] = str(root / "cache")
    import pytest

    options = [
        "-x",
        "-q",
        "-rfE",
        "--tb=short",
        "-p",
        "no:cacheprovider",
        "-p",
        "no:xdist",
        f"--timeout={LIMIT}",
    ]
    options += ["-W", "ignore::pytest.PytestAssertRewriteWarning"]  # hypothesis was imported before the fork
    return int(pytest.main([*options, *tests]))
