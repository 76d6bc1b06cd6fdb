"""Reports as files."""

from __future__ import annotations

from pathlib import Path

from sparsedp._files import write_atomically
from sparsedp.errors import SparseDPError
from sparsedp.report.page import Page
from sparsedp.report.run import read_run, run_of
from sparsedp.report.single import run_page
from sparsedp.results import Result
from sparsedp.runs.directory import RECORD, REPORT
from sparsedp.runs.nonprivate_file import read_diagnostics


def write_report(
    source: Path | str | Result, out: Path | str | None = None, nonprivate: bool = False
) -> Path:
    """Write one self-contained HTML file about a run, and say where it is.

    Args:
        source: the folder of a run, or the result of `fit`.
        out: the file to write; `report.html` in that folder if not given. An old report is replaced.
        nonprivate: also show the run's non-private diagnostics, under a banner; see `docs/run-format.md`.

    **Privacy.** Released and public values only, unless `nonprivate` is asked for. Held-out numbers are exact, and
    the page says so.
    **Edge cases.** The same files give the same bytes. A run whose ledger does not verify gets no report; one whose
    other files do not agree with it gets one that says so first, in red.

    Raises:
        DataError: no run there, or a damaged file.
        PrivacyError: a ledger does not verify.
    """
    if isinstance(source, Result):
        if source.out is None:
            return write_page(run_page(run_of(source)), _file_for(source, out))
        source = source.out
    folder = Path(source)
    target = folder / REPORT if out is None else Path(out)
    return write_page(_page(folder, nonprivate), target)


def _page(folder: Path, nonprivate: bool) -> Page:
    if not (folder / RECORD).is_file() and folder.is_dir():
        below = sorted(path.parent.name for path in folder.glob(f"*/{RECORD}"))
        if below:
            raise SparseDPError(
                f"report: {folder} holds {len(below)} runs, such as {below[0]}; give the folder of one"
            )
    return run_page(read_run(folder), read_diagnostics(folder) if nonprivate else None)


def _file_for(result: Result, out: Path | str | None) -> Path:
    if out is None:
        raise SparseDPError(
            "report: this run kept no folder to put the report in; say where (report(out='report.html')), or give "
            "fit an out= folder"
        )
    return Path(out)


def write_page(page: Page, target: Path) -> Path:
    """Write a page, and say where it is.

    Raises:
        SparseDPError: it cannot be written.
    """
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(target, page.html().encode())
    except OSError as error:
        raise SparseDPError(f"report: cannot write {target} ({error}); give another out=") from error
    return target
