"""Whatever way one row reaches another's gradient: the model is refused, or every engine gets each row right."""

from __future__ import annotations

import pytest
import torch
from mixing_cases import CASES, SOUND, Rows, loss, loud, table
from torch import nn

from sparsedp.batch import MicroBatch
from sparsedp.core.clip import FlatClip
from sparsedp.errors import ModelError
from sparsedp.grad_sample import BookkeepingEngine, Query
from sparsedp.grad_sample.check import PROBE_ROWS, check_model
from sparsedp.parameters import Support

LATER = {"detach trick", "tensor hook", "custom backward", "backward hook minus the mean"}
"""Computed right, row by row, and so not refused."""


def moved(model: nn.Module, rows: Rows) -> float:
    """How far one record moves the clipped sum, in clip norms."""
    with_it = tuple(torch.cat(parts) for parts in zip(loud(rows), rows, strict=True))
    sums = []
    for batch in (with_it, rows):
        engine = BookkeepingEngine(model, loss)
        query = Query(Support.full(engine.layout.dimension), FlatClip(0.1))
        sums.append(engine.clipped_sum([MicroBatch(batch)], query))
    return float((sums[0] - sums[1]).norm()) / 0.1


@pytest.mark.parametrize("name", CASES)
def test_rows_that_reach_each_other_are_refused_or_computed_right(name):
    case = CASES[name]
    rows, model = case.rows(), case.model()
    probe = rows[0][-PROBE_ROWS:], rows[1][-PROBE_ROWS:]
    if name not in LATER:
        with pytest.raises(ModelError):
            check_model(model, loss, probe, largest=96)
        return
    check_model(model, loss, probe, largest=96)
    assert moved(model, rows) <= 1


@pytest.mark.parametrize("name", SOUND)
def test_a_sound_model_is_not_refused(name):
    rows = table(count=PROBE_ROWS)
    check_model(SOUND[name](), loss, rows, largest=40)


def test_identical_rows_and_a_single_one_show_as_much_as_many():
    for count in (1, 16):
        rows = table(identical=True, count=max(count, 16))
        case = CASES["batch mean, a single row"]
        with pytest.raises(ModelError):
            check_model(case.model(), loss, (rows[0][:count], rows[1][:count]))


def test_a_loss_scaled_down_hides_nothing():
    case = CASES["detach trick in more than three rows"]
    with pytest.raises(ModelError, match="the gradient of one sample changes"):
        check_model(case.model(), lambda model, rows: 1e-8 * loss(model, rows), table(count=8))
