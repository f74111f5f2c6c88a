"""Key ranges of a batch as runs of rows along which they grow evenly.

Along a sequence, both ends of a mask's ranges mostly stay or move by one from row to row, so a few
runs say it all: rows 0..3 of a causal mask, [0,1) [0,2) [0,3) [0,4), are one run. A mask without
any such structure takes a run per row.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from dyncp.arrays import Int32, Int64
from dyncp.compiled import compiled, inner

# Sequences up to so many tokens are joined.
TOGETHER = 1 << 16


class JoinedRanges(NamedTuple):
    """Ranges of sequences one after the other, so that one call can look at many short ones:
    sequence s has `lengths[s]` rows of `columns[s]` ranges each. `cells` is `int32[ranges, 2]`,
    read-only."""

    cells: Int32
    lengths: Int64
    columns: Int64


def join_ranges(ranges: Sequence[Int32]) -> list[JoinedRanges]:
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

    lengths: Int64  # [sequences]
    first: Int64  # [sequences + 1]
    start: Int32  # [runs]
    base: Int32  # [runs, R, 2]
    slope: Int32  # [runs, R, 2]


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


def _lines(joined: JoinedRanges, sequence: Int64, start: Int32, most: int) -> tuple[Int32, Int32]:
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
    cells: Int32, lengths: Int64, widths: Int64, start: Int32, counts: Int64, count: int
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
def _is_straight(cells: Int32, first: int, end: int, width: int) -> bool:
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
