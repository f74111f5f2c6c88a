"""Counting sorts return the same order as comparison sorts."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from dyncp.arrays import distinct_pairs, sorted_order

TABLES = st.lists(st.tuples(st.integers(0, 3), st.integers(0, 9), st.integers(0, 1)), max_size=40)


@given(table=TABLES)
def test_the_order_is_that_of_lexsort(table):
    columns = np.asarray(table, np.int32).reshape(-1, 3).T
    order = sorted_order((columns[0], 4), (columns[1], 10), (columns[2], 2))
    assert (order == np.lexsort(columns)).all()


@given(table=TABLES)
def test_distinct_pairs_are_ordered_and_found_again(table):
    major, minor, _ = np.asarray(table, np.int32).reshape(-1, 3).T
    distinct_major, distinct_minor, index = distinct_pairs(major, 4, minor, 10)
    pairs = list(zip(distinct_major.tolist(), distinct_minor.tolist(), strict=True))
    assert pairs == sorted(set(zip(major.tolist(), minor.tolist(), strict=True)))
    assert (distinct_major[index] == major).all()
    assert (distinct_minor[index] == minor).all()
