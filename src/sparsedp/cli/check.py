"""`sparsedp check`: can a model be trained, and is all of it on the fast path?"""

from __future__ import annotations

import importlib
import math
import os
import sys
from typing import TYPE_CHECKING, Annotated, Any

import typer

from sparsedp.cli import options
from sparsedp.cli.output import emit, people
from sparsedp.core.errors import ModelError, SparseDPError

if TYPE_CHECKING:
    from torch import nn

    from sparsedp.core.batch import PerSampleLoss

ROWS = 4
"""Made-up ones."""


def check(
    model: Annotated[
        str, typer.Argument(help="A model's name, or package.module:function giving (model, loss_fn, rows).")
    ],
    as_json: options.Json = False,
) -> None:
    """Say whether a model's samples stand alone, which of its parts are not on the fast path, why, and what it costs.

    Nothing private is looked at: rows are made up, or what your function gives.

    Example: `sparsedp check transformer`

    Your own: `sparsedp check mypackage.models:example`
    """
    from sparsedp.guards.coverage import TIMED_ROWS, coverage
    from sparsedp.models import parameter_count

    network, loss, rows = _imported(model) if ":" in model else _named(model)
    found = coverage(network, loss, rows)
    notes = found.notes
    size = parameter_count(network)
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


def _named(name: str) -> tuple[nn.Module, PerSampleLoss, Any]:
    import torch
    from torch import nn

    from sparsedp.core.batch import supervised
    from sparsedp.models.registry import MODELS, build

    spec = MODELS.get(name.replace("_", "-"))
    if spec is not None and spec.made_for is None:
        raise ModelError(
            f"{name} is built for its data; give package.module:function that builds it, with a few rows"
        )
    shape, classes = ((1,), 2) if spec is None or spec.made_for is None else spec.made_for
    network = build(name, shape, classes)
    ids = any(isinstance(part, nn.Embedding | nn.EmbeddingBag) for part in network.modules())
    made_up = torch.linspace(-1, 1, ROWS * math.prod(shape)).reshape(ROWS, *shape).sin_()
    inputs = (made_up.abs() * 100).long() + 1 if ids else made_up
    return network, supervised(nn.CrossEntropyLoss(reduction="none")), (inputs, torch.arange(ROWS) % classes)


def _imported(path: str) -> tuple[nn.Module, PerSampleLoss, Any]:
    from sparsedp.core.batch import per_sample_loss

    module, _, function = path.partition(":")
    sys.path.insert(0, os.getcwd())
    try:
        make = getattr(importlib.import_module(module), function)
    except (ImportError, AttributeError) as error:
        raise SparseDPError(f"{path}: {error}; expected package.module:function") from error
    finally:
        sys.path.pop(0)
    try:
        given = make()
    except Exception as error:
        raise SparseDPError(
            f"{path}() raised {type(error).__name__} ({error}); expected it to give (model, loss_fn, rows)"
        ) from error
    if not isinstance(given, tuple) or len(given) != 3:
        raise SparseDPError(f"{path}() gave {type(given).__name__}, expected (model, loss_fn, rows)")
    network, loss_fn, rows = given
    return network, per_sample_loss(loss_fn), rows
