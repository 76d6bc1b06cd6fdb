"""Tables of embeddings: only the rows of the support exist for the engine."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from gradient_cases import GEOMETRIES, loss
from gradient_oracle import clipped_sum, measured, median_norm, plain_loop, unit_means
from torch import Tensor, nn

from sparsedp.batch import MicroBatch
from sparsedp.clipping import FlatClip, Standardized
from sparsedp.grad_sample import BookKeepingEngine, ClippedSumQuery
from sparsedp.grad_sample.embedding import Pairs
from sparsedp.grad_sample.sampler import make_blocks
from sparsedp.parameters import ParameterLayout, Support

ROWS, WIDTH = 50, 3


class Text(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(ROWS, WIDTH, padding_idx=0)
        self.bag = nn.EmbeddingBag(ROWS, WIDTH, padding_idx=0)
        self.head = nn.Linear(WIDTH, 2)

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.table(ids).tanh().mean(1) + self.bag(ids))


def few_rows(layout: ParameterLayout) -> Support:
    """Rows 0 (padding), 3, 7 and 49 of the table, 7 of the bag, and the head."""
    table, bag, *head = layout.slots
    whole = [table.offset + WIDTH * r + c for r in (0, 3, 7, 49) for c in range(WIDTH)]
    whole += [bag.offset + WIDTH * 7 + c for c in range(WIDTH)]
    return Support(whole + [i for slot in head for i in range(slot.offset, slot.span.stop)], layout.dimension)


@pytest.mark.parametrize("units", [None, [0, 0, 1, 2, 2, 2, 3, 4]], ids=["rows", "units"])
@pytest.mark.parametrize("geometry", GEOMETRIES)
@pytest.mark.parametrize("tokens", [(0, 3, 7, 11), (1, 2, 4)], ids=["some-active", "none-active"])
def test_the_rows_of_a_support_equal_a_plain_loop_in_float64(tokens, geometry, units):
    torch.manual_seed(1)
    model = Text().double()
    ids = torch.tensor(tokens)[torch.randint(0, len(tokens), (8, 64))]
    ids[3] = 0
    rows = (ids, torch.linspace(0.2, 2.0, 8).double())
    gradients = plain_loop(model, loss, rows)
    contributions = gradients if units is None else unit_means(gradients, units)
    engine = BookKeepingEngine(model, loss)
    support = few_rows(engine.layout)
    space = GEOMETRIES[geometry](gradients, support)
    parts = (space.centre.numpy(), space.scale.numpy()) if isinstance(space, Standardized) else (0.0, 1.0)
    z = measured(contributions, support.indices.numpy(), *parts)
    clip_norm = median_norm(z)
    batch = MicroBatch(rows, None if units is None else torch.tensor(units))
    found = engine.clipped_sum([batch], ClippedSumQuery(support, FlatClip(clip_norm), space))
    assert np.linalg.norm(found.numpy() - clipped_sum(z, clip_norm)) <= 1e-9 * clip_norm


def test_a_table_keeps_only_its_active_rows():
    layout = ParameterLayout.of(Text())
    blocks = make_blocks(layout, few_rows(layout), torch.device("cpu"))
    assert blocks["table.weight"].shape == (4, WIDTH)
    assert blocks["table.weight"].rows.tolist() == [0, 3, 7, 49]
    assert blocks["table.weight"].places is None
    assert blocks["bag.weight"].shape == (1, WIDTH)
    lookup = blocks["table.weight"].place_of_row
    assert {r: int(p) for r, p in enumerate(lookup) if p >= 0} == {0: 0, 3: 1, 7: 2, 49: 3}


@pytest.mark.parametrize("width", [1, 4, 64, 100])
@pytest.mark.parametrize("pairs", [0, 1, 5000])
def test_pairs_in_order_are_added_up_one_after_the_other_to_the_bit(pairs, width):
    """So that a seeded run's sums are the same whichever way they are made."""
    torch.manual_seed(2)
    rows = torch.randint(0, pairs // 4 + 1, (pairs,)).sort().values
    gradients = torch.randn(pairs, width)
    touched, sums = Pairs(rows, rows, gradients, by_row=True).added_up(gradients)
    expected: dict[int, Tensor] = {}
    for row, gradient in zip(rows.tolist(), gradients, strict=True):
        expected[row] = expected[row] + gradient if row in expected else gradient
    assert touched.tolist() == sorted(expected)
    assert all(torch.equal(found, expected[int(row)]) for row, found in zip(touched, sums, strict=True))
    unordered = Pairs(rows, rows, gradients, by_row=False).added_up(gradients)
    assert torch.equal(unordered[0], touched)
    assert torch.equal(unordered[1], sums)
