"""RowRuns: the allowed key ranges of query rows, stored as runs that grow linearly.

Along a sequence, both ends of a mask's ranges mostly stay or move by one from row to row, so a few
runs say it all. Rows 0..3 of a causal mask, [0,1) [0,2) [0,3) [0,4), are one run: base [0,1), slope
[0,1). A mask without any such structure takes a run per row.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from dyncp.arrays import Int32, Int64, frozen, ranges_of, split_by_rank, starts_of
from dyncp.blocks import TokenBlocks
from dyncp.compiled import compiled, inner

# Rows whose slopes are compared together: 131,072 rows of two ranges take 0.15 ms, one by one 0.53.
STRETCH = 64


@dataclass(frozen=True, eq=False)
class RowRuns:
    """Runs of rows, ordered by block and start. Row `start + i` of a run has the ranges
    base + i × slope (sequence-relative); no run crosses a block border."""

    block: Int32  # [runs]
    start: Int32  # [runs] first row, in its sequence
    base: Int32  # [runs, R, 2]
    slope: Int32  # [runs, R, 2]

    def __len__(self) -> int:
        return len(self.block)

    @property
    def num_ranges(self) -> int:
        return int(self.base.shape[1])

    def ends(self, block_end: Int32) -> Int64:
        """First row after each run: where the next one of its block starts, or the block's end."""
        ends = block_end[self.block].astype(np.int64)
        goes_on = np.flatnonzero(self.block[1:] == self.block[:-1])
        ends[goes_on] = self.start[goes_on + 1]
        return ends

    def expand(self, block: int, start: int, end: int) -> Int32:
        """Ranges int32[end - start, R, 2] of the rows of one block, which spans [start, end)."""
        own = slice(*np.searchsorted(self.block, [block, block + 1]))
        first = self.start[own]
        counts = np.append(first[1:], end) - first
        assert len(first), f"plan has no key ranges for block {block}"
        step = np.arange(start, end) - np.repeat(first, counts)
        base, slope = (np.repeat(x[own], counts, axis=0) for x in (self.base, self.slope))
        return (base + slope * step[:, None, None]).astype(np.int32)


def build_row_runs(ranges: Sequence[Int32], blocks: TokenBlocks) -> RowRuns:
    """Runs of all rows of a batch; `ranges` has one int32[tokens, R, 2] per sequence."""
    most = max(rows.shape[1] for rows in ranges)
    first_block = np.searchsorted(blocks.sequence, np.arange(len(ranges) + 1)).tolist()
    starts = [
        _run_starts(_flat(rows).reshape(-1), 2 * rows.shape[1], len(rows), blocks.start[own:behind])
        for rows, own, behind in zip(ranges, first_block[:-1], first_block[1:], strict=True)
    ]
    bounds = starts_of(np.asarray([len(start) for start in starts]))
    base, slope = np.zeros((2, bounds[-1], 2 * most), np.int32)
    for rows, start, run in zip(ranges, starts, bounds.tolist(), strict=False):
        _fill_runs(_flat(rows), start, base, slope, run)
    offset = starts_of(np.asarray([len(rows) for rows in ranges]))
    start = np.concatenate(starts)
    row = start + np.repeat(offset[:-1], np.diff(bounds))
    block = np.searchsorted(starts_of(blocks.tokens)[:-1], row, side="right") - 1
    slope[blocks.tokens[block] == 1] = 0
    shape = (-1, most, 2)
    return RowRuns(*map(frozen, (block, start, base.reshape(shape), slope.reshape(shape))))


def _flat(rows: Int32) -> Int32:
    """int32[tokens, 2 R], read-only, as the compiled functions take it."""
    return frozen(rows).reshape(len(rows), -1)


@compiled
def _run_starts(rows: Int32, num_columns: int, length: int, block_start: Int32) -> Int64:
    """Rows at which a block begins or the slope of any column changes. The last row of a block goes
    on as the one before it did."""
    starts = np.empty(length, np.int64)
    count = 0
    for block in range(len(block_start)):
        starts[count] = block_start[block]
        count += 1
        end = block_start[block + 1] if block + 1 < len(block_start) else length
        row, stretch = block_start[block] + 1, STRETCH
        while row < end - 1:
            next_row = min(row + stretch, end - 1)
            if _is_straight(rows, num_columns, row, next_row):
                row, stretch = next_row, STRETCH
            elif stretch > 1:
                stretch = 1
            else:
                starts[count] = row
                count += 1
                row = next_row
    return starts[:count].copy()


@inner
def _is_straight(rows: Int32, num_columns: int, first: int, end: int) -> bool:
    """Whether no slope changes in rows [first, end). Unsigned indices let it be vectorised."""
    bend, columns = 0, np.uint64(num_columns)
    for cell in range(np.uint64(first) * columns, np.uint64(end) * columns):
        slope = rows[cell + columns] - rows[cell]
        bend |= slope ^ (rows[cell] - rows[cell - columns])
    return bend == 0


@compiled
def _fill_runs(rows: Int32, starts: Int64, base: Int32, slope: Int32, run: int) -> None:
    """Ranges at the starts and how they grow there, from row `run` of base and slope on; columns
    that the rows do not have are empty ranges."""
    length, num_columns = rows.shape
    for start in starts:
        for column in range(base.shape[1]):
            base[run, column] = rows[start, column] if column < num_columns else length
        if start + 1 < length:
            for column in range(num_columns):
                slope[run, column] = rows[start + 1, column] - rows[start, column]
        run += 1


def split_row_runs(
    runs: RowRuns, num_blocks: int, rank: Int64, block: Int64, num_ranks: int
) -> list[RowRuns]:
    """The runs of the blocks that each rank needs: distinct (rank, block), ordered."""
    counts = np.bincount(runs.block, minlength=num_blocks)
    wanted = ranges_of(starts_of(counts)[block], counts[block])
    of_rank = starts_of(np.bincount(rank, counts[block], num_ranks).astype(np.int64))
    columns = (runs.block, runs.start, runs.base, runs.slope)
    return split_by_rank(RowRuns, [column[wanted] for column in columns], of_rank)
