"""Micro-batches are cut by who is in them: a unit that comes or goes disturbs its own one only."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sparsedp.sampling import cut

UNITS = st.sets(st.integers(0, 300) | st.integers(0, 2**62), max_size=60)


def runs(units: set[int], most: int | None) -> set[frozenset[int]]:
    ordered = np.array(sorted(units), dtype=np.int64)
    return {frozenset(ordered[run].tolist()) for run in cut(ordered, most)}


@given(UNITS, st.integers(1, 12))
def test_the_runs_are_the_units_in_order_none_empty_and_none_too_long(units, most):
    ordered = np.array(sorted(units), dtype=np.int64)
    parts = [ordered[run].tolist() for run in cut(ordered, most)]
    assert [unit for part in parts for unit in part] == sorted(units)
    assert all(0 < len(part) <= most for part in parts)


@given(UNITS, st.integers(0, 300) | st.integers(0, 2**62), st.integers(1, 12))
def test_one_more_unit_joins_a_run_or_makes_two_of_it_and_moves_no_other(units, newcomer, most):
    before, after = runs(units - {newcomer}, most), runs(units | {newcomer}, most)
    assert len(before - after) <= 1
    assert 1 <= len(after - before) <= 2
    assert frozenset().union(*(after - before)) == frozenset().union({newcomer}, *(before - after))


def test_a_full_run_is_halved_by_numbers_not_by_places():
    assert runs({0, 1, 2, 8}, 4) == {frozenset({0, 1, 2, 8})}
    assert runs({0, 1, 2, 8, 9}, 4) == {frozenset({0, 1, 2}), frozenset({8, 9})}
    assert runs({4, 5, 6, 7}, 3) == {frozenset({4, 5}), frozenset({6, 7})}


def test_without_a_limit_there_is_one_run_and_of_nothing_none():
    assert runs(set(range(1000)), None) == {frozenset(range(1000))}
    assert runs(set(), None) == runs(set(), 3) == set()
    with pytest.raises(ValueError, match="most"):
        cut(np.array([1, 2]), 0)
