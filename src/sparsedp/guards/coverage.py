"""What of a model is not on the fast path: asked before training, on made-up rows."""

from __future__ import annotations

import torch
from torch import nn

from sparsedp.core.batch import MicroBatch, PerSampleLoss, Rows, row_count
from sparsedp.core.chance import Chance
from sparsedp.core.clip import FlatClip
from sparsedp.core.randomness import SystemRandomness
from sparsedp.core.support import Support
from sparsedp.gradients.bookkeeping import BookkeepingEngine
from sparsedp.gradients.check import check_model
from sparsedp.gradients.query import Query


def slow_parts(model: nn.Module, loss: PerSampleLoss, rows: Rows) -> tuple[str, ...]:
    """Which parameters or operations leave the fast path, why, and what that means; empty where none does.

    **Privacy.** The clipped sum is thrown away. Give made-up rows all the same: what a model does may depend on them.

    Raises:
        ModelError: the model mixes samples or remembers them.
    """
    check_model(model, loss, rows)
    engine = BookkeepingEngine(model, loss)
    chance = Chance(SystemRandomness().secret(()), torch.arange(row_count(rows)))
    query = Query(Support.full(engine.layout.dimension), FlatClip(1.0))
    engine.clipped_sum([MicroBatch(rows, chance=chance)], query)
    return engine.notes
