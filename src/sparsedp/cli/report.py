"""`sparsedp report`: one self-contained HTML file."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from sparsedp.cli import options
from sparsedp.cli.output import emit, people
from sparsedp.errors import DataError, SparseDPError


def report(
    path: Annotated[Path, typer.Argument(metavar="RUN", help="The directory of a run.")],
    out: Annotated[
        Path | None, typer.Option(help="The file to write; report.html in the folder by default.")
    ] = None,
    as_json: options.Json = False,
) -> None:
    """Write the report of a run as one HTML file.

    Examples: `sparsedp report runs/mnist-tp-topk-eps3`, `sparsedp report runs/demo --out demo.html`.
    """
    if not path.is_dir():
        raise DataError(f"{path} is no folder; give the folder of a run, or one that holds runs")
    from sparsedp.report import write_report

    try:
        written = write_report(path, out=out)
    except OSError as error:
        raise SparseDPError(f"the report cannot be written ({error}); give another --out") from error
    if as_json:
        emit({"report": str(written)})
    people(as_json).print(f"Report: {written}")
