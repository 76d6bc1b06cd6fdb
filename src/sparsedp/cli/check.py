"""`sparsedp check`: can a model be trained, and is all of it on the fast path?"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated, Any

import typer

from sparsedp.cli import options
from sparsedp.cli.output import emit, people
from sparsedp.errors import SparseDPError

if TYPE_CHECKING:
    from torch import nn

    from sparsedp.batch import PerSampleLoss


TIMED_ROWS, TIMES = 32, 3
"""Examples to take the time of, and how often; the least counts."""


def check(
    model: Annotated[
        str, typer.Argument(metavar="MODULE:FUNCTION", help="A function that gives (model, loss_fn, rows).")
    ],
    as_json: options.Json = False,
) -> None:
    """Say whether a model's examples stand alone, which parts leave the fast path, why, and what a step costs.

    Only the rows that your function gives are looked at: make some up.

    Example: `sparsedp check mypackage.models:example`
    """
    network, loss, rows = _given(model)
    notes, times_plain = _coverage(network, loss, rows)
    size = sum(p.numel() for p in network.parameters() if p.requires_grad)
    if as_json:
        told = {"model": model, "parameters": size, "fast": not notes, "notes": list(notes)}
        emit({**told, "times_plain": round(times_plain, 2)})
        return
    screen = people(as_json)
    screen.print(f"{model}: {size:,} parameters; every example stands alone")
    for note in notes:
        screen.print(f"slow: {note}", soft_wrap=True)
    if not notes:
        screen.print("all of it is on the fast path")
    screen.print(
        f"a clipped sum of {TIMED_ROWS} examples takes {times_plain:.1f} times an ordinary gradient, here and now"
    )


def _given(path: str) -> tuple[nn.Module, PerSampleLoss, Any]:
    from sparsedp.batch import per_sample_loss

    given = options.imported(path, "(model, loss_fn, rows)")
    if not isinstance(given, tuple) or len(given) != 3:
        raise SparseDPError(f"{path}() gave {type(given).__name__}, expected (model, loss_fn, rows)")
    network, loss_fn, rows = given
    return network, per_sample_loss(loss_fn), rows


def _coverage(network: nn.Module, loss: PerSampleLoss, rows: Any) -> tuple[tuple[str, ...], float]:
    """What is slow and why, and a clipped sum's processor time over that of an ordinary gradient."""
    import torch

    from sparsedp.batch import MicroBatch
    from sparsedp.clipping import FlatClip
    from sparsedp.grad_sample import BookkeepingEngine, Query
    from sparsedp.grad_sample.isolation import made_up
    from sparsedp.parameters import Support
    from sparsedp.validation.model import ModelValidation, validate_model

    notes = validate_model(network, loss, rows)
    engine = BookkeepingEngine(network, loss)
    query = Query(Support.full(engine.layout.dimension), FlatClip(1.0))
    many = made_up(rows, TIMED_ROWS, ModelValidation(network, loss, rows).kind)
    parameters = engine.layout.parameters(network)
    clipped = _seconds(lambda: engine.clipped_sum([MicroBatch(many)], query))
    plain = _seconds(lambda: torch.autograd.grad(loss(network, many).sum(), parameters, allow_unused=True))
    return (*notes, *(note for note in engine.notes if note not in notes)), clipped / plain


def _seconds(step: Callable[[], object]) -> float:
    taken = []
    for _ in range(1 + TIMES):
        start = time.process_time()
        step()
        taken.append(time.process_time() - start)
    return max(min(taken[1:]), 1e-9)
