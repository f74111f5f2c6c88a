"""Interval arithmetic on the key ranges of every token: behind `&`, `|` and the named masks.

Everything works on arrays `starts` and `ends` of shape `[R, tokens]` (a column has the
ranges of one token), for all tokens at once. Empty ranges come last in results, as `(length,
length)`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from dyncp.compiled import compiled, inner

IntArray = npt.NDArray[np.int32]
RangeOperator = Callable[[IntArray, IntArray], IntArray]
Counts = npt.NDArray[np.int64]

# Sequences up to so many tokens are joined.
TOGETHER = 1 << 16


class JoinedRanges(NamedTuple):
    """Ranges of sequences one after the other, so that one call can look at many short ones:
    sequence s has `lengths[s]` rows of `columns[s]` ranges each. `cells` is `int32[ranges, 2]`,
    read-only."""

    cells: IntArray
    lengths: Counts
    columns: Counts


def join_ranges(ranges: Sequence[IntArray]) -> list[JoinedRanges]:
    """Those of all sequences, `int32[tokens, R, 2]` each, in order; long ones are not copied."""
    lengths = np.array([len(rows) for rows in ranges], np.int64)
    columns = np.array([rows.shape[1] for rows in ranges], np.int64)
    flat, joined = [rows.reshape(-1, 2) for rows in ranges], []
    for first, end in _pieces(lengths.tolist()):
        cells = np.concatenate(flat[first:end]) if end - first > 1 else flat[first].view()
        cells = np.ascontiguousarray(cells)
        cells.flags.writeable = False
        joined.append(JoinedRanges(cells, lengths[first:end], columns[first:end]))
    return joined


class LinearRanges(NamedTuple):
    """Ranges of all sequences as runs of rows along which both ends of all ranges stay or grow by
    the same from row to row: row `start + i` of a run has base + i × slope. The runs of sequence s
    are `first[s]` to `first[s + 1]`."""

    lengths: Counts  # [sequences]
    first: Counts  # [sequences + 1]
    start: IntArray  # [runs]
    base: IntArray  # [runs, R, 2]
    slope: IntArray  # [runs, R, 2]


# Rows whose slopes are compared together: 131,072 rows of two ranges take 0.15 ms, one by one 0.53.
STRETCH = 64


def find_runs(joined: Sequence[JoinedRanges]) -> LinearRanges:
    """Runs of these ranges, as long as possible. Sequences with fewer columns than others have
    empty ranges there."""
    lengths = np.concatenate([own.lengths for own in joined])
    start, num_runs, count = np.empty(int(lengths.sum()), np.int32), [], 0
    for own in joined:
        counts = np.empty(len(own.lengths), np.int64)
        flat = own.cells.reshape(-1), own.lengths, 2 * own.columns
        count = _find_runs(*flat, start, counts, count)
        num_runs.append(counts)
    first = np.concatenate([[0], np.cumsum(np.concatenate(num_runs))])
    start, done = start[:count].copy(), 0
    most = max(int(own.columns.max()) for own in joined)
    base, slope = np.zeros((2, count, most, 2), np.int32)
    for own in joined:
        runs = slice(first[done], first[done + len(own.lengths)])
        sequence = np.repeat(np.arange(len(own.lengths)), np.diff(first)[done:][: len(own.lengths)])
        base[runs], slope[runs] = _lines(own, sequence, start[runs], most)
        done += len(own.lengths)
    return LinearRanges(lengths, first, start, base, slope)


def _lines(
    joined: JoinedRanges, sequence: Counts, start: IntArray, most: int
) -> tuple[IntArray, IntArray]:
    """Ranges at the starts of runs of these sequences, and how they grow there."""
    cells = joined.lengths * joined.columns
    length, columns = joined.lengths[sequence], joined.columns[sequence]
    column, row = np.arange(most), (np.cumsum(cells) - cells)[sequence] + start * columns
    here = row[:, None] + np.minimum(column, columns[:, None] - 1)
    base = joined.cells[here]
    goes_on = (start + 1 < length) * columns
    slope = joined.cells[here + goes_on[:, None]] - base
    absent = column >= columns[:, None]
    base[absent], slope[absent] = np.repeat(length, (most - columns))[:, None], 0
    return base, slope


@compiled
def _find_runs(
    cells: IntArray, lengths: Counts, widths: Counts, start: IntArray, counts: Counts, count: int
) -> int:
    """Rows at which a sequence begins or the slope of any column changes, behind the first `count`;
    gives their new number, and `counts` those of every sequence. The last row of a sequence goes on
    as the one before it did."""
    cell = 0
    for sequence in range(len(lengths)):
        width, end, before = widths[sequence], lengths[sequence] - 1, count
        start[count], count, row, stretch = 0, count + 1, 1, STRETCH
        while row < end:
            next_row = min(row + stretch, end)
            if _is_straight(cells, cell + row * width, cell + next_row * width, width):
                row, stretch = next_row, STRETCH
            elif stretch > 1:
                stretch = 1
            else:
                start[count], count, row = row, count + 1, next_row
        counts[sequence] = count - before
        cell += lengths[sequence] * width
    return count


@inner
def _is_straight(cells: IntArray, first: int, end: int, width: int) -> bool:
    """Whether no slope changes in rows of so many cells. Unsigned indices let it be vectorised."""
    bend, columns = 0, np.uint64(width)
    for cell in range(np.uint64(first), np.uint64(end)):
        slope = cells[cell + columns] - cells[cell]
        bend |= slope ^ (cells[cell] - cells[cell - columns])
    return bend == 0


def _pieces(lengths: Sequence[int]) -> Iterator[tuple[int, int]]:
    """First and end of sequences that together have up to TOGETHER tokens, or of a longer one."""
    first = tokens = 0
    for index, length in enumerate(lengths):
        if index > first and tokens + length > TOGETHER:
            yield first, index
            first, tokens = index, 0
        tokens += length
    if lengths:
        yield first, len(lengths)


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
    return merge(starts, ends)


def intersect(left: IntArray, right: IntArray) -> IntArray:
    """Intersection of two normal `[tokens, R, 2]` arrays: every range with every other.

    [0, 4) [6, 9)  and  [2, 7)  ->  [2, 4) [6, 7)
    """
    a, b = columns(left), columns(right)
    starts = np.maximum(a[0][:, None], b[0]).reshape(-1, len(left))
    ends = np.minimum(a[1][:, None], b[1]).reshape(-1, len(left))
    return merge(starts, ends)


def unite(left: IntArray, right: IntArray) -> IntArray:
    """Union of two normal `[tokens, R, 2]` arrays.

    [0, 4) [6, 9)  or  [3, 5)  ->  [0, 5) [6, 9)
    """
    starts, ends = np.concatenate([columns(left), columns(right)], axis=1)
    return merge(starts, ends)


def columns(ranges: npt.NDArray[np.integer]) -> IntArray:
    """`[tokens, R, 2]` as starts and ends, `[2, R, tokens]`."""
    return np.array(ranges.T, np.int32, order="C")


def merge(starts: IntArray, ends: IntArray) -> IntArray:
    """Normal ranges `int32[tokens, R, 2]` of ranges in any order; empty and backward ones do not
    count. Columns that are empty for every token are dropped; one always stays.

    [3, 5) [0, 4) [6, 9) [8, 8)  ->  [0, 5) [6, 9)
    """
    num_ranges, length = starts.shape
    ranges = np.empty((length, num_ranges, 2), np.int32)
    most = max(_merge(starts, ends, ranges), 1)
    return ranges if most == num_ranges else ranges[:, :most].copy()


@compiled
def _merge(starts: IntArray, ends: IntArray, ranges: IntArray) -> int:
    """Fills `ranges`; gives the most ranges of a token."""
    num_ranges, length = starts.shape
    most = 0
    for token in range(length):
        count = _sort_ranges(starts, ends, ranges, token)
        kept = min(count, 1)
        for column in range(1, count):
            start, end = ranges[token, column, 0], ranges[token, column, 1]
            if start <= ranges[token, kept - 1, 1]:
                ranges[token, kept - 1, 1] = max(end, ranges[token, kept - 1, 1])
            else:
                ranges[token, kept, 0], ranges[token, kept, 1] = start, end
                kept += 1
        for column in range(kept, num_ranges):
            ranges[token, column, 0] = ranges[token, column, 1] = length
        most = max(most, kept)
    return most


@inner
def _sort_ranges(starts: IntArray, ends: IntArray, ranges: IntArray, token: int) -> int:
    """Puts the ranges of a token that are not empty in order of their starts; gives their number.
    Ranges mostly come in order, or in two lists that are."""
    count = 0
    for column in range(len(starts)):
        start, end = starts[column, token], ends[column, token]
        if start < end:
            place = count
            while place > 0 and ranges[token, place - 1, 0] > start:
                ranges[token, place, 0] = ranges[token, place - 1, 0]
                ranges[token, place, 1] = ranges[token, place - 1, 1]
                place -= 1
            ranges[token, place, 0], ranges[token, place, 1] = start, end
            count += 1
    return count


def agree(what: str, left: IntArray | None, right: IntArray | None) -> IntArray | None:
    """Positions or targets of two combined masks, of the one that sets them; both must agree."""
    if left is None or right is None:
        return right if left is None else left
    if left.shape != right.shape:
        raise ValueError(f"two masks disagree about {what}: only one of them may set {what}")
    if not np.array_equal(left, right):
        token = int(np.argmax((left != right).reshape(len(left), -1).any(axis=1)))
        raise ValueError(
            f"two masks disagree about {what}: token {token} has {left[token]} in one and "
            f"{right[token]} in the other; only one of them may set {what}, or both the same"
        )
    return left
