"""`sparsedp check`: can a model be trained, and is all of it on the fast path?"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from sparsedp.cli import options
from sparsedp.cli.output import emit, people
from sparsedp.errors import SparseDPError

if TYPE_CHECKING:
    from torch import nn

    from sparsedp.batch import PerSampleLoss


def check(
    model: Annotated[
        str, typer.Argument(metavar="MODULE:FUNCTION", help="A function that gives (model, loss_fn, rows).")
    ],
    as_json: options.Json = False,
) -> None:
    """Say whether a model's samples stand alone, which of its parts are not on the fast path, why, and what it costs.

    Only the rows that your function gives are looked at: make some up.

    Example: `sparsedp check mypackage.models:example`
    """
    from sparsedp.guards.coverage import TIMED_ROWS, coverage

    network, loss, rows = _given(model)
    found = coverage(network, loss, rows)
    notes = found.notes
    size = sum(p.numel() for p in network.parameters() if p.requires_grad)
    if as_json:
        told = {"model": model, "parameters": size, "fast": not notes, "notes": list(notes)}
        emit({**told, "times_plain": round(found.times_plain, 2)})
        return
    screen = people(as_json)
    screen.print(f"{model}: {size:,} parameters; every sample stands alone")
    for note in notes:
        screen.print(f"slow: {note}", soft_wrap=True)
    if not notes:
        screen.print("all of it is on the fast path")
    screen.print(
        f"a clipped sum of {TIMED_ROWS} rows takes {found.times_plain:.1f} times an ordinary gradient, here and now"
    )


def _given(path: str) -> tuple[nn.Module, PerSampleLoss, Any]:
    from sparsedp.batch import per_sample_loss

    given = options.imported(path, "(model, loss_fn, rows)")
    if not isinstance(given, tuple) or len(given) != 3:
        raise SparseDPError(f"{path}() gave {type(given).__name__}, expected (model, loss_fn, rows)")
    network, loss_fn, rows = given
    return network, per_sample_loss(loss_fn), rows
