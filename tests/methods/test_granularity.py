import collections
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from method_tools import layout_of

from sparsedp.errors import SparseDPError
from sparsedp.methods.ranking import Granularity, group_ids, order_by_score, random_order
from sparsedp.randomness import PublicRandomness

COORDINATES, ROWS = Granularity.COORDINATES, Granularity.ROWS
LAYOUT = layout_of((2, 3), (2,), ())
each = pytest.mark.parametrize("granularity", list(Granularity), ids=lambda g: g.value)
layouts = st.lists(st.lists(st.integers(1, 4), max_size=3).map(tuple), min_size=1, max_size=4).map(
    lambda shapes: layout_of(*shapes)
)


def order(scores, granularity, layout=LAYOUT):
    return order_by_score(torch.tensor(scores, dtype=torch.float64), layout, granularity).tolist()


def test_groups_are_coordinates_or_first_axis_entries():
    assert group_ids(LAYOUT, COORDINATES) is None
    assert group_ids(LAYOUT, ROWS).tolist() == [0, 0, 0, 1, 1, 1, 2, 3, 4]
    assert group_ids(layout_of((0, 2), (2, 2)), ROWS).tolist() == [0, 0, 1, 1]


def test_hand_computed_orders():
    #          row 0         row 1         bias      scalar
    scores = [1.0, 2.0, 0.0, 5.0, 0.0, 1.0, 1.5, 9.0, 1.0]
    assert order(scores, COORDINATES) == [7, 3, 1, 6, 0, 5, 8, 2, 4]
    # means: row 0 = 1, row 1 = 2, bias 1.5 and 9, scalar 1; row 0 ties with the scalar and comes first.
    assert order(scores, ROWS) == [7, 3, 5, 4, 6, 1, 0, 2, 8]


@each
def test_ties_go_to_the_lower_index(granularity):
    assert order([0.0] * 9, granularity) == list(range(9))


@given(layouts, st.sampled_from(list(Granularity)), st.integers(0, 10**6), st.booleans())
def test_an_order_is_a_permutation_that_takes_every_group_whole(layout, granularity, seed, random):
    d = layout.dimension
    if random:
        found = random_order(PublicRandomness(seed), (3,), layout, granularity)
    else:
        scores = torch.from_numpy(np.random.default_rng(seed).integers(0, 4, d).astype(float))
        found = order_by_score(scores, layout, granularity)
    assert sorted(found.tolist()) == list(range(d))
    groups = group_ids(layout, granularity)
    if groups is None:
        groups = torch.arange(d)
    visited = groups[found].tolist()
    changes = 1 + sum(a != b for a, b in pairwise(visited))
    assert changes == len(set(visited))


@given(layouts, st.integers(0, 10**6))
def test_groups_come_in_the_order_of_their_mean_and_members_in_the_order_of_their_score(layout, seed):
    scores = np.random.default_rng(seed).standard_normal(layout.dimension)
    groups = group_ids(layout, ROWS).numpy()
    found = order_by_score(torch.from_numpy(scores), layout, ROWS).numpy()
    means = np.array([scores[groups == g].mean() for g in groups])
    keys = [(-round(means[i], 12), -scores[i]) for i in found]
    assert keys == sorted(keys)


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


@each
def test_random_orders_replay_by_key_and_differ_between_keys(granularity):
    layout = layout_of((20, 3))
    first = random_order(PublicRandomness(1), (0,), layout, granularity)
    assert torch.equal(first, random_order(PublicRandomness(1), (0,), layout, granularity))
    assert not torch.equal(first, random_order(PublicRandomness(1), (1,), layout, granularity))
    assert not torch.equal(first, random_order(PublicRandomness(2), (0,), layout, granularity))


def test_scores_that_cannot_be_ranked_are_refused():
    with pytest.raises(SparseDPError, match="NaN"):
        order([float("nan")] + [0.0] * 8, ROWS)
    with pytest.raises(SparseDPError, match="expected d=9"):
        order([0.0] * 8, COORDINATES)
