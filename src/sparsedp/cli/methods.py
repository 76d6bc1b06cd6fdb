"""`sparsedp methods`: the methods table."""

from __future__ import annotations

from sparsedp.cli import options
from sparsedp.cli.output import emit, people


def methods(as_json: options.Json = False) -> None:
    """List the training methods: what they do and where they come from.

    Use a name with `sparsedp train --method NAME`.
    """
    from rich.table import Table

    from sparsedp.methods import list_methods

    rows = list_methods()
    if as_json:
        emit(
            [
                {
                    "name": row.name,
                    "summary": row.summary,
                    "paper": row.paper,
                    "private": row.private,
                    "warm_up": row.warm_up,
                    "active_ratio": row.active_ratio,
                }
                for row in rows
            ]
        )
        return
    table = Table("method", "what it does", "from", "active ratio", title="Methods")
    for row in rows:
        table.add_row(row.name, row.summary, row.paper, str(row.active_ratio))
    screen = people(as_json)
    screen.print(table)
    screen.print(
        "Change a row with --active-ratio, or --set options='{ ranking = \"coherent\" }'; see docs/methods.md."
    )
