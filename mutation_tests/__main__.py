"""Plant every leak in a copy of the sources, run the tests named for it, and say which were caught."""

from __future__ import annotations

import argparse
import os
import shutil
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator, Sequence
from pathlib import Path

from mutation_tests.leaks import ROOT, Leak, StaleLeakError, read_leaks

HONEST = "honest code"
PARTS = (
    "src",
    "tests",
    "benchmarks",
    "experiments",
    "docs",
    "README.md",
    "CHANGELOG.md",
    "pyproject.toml",
    "conftest.py",
)
SECONDS_PER_TEST = 90
TESTS_FAILED = 1

Outcome = tuple[int, float, str]
"""pytest's exit code, seconds, and what was printed."""


def main() -> int:
    """Run, report, and fail if one got away."""
    parser = argparse.ArgumentParser(prog="python -m mutation_tests", description=__doc__)
    parser.add_argument("--only", help="leaks whose name contains this")
    parser.add_argument("--workers", type=int, default=len(os.sched_getaffinity(0)), help="processes at once")
    parser.add_argument(
        "--check", action="store_true", help="look that functions, texts and tests exist, and run nothing"
    )
    arguments = parser.parse_args()
    leaks = [leak for leak in read_leaks() if not arguments.only or arguments.only in leak.name]
    stale = [(leak.name, reason) for leak in leaks if (reason := why_stale(leak)) is not None]
    for name, reason in stale:
        print(f"STALE   {name}: {reason}", flush=True)
    if arguments.check:
        print(f"{len(leaks)} leaks, {len(stale)} stale")
        return bool(stale)
    leaks = [leak for leak in leaks if leak.name not in dict(stale)]
    began = time.monotonic()
    import_what_is_heavy()
    with tempfile.TemporaryDirectory(prefix="leaks-") as folder:
        results = {name: judge(name, found) for name, found in run(Path(folder), leaks, arguments.workers)}
        for leak in [leak for leak in leaks if not results[leak.name]]:
            print(f"again   {leak.name}: a statistical test may miss once", flush=True)
            again = run(Path(folder) / "again", [leak], 1, honest=False)
            results |= {name: judge(name, found) for name, found in again}
    honest = results.pop(HONEST)
    caught = sum(results.values())
    print(
        f"{time.monotonic() - began:.0f} s{'' if honest else '; the tests fail on honest code, so nothing is shown'}"
    )
    print(f"{caught} caught, {len(leaks) - caught} missed, {len(stale)} stale")
    return 0 if honest and not stale and caught == len(leaks) else 1


def why_stale(leak: Leak) -> str | None:
    """Why a leak cannot be planted, or None."""
    try:
        leak.tests()
        for edit in leak.edits:
            edit.place(ROOT)
    except (StaleLeakError, SyntaxError) as error:
        return str(error)
    return None


def run(
    folder: Path, leaks: Sequence[Leak], workers: int, honest: bool = True
) -> Iterator[tuple[str, Outcome]]:
    """The outcome of each leak as it comes and, where `honest`, of all their tests on the code as it is."""
    tests = list(dict.fromkeys(test for leak in leaks for test in leak.tests()))
    waiting: list[tuple[str, Leak | None]] = [(HONEST, None)] if honest else []
    waiting += [(leak.name, leak) for leak in leaks]
    running: dict[int, tuple[str, Path, float]] = {}
    while waiting or running:
        while waiting and len(running) < workers:
            name, leak = waiting.pop(0)
            copy = copy_sources(folder / name.replace(" ", "-"))
            for edit in leak.edits if leak else ():
                edit.apply(copy)
            running[start(copy, leak.tests() if leak else tests)] = (name, copy, time.monotonic())
        child, status = os.wait()
        name, copy, began = running.pop(child)
        output = (copy / "output.txt").read_text(errors="replace")
        yield name, (os.waitstatus_to_exitcode(status), time.monotonic() - began, output)
        shutil.rmtree(copy, ignore_errors=True)


def judge(name: str, found: Outcome) -> bool:
    """Say how it went. Caught means that a test failed, not that nothing ran."""
    code, seconds, output = found
    good = code == (0 if name == HONEST else TESTS_FAILED)
    word = ("ok" if name == HONEST else "caught") if good else "MISSED" if code == 0 else "BROKEN"
    failed = [line.split(" ")[1] for line in output.splitlines() if line.startswith(("FAILED ", "ERROR "))]
    print(f"{word:7} {name} ({seconds:.1f} s){f'  by {failed[0]}' if good and failed else ''}", flush=True)
    if not good:
        print(output[-4000:], flush=True)
    return good


def copy_sources(folder: Path) -> Path:
    """A copy of what tests need, by hard links: it takes a moment."""
    folder.mkdir(parents=True)
    for part in PARTS:
        if (ROOT / part).is_dir():
            shutil.copytree(
                ROOT / part,
                folder / part,
                copy_function=link,
                ignore=shutil.ignore_patterns("__pycache__", "results"),
            )
        elif (ROOT / part).is_file():
            link(ROOT / part, folder / part)
    return folder


def link(source: str | Path, target: str | Path) -> str:
    """A hard link, or a copy on another file system."""
    try:
        os.link(source, target)
    except OSError:
        shutil.copy2(source, target)
    return str(target)


def import_what_is_heavy() -> None:
    """Import third-party packages once, before processes are forked. `sparsedp` itself must come from the copy."""
    os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_FP16")  # as conftest.py
    import dp_accounting  # noqa: F401
    import hypothesis  # noqa: F401
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


def start(copy: Path, tests: Sequence[str]) -> int:
    """Fork a process that runs tests in a copy of the sources; its id."""
    child = os.fork()
    if child:
        return child
    code = 70
    try:
        file = os.open(copy / "output.txt", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(file, 1)
        os.dup2(file, 2)
        os.chdir(copy)
        places = [str(copy / "src"), str(copy / "experiments"), str(copy)]
        sys.path[:0] = places
        os.environ |= {"PYTHONPATH": os.pathsep.join(places), "SPARSEDP_CACHE": str(copy / "cache")}
        import pytest

        options = ["-x", "-q", "-rfE", "--tb=short", "-p", "no:cacheprovider", "-p", "no:xdist"]
        options += [f"--timeout={SECONDS_PER_TEST}", "-W", "ignore::pytest.PytestAssertRewriteWarning"]
        code = int(pytest.main([*options, *tests]))
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


if __name__ == "__main__":
    sys.exit(main())
