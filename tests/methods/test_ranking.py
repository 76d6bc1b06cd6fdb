"""Which parameters take part, by name or structure, and how supports are cut from scope, always and an order."""

import collections
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from method_tools import layout_of, plan_of, random_release
from torch import nn

from sparsedp.errors import SparseDPError
from sparsedp.methods import SupportScheduler, get_method
from sparsedp.methods.ranking import (
    Granularity,
    Order,
    Parts,
    TableRows,
    find,
    group_ids,
    order_by_score,
    random_order,
)
from sparsedp.parameters import ParameterLayout
from sparsedp.randomness import PublicRandomness


class Reader(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(7, 3)
        self.bags = nn.EmbeddingBag(4, 2)
        self.body = nn.Linear(5, 4)
        self.norm = nn.LayerNorm(4)
        self.out = nn.Linear(4, 2)


LAYOUT = ParameterLayout.of(Reader())


def names(*given, of=LAYOUT):
    return [slot.name for slot in find(of, given, "scope")]


def test_structure_and_patterns_find_parameters_in_their_order():
    assert names("head") == ["out.weight", "out.bias"]
    assert names("bias") == ["body.bias", "norm.bias", "out.bias"]
    assert names("norms") == ["norm.weight", "norm.bias"]
    assert names("embeddings") == ["words.weight", "bags.weight"]
    assert names("dense") == [slot.name for slot in LAYOUT.slots[2:]]
    assert names("b*.weight", "head") == ["bags.weight", "body.weight", "out.weight", "out.bias"]
    assert names("bias", of=ParameterLayout.of(nn.MultiheadAttention(4, 2))) == [
        "in_proj_bias",
        "out_proj.bias",
    ]
    with pytest.raises(SparseDPError, match="fits none"):
        names("wrods.*")


def supports(method, **options):
    plan = plan_of(get_method(method, **options))
    controller = SupportScheduler(plan, LAYOUT, PublicRandomness(5))
    found = []
    for step in range(plan.total_steps):
        setting = controller.begin_step(step)
        controller.update(random_release(1, step, setting))
        found.append(setting.support)
    return found


def mask_of(*given):
    mask = torch.zeros(LAYOUT.dimension, dtype=torch.bool)
    for slot in find(LAYOUT, given, "scope"):
        mask[slot.span] = True
    return mask


@pytest.mark.parametrize("method", ["tp-topk", "tp-rand", "on-topk", "on-rand", "adadpigu"])
def test_nothing_outside_the_scope_moves_and_what_is_always_active_stays(method):
    found = supports(method, scope=("words.*", "head", "bias"), always=("head",))
    scope, always = mask_of("words.*", "head", "bias"), mask_of("head")
    assert all(not (support.mask() & ~scope).any() for support in found)
    assert all((support.mask() & always).sum() == always.sum() for support in found)
    ratio = {"adadpigu": 0.6}.get(method, 0.2)
    assert found[-1].size == 10 + int(ratio * (21 + 4 + 4))


def test_a_learned_support_after_the_head_comes_from_one_period_of_everything():
    found, first = supports("head-first", ranking="energy", always=("head",), active_ratio=0.2), 6
    head = mask_of("head")
    assert all(torch.equal(support.mask(), head) for support in found[:first])
    dense = [support.is_full for support in found[first:]]
    period = dense.index(False)
    assert period > 0
    assert not any(dense[period:])
    assert found[-1].size == int(head.sum()) + int(0.2 * (LAYOUT.dimension - int(head.sum())))


@pytest.mark.parametrize("count", [0, 1, 3, 4, 5, 8, 13, 29])
def test_an_order_of_rows_gives_whole_rows_and_then_part_of_one(count):
    rows = TableRows(tuple(find(LAYOUT, ("embeddings",), "scope")))
    order = torch.tensor([8, 2, 0, 10, 7, 1, 3, 4, 5, 6, 9])
    written_out = []
    for row in order.tolist():
        words = row < 7
        start, width = (3 * row, 3) if words else (21 + 2 * (row - 7), 2)
        written_out += range(start, start + width)
    assert Order(order, rows).first(count).tolist() == written_out[:count]


def test_a_head_that_is_always_active_or_a_stage_must_take_part():
    told = r'out\.weight.*a scope of .*body\.weight.*add "head" to scope'
    with pytest.raises(SparseDPError, match=told):
        Parts.of(LAYOUT, ("body.*",), ("head",))
    with pytest.raises(SparseDPError, match=told):
        supports("head-first", scope=("words.*", "body.*"))
    assert Parts.of(LAYOUT, ("body.*", "*.bias"), ("head",)).always == (LAYOUT.slot("out.bias"),)


COORDINATES, ROWS = Granularity.COORDINATES, Granularity.ROWS
GROUPED = layout_of((2, 3), (2,), ())
layouts = st.lists(st.lists(st.integers(1, 4), max_size=3).map(tuple), min_size=1, max_size=4).map(
    lambda shapes: layout_of(*shapes)
)


def order(scores, granularity, layout=GROUPED):
    return order_by_score(torch.tensor(scores, dtype=torch.float64), layout, granularity).tolist()


def test_hand_computed_orders():
    #          row 0         row 1         bias      scalar
    scores = [1.0, 2.0, 0.0, 5.0, 0.0, 1.0, 1.5, 9.0, 1.0]
    assert order(scores, COORDINATES) == [7, 3, 1, 6, 0, 5, 8, 2, 4]
    # means: row 0 = 1, row 1 = 2, bias 1.5 and 9, scalar 1; row 0 ties with the scalar and comes first.
    assert order(scores, ROWS) == [7, 3, 5, 4, 6, 1, 0, 2, 8]


@given(layouts, st.sampled_from(list(Granularity)), st.integers(0, 10**6), st.booleans())
def test_an_order_is_a_permutation_that_takes_every_group_whole(layout, granularity, seed, random):
    d = layout.dimension
    scores = torch.from_numpy(np.random.default_rng(seed).integers(0, 4, d).astype(float))
    found = order_by_score(scores, layout, granularity)
    if random:
        found = random_order(PublicRandomness(seed), (3,), layout, granularity)
    assert sorted(found.tolist()) == list(range(d))
    groups = group_ids(layout, granularity)
    if groups is None:
        groups = torch.arange(d)
    visited = groups[found].tolist()
    changes = 1 + sum(a != b for a, b in pairwise(visited))
    assert changes == len(set(visited))


def test_every_order_of_the_groups_is_equally_likely_whatever_their_sizes():
    """Chi-square over 6 orders of three rows of very different size; false-alarm rate 1e-6 (5 d.o.f.)."""
    layout = layout_of((1, 50), (1,), (1, 8))
    groups = group_ids(layout, ROWS)
    seen = collections.Counter()
    draws = 3000
    for period in range(draws):
        found = random_order(PublicRandomness(0), (period,), layout, ROWS)
        visited = groups[found].tolist()
        seen[tuple(dict.fromkeys(visited))] += 1
    assert len(seen) == 6
    assert sum((count - draws / 6) ** 2 / (draws / 6) for count in seen.values()) < 35.9


@pytest.mark.parametrize("scores", [[float("nan")] + [0.0] * 8, [0.0] * 8])
def test_scores_that_cannot_be_ranked_are_refused(scores):
    with pytest.raises(SparseDPError, match="expected d=9 numbers, none NaN"):
        order(scores, ROWS)
