"""`sparsedp data`: which data sets there are, where they are looked for, and how to get them."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from sparsedp.cli import Exit, print_json, stderr_console, stdout_console
from sparsedp_experiments.cli import options

if TYPE_CHECKING:
    from sparsedp_experiments.data import PublicFiles

data_app = typer.Typer(help="List data sets, check their files, download them.", rich_markup_mode="rich")


@data_app.callback(invoke_without_command=True)
def data(
    context: typer.Context,
    check: Annotated[
        bool, typer.Option("--check", help="Compare every file with the public original.")
    ] = False,
    as_json: options.Json = False,
) -> None:
    """List the data sets: where they are looked for, what is missing and how to get it.

    Files are looked for in $SPARSEDP_DATA and then in the per-user cache. `sparsedp data get mnist` downloads MNIST.
    With --check, files are compared with checksums of the public originals; a file that differs gives exit code 3.
    """
    if context.invoked_subcommand is not None:
        return
    from sparsedp_experiments.data.files import search_roots
    from sparsedp_experiments.data.table import SOURCES

    found = [_status(spec, check) for spec in SOURCES.values()]
    if as_json:
        print_json(
            {"searched": [str(path) for path in search_roots(None)], "sources": found, "datasets": _names()}
        )
    else:
        _show(found, check)
    if any(file["checksum"] == "different" for one in found for file in one["files"]):
        raise typer.Exit(Exit.DATA)


@data_app.command("get")
def get(
    name: Annotated[str, typer.Argument(help="A data set, such as mnist.")],
    as_json: options.Json = False,
) -> None:
    """Download a data set from its official address into the per-user cache, and check its checksum.

    Example: `sparsedp data get fashion-mnist`
    """
    from sparsedp_experiments.data.download import get as download

    shown: dict[str, int] = {}

    def tell(file: str, done: int, total: int | None) -> None:
        percent = 100 * done // total if total else 0
        if not as_json and shown.get(file, -10) + 10 <= percent:
            shown[file] = percent
            stderr_console().print(f"{file}: {percent} %" if total else f"{file}: {done:,} bytes")

    paths = download(name, progress=tell)
    if as_json:
        print_json({"name": name, "files": [str(path) for path in paths]})
    for path in paths:
        stdout_console(as_json).print(str(path), soft_wrap=True)


def _status(spec: PublicFiles, check: bool) -> dict[str, Any]:
    """What there is of a data set: the first complete form, else the first."""
    from sparsedp_experiments.data.download import Checksum, compare

    words = {Checksum.OFFICIAL: "official", Checksum.DIFFERENT: "different", Checksum.UNKNOWN: "unknown"}
    forms = []
    for form, files in spec.forms.items():
        located = [(file, spec.search.first(file.candidates, None)) for file in files]
        missing = [file.candidates[0] for file, path in located if path is None]
        forms.append((form, located, missing))
    form, located, missing = next((one for one in forms if not one[2]), forms[0])
    files_found = [
        {"path": str(path), "checksum": words[compare(path, file.sha256)] if check else None}
        for file, path in located
        if path is not None
    ]
    return {
        "name": spec.name,
        "title": spec.title,
        "records": spec.records,
        "task": spec.task,
        "complete": not missing,
        "form": form if not missing else None,
        "files": files_found,
        "missing": missing,
        "remedy": spec.search.remedy if missing else None,
    }


def _names() -> list[dict[str, Any]]:
    from sparsedp_experiments.data import DATASETS

    return [
        {"name": name, "title": spec.title, "source": spec.source and spec.source.name}
        for name, spec in DATASETS.items()
    ]


def _show(found: list[dict[str, Any]], check: bool) -> None:
    from rich.table import Table

    from sparsedp_experiments.data.files import DATA_VARIABLE, search_roots

    screen = stdout_console(False)
    there = {one["name"]: one for one in found}
    table = Table("--dataset", "what", "status", title="Data sets")
    for row in _names():
        source = there.get(row["source"] or "")
        state = "[green]there[/green]" if source is None or source["complete"] else "[red]missing[/red]"
        table.add_row(row["name"], row["title"], state)
    screen.print(table)
    roots = ", ".join(str(path) for path in search_roots(None))
    screen.print(f"Looked in {roots} (set {DATA_VARIABLE} to a folder of yours).", soft_wrap=True)
    for one in found:
        if one["missing"]:
            screen.print(
                f"{one['name']}: missing {', '.join(one['missing'])}. {one['remedy']}", soft_wrap=True
            )
        for file in one["files"] if check else []:
            name = Path(file["path"]).name
            screen.print(f"{one['name']}: {name}: {_CHECKSUM_WORDS[file['checksum']]}", soft_wrap=True)
    screen.print(
        "Your own: --dataset mine.npz --classes a,b,c, or --dataset FOLDER with one folder of pictures per class."
    )


_CHECKSUM_WORDS = {
    "official": "the public original",
    "different": "NOT the public original",
    "unknown": "no checksum is known for it",
}
