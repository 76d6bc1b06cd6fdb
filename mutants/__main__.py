"""Plant every leak, run what must notice, and say which were caught."""

from __future__ import annotations

import argparse
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from mutants.mutant import Mutant, StaleMutantError, all_mutants
from mutants.page import update
from mutants.sandbox import make_sandbox
from mutants.trial import Outcome, finish, import_what_is_heavy, start

HONEST = "honest code"
TESTS_FAILED = 1


def main() -> int:
    """Run, report, and fail if one got away."""
    arguments = _arguments()
    chosen = [one for one in all_mutants() if not arguments.only or arguments.only in one.name]
    if arguments.docs:
        update(chosen)
        return 0
    began = time.monotonic()
    import_what_is_heavy()
    with tempfile.TemporaryDirectory(prefix="mutants-") as folder:
        verdicts = _run(Path(folder), chosen, arguments.workers, arguments.verbose)
        for one in [one for one in chosen if not verdicts[one.name]]:
            print(f"again   {one.name}: a statistical test may miss once, a process may die", flush=True)
            verdicts |= {
                name: good
                for name, good in _run(Path(folder) / "again", [one], 1, True).items()
                if name != HONEST
            }
    honest = verdicts.pop(HONEST)
    caught = sum(verdicts.values())
    print(
        f"{time.monotonic() - began:.0f} s{'' if honest else '; the tests fail on honest code, so nothing is shown'}"
    )
    print(f"{caught} caught, {len(chosen) - caught} missed")
    return 0 if honest and caught == len(chosen) else 1


def _run(folder: Path, chosen: Sequence[Mutant], workers: int, verbose: bool) -> dict[str, bool]:
    """Which were judged as they should be: leaks caught, honest code passed."""
    return {result[0]: _judge(*result, verbose) for result in _trials(folder, chosen, workers)}


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m mutants", description=__doc__)
    parser.add_argument("--only", help="those whose name contains this")
    parser.add_argument("--workers", type=int, default=len(os.sched_getaffinity(0)), help="processes at once")
    parser.add_argument("--verbose", action="store_true", help="show what the tests of those missed printed")
    parser.add_argument(
        "--docs", action="store_true", help="write the table in docs/audit.md, and run nothing"
    )
    return parser.parse_args()


def _trials(
    folder: Path, chosen: Sequence[Mutant], workers: int
) -> Iterator[tuple[str, Mutant | None, Outcome | StaleMutantError]]:
    """Every mutant's outcome as it comes, and that of all tests on the code as it is, which must pass."""
    tests = list(dict.fromkeys(test for one in chosen for test in one.caught_by))
    waiting: list[tuple[str, Mutant | None]] = [(HONEST, None), *((one.name, one) for one in chosen)]
    running: dict[int, tuple[str, Mutant | None, Path, float]] = {}
    while waiting or running:
        while waiting and len(running) < workers:
            name, one = waiting.pop(0)
            root = make_sandbox(folder / name.replace(" ", "-"))
            try:
                for edit in one.edits if one else ():
                    edit.apply(root)
            except StaleMutantError as error:
                yield name, one, error
                continue
            running[start(root, one.caught_by if one else tests)] = (name, one, root, time.monotonic())
        if running:
            child, status = os.wait()
            name, one, root, began = running.pop(child)
            yield name, one, finish(root, status, began)
            shutil.rmtree(root, ignore_errors=True)


def _judge(name: str, one: Mutant | None, found: Outcome | StaleMutantError, verbose: bool) -> bool:
    """Say how it went; caught means that a test failed, not that nothing ran."""
    if isinstance(found, StaleMutantError):
        print(f"STALE   {name}: {found}", flush=True)
        return False
    expected = 0 if one is None else TESTS_FAILED
    good = found.code == expected
    word = "ok" if one is None and good else "caught" if good else "MISSED" if found.code == 0 else "BROKEN"
    by = f"  by {found.failed[0]}" if good and found.failed else ""
    print(f"{word:7} {name} ({found.seconds:.1f} s){by}", flush=True)
    if not good and (verbose or found.code != 0):
        print(found.output[-6000:], flush=True)
    return good


if __name__ == "__main__":
    sys.exit(main())
