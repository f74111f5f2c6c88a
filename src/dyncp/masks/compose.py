"""Interval arithmetic on the key ranges of every token: what `&`, `|` and named masks are made of.

Everything works on arrays `starts` and `ends` of shape `[R, tokens]` (a token's ranges below each
other, so that whole rows are contiguous) and for all tokens at once. An empty range is
`(length, length)` and comes last, so that sorting keeps the form.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt

IntArray = npt.NDArray[np.int32]
RangeOperator = Callable[[IntArray, IntArray, int], IntArray]

# Up to this many ranges per token, compare-and-swap over whole rows beats np.sort: for 131,072
# tokens with 2 (4, 8, 12) ranges it takes 0.3 (0.6, 2.3, 4.9) ms instead of 5.2 (4.5, 5.0, 6.1).
NETWORK_RANGES = 12


def cover(length: int, *intervals: tuple[npt.ArrayLike, npt.ArrayLike]) -> IntArray:
    """Ranges that cover, for every token, the union of intervals (starts, ends) that may overlap.

    For tokens 0, 1, 2 of length 3, the sink [0, 1) and the window [i, i+1) give

        cover(3, (0, 1), (i, i + 1))  ->  [0, 1) -      touching and overlapping ones are merged
                                          [0, 2) -
                                          [0, 1) [2, 3)
    """
    starts, ends = np.empty((2, len(intervals), length), np.int32)
    for row, (start, end) in enumerate(intervals):
        starts[row] = start
        ends[row] = end
    return merge(*sort_ranges(starts, ends, length), length)


def intersect(left: IntArray, right: IntArray, length: int) -> IntArray:
    """Intersection of two normal `[tokens, R, 2]` arrays: every range with every other.

    [0, 4) [6, 9)  and  [2, 7)  ->  [2, 4) [6, 7)
    """
    a, b = columns(left), columns(right)
    starts = np.maximum(a[0][:, None], b[0]).reshape(-1, length)
    ends = np.minimum(a[1][:, None], b[1]).reshape(-1, length)
    # Nothing to merge: two pieces touch only where one of the sides has touching ranges.
    return drop_empty(*sort_ranges(starts, ends, length), length)


def unite(left: IntArray, right: IntArray, length: int) -> IntArray:
    """Union of two normal `[tokens, R, 2]` arrays.

    [0, 4) [6, 9)  or  [3, 5)  ->  [0, 5) [6, 9)
    """
    starts, ends = np.concatenate([columns(left), columns(right)], axis=1)
    return merge(sort_each(starts), sort_each(ends), length)


def columns(ranges: IntArray) -> IntArray:
    """`[tokens, R, 2]` as starts and ends, `[2, R, tokens]`."""
    return np.ascontiguousarray(ranges.T)


def sort_ranges(starts: IntArray, ends: IntArray, length: int) -> tuple[IntArray, IntArray]:
    """Sorted starts and sorted ends, after empty and backward ranges became (length, length).

    Starts and ends are sorted apart from each other. That keeps the union: the depth at x is the
    number of starts up to x less the number of ends up to x, whichever pairs they form.
    """
    empty = starts >= ends
    if empty.any():
        nowhere = np.int32(length)
        starts, ends = np.where(empty, nowhere, starts), np.where(empty, nowhere, ends)
    return sort_each(starts), sort_each(ends)


def sort_each(values: IntArray) -> IntArray:
    """Every token's values in increasing order."""
    num_ranges = len(values)
    if num_ranges == 1:
        return values
    if num_ranges > NETWORK_RANGES:
        return np.sort(values, axis=0)
    rows = list(values)
    for last in range(num_ranges - 1, 0, -1):
        for row in range(last):
            low, high = rows[row], rows[row + 1]
            rows[row], rows[row + 1] = np.minimum(low, high), np.maximum(low, high)
    return np.stack(rows)


def merge(starts: IntArray, ends: IntArray, length: int) -> IntArray:
    """Normal ranges of sorted starts and ends: a start not behind the last end joins that range.

    starts 0 3 6, ends 4 5 9  ->  [0, 5) [6, 9)     3 <= 4, so the start 3 and the end 4 go
    """
    joined = starts[1:] <= ends[:-1]
    if joined.any():
        starts, ends = starts.copy(), ends.copy()
        starts[1:] = np.where(joined, np.int32(length), starts[1:])
        ends[:-1] = np.where(joined, np.int32(length), ends[:-1])
        starts, ends = sort_each(starts), sort_each(ends)
    return drop_empty(starts, ends, length)


def drop_empty(starts: IntArray, ends: IntArray, length: int) -> IntArray:
    """`int32[tokens, R, 2]` without the ranges that are empty for every token; one always stays."""
    num_ranges = len(starts)
    while num_ranges > 1 and bool((starts[num_ranges - 1] == length).all()):
        num_ranges -= 1
    ranges = np.empty((length, num_ranges, 2), np.int32)
    ranges[:, :, 0] = starts[:num_ranges].T
    ranges[:, :, 1] = ends[:num_ranges].T
    return ranges


def agree(what: str, left: IntArray | None, right: IntArray | None) -> IntArray | None:
    """The positions or targets of two masks put together: one side's, or both if they are equal."""
    if left is None or right is None:
        return right if left is None else left
    if not np.array_equal(left, right):
        token = int(np.argmax(left != right))
        raise ValueError(
            f"two masks disagree about {what}: token {token} has {left[token]} in one and "
            f"{right[token]} in the other; only one of them may set {what}, or both the same"
        )
    return left
