"""Comma-separated tables as columns of strings: plain, gzipped or in a zip, with a line of names or without one."""

from __future__ import annotations

import csv
import gzip
import io
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType

from sparsedp.errors import DataError
from sparsedp_experiments.data.encoding import Table
from sparsedp_experiments.data.files import open_tree

Known = tuple[Callable[[str], bool], str]
"""Whether a value is one of those expected, and those expected in words."""

_NONE: Mapping[str, Known] = MappingProxyType({})


def read_columns(
    path: Path,
    columns: Sequence[str],
    *,
    header: Sequence[str] | None = None,
    member: str = "",
    known: Mapping[str, Known] = _NONE,
) -> Table:
    """These columns of a table, as strings without the spaces around them.

    Args:
        path: the file, which may be gzipped, or a zip of it.
        columns: the names of the columns to keep.
        header: the names of all columns, for a file without a line of names.
        member: what the file is called in a zip.
        known: columns whose every value is checked.

    Raises:
        DataError: columns are missing, a row has another length, or a checked value is unknown.
    """
    with _open(path, member) as stream:
        try:
            rows = _filled(csv.reader(stream, skipinitialspace=True))
            names = list(header) if header else next(rows, (0, []))[1]
            if missing := [column for column in columns if column not in names]:
                raise DataError(f"{path}: column {missing[0]!r} is missing; expected {', '.join(columns)}")
            lines, records = [], []
            for line, record in rows:
                if len(record) != len(names):
                    raise DataError(
                        f"{path}, line {line}: got {len(record)} fields, expected {len(names)}; it is truncated"
                    )
                lines.append(line)
                records.append(record)
        except (UnicodeDecodeError, csv.Error, EOFError, OSError, zlib.error) as error:
            raise DataError(f"{path}: cannot be read as a table ({error})") from error
    if not records:
        raise DataError(f"{path}: no rows")
    by_column = list(zip(*records, strict=True))
    table = {column: tuple(map(str.strip, by_column[names.index(column)])) for column in columns}
    for column, (is_known, expected) in known.items():
        bad = next((place for place, value in enumerate(table[column]) if not is_known(value)), None)
        if bad is not None:
            raise DataError(
                f"{path}, line {lines[bad]}: got {column} {table[column][bad]!r}, expected {expected}"
            )
    return table


def _filled(rows: Iterator[list[str]]) -> Iterator[tuple[int, list[str]]]:
    """Lines with their numbers, without empty ones and without UCI's remarks, which start with a bar."""
    for line, row in enumerate(rows, start=1):
        if row and not row[0].startswith("|"):
            yield line, row


def _open(path: Path, member: str) -> io.TextIOBase:
    if path.suffix == ".gz":
        return io.TextIOWrapper(gzip.open(path), encoding="utf-8", newline="")
    if path.suffix != ".zip":
        return path.open(newline="", encoding="utf-8")
    with open_tree(path) as tree:
        members = [name for name in tree.names if name.endswith(member)]
        if not members:
            raise DataError(f"{path}: no {member} in it")
        return io.TextIOWrapper(io.BytesIO(tree.read(members[0])), encoding="utf-8", newline="")
