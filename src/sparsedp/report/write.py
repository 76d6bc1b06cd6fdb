"""Reports as files: one run, or a folder of many."""

from __future__ import annotations

from pathlib import Path

from sparsedp.callbacks.reports import Result
from sparsedp.core.errors import SparseDPError
from sparsedp.core.files import write_atomically
from sparsedp.report.comparison import comparison_page
from sparsedp.report.page import Page
from sparsedp.report.run import read_run, run_of
from sparsedp.report.single import run_page
from sparsedp.runs.folder import RunFolder, find_runs
from sparsedp.runs.nonprivate_file import read_diagnostics


def write_report(
    source: Path | str | Result, out: Path | str | None = None, nonprivate: bool = False
) -> Path:
    """Write one self-contained HTML file about a run, or comparing the runs below a folder, and say where it is.

    Args:
        source: the folder of a run, a folder with runs somewhere below it, or the result of `fit`.
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
            return _write(run_page(run_of(source)), _file_for(source, out))
        source = source.out
    folder = Path(source)
    target = RunFolder(folder).report_file if out is None else Path(out)
    return _write(_page(folder, nonprivate), target)


def _page(folder: Path, nonprivate: bool) -> Page:
    if RunFolder(folder).record_file.is_file():
        return run_page(read_run(folder), read_diagnostics(folder) if nonprivate else None)
    found = find_runs(folder)
    if nonprivate:
        raise SparseDPError(
            f"nonprivate: {folder} holds {len(found)} runs, and diagnostics belong to one; give the folder of a run"
        )
    return comparison_page(folder.resolve().name, found)


def _file_for(result: Result, out: Path | str | None) -> Path:
    if out is None:
        raise SparseDPError(
            "report: this run kept no folder to put the report in; say where (report(out='report.html')), or give "
            "fit an out= folder"
        )
    return Path(out)


def _write(page: Page, target: Path) -> Path:
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(target, page.html().encode())
    except OSError as error:
        raise SparseDPError(f"report: cannot write {target} ({error}); give another out=") from error
    return target
