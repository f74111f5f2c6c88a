"""RowRuns: the allowed key ranges of query rows, stored as runs that grow linearly.

Along a sequence, both ends of a mask's ranges mostly stay or move by one from row to row, so a few
runs say it all. Rows 0..3 of a causal mask, [0,1) [0,2) [0,3) [0,4), are one run: base [0,1), slope
[0,1). A mask without any such structure takes a run per row.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from dyncp.arrays import Int32, Int64, frozen, ranges_of, split_by_rank, starts_of
from dyncp.blocks import TokenBlocks
from dyncp.compiled import compiled, inner
from dyncp.masks import JoinedRanges

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


def build_row_runs(joined: Sequence[JoinedRanges], blocks: TokenBlocks) -> RowRuns:
    """Runs of all rows of a batch, whose key ranges these are."""
    block, start = np.empty((2, int(blocks.tokens.sum())), np.int32)
    num_blocks, ends = np.bincount(blocks.sequence), [0]
    sequences = starts_of(np.array([len(own.lengths) for own in joined])).tolist()
    for own, first in zip(joined, sequences, strict=False):
        counts = num_blocks[first : first + len(own.lengths)]
        first_block = int(num_blocks[:first].sum())
        flat = own.cells.reshape(-1), own.lengths, 2 * own.columns
        ends.append(_find_runs(*flat, blocks.start, first_block, counts, block, start, ends[-1]))
    block, start = block[: ends[-1]].copy(), start[: ends[-1]].copy()
    most = max(int(own.columns.max()) for own in joined)
    base, slope = np.zeros((2, len(block), most, 2), np.int32)
    for own, first, runs in zip(joined, sequences, pairwise(ends), strict=False):
        here = slice(*runs)
        of_run = own, blocks.sequence[block[here]] - first, start[here]
        _fill_runs(*of_run, base[here].reshape(-1, 2 * most), slope[here].reshape(-1, 2 * most))
    slope[blocks.tokens[block] == 1] = 0
    return RowRuns(*map(frozen, (block, start, base, slope)))


@compiled
def _find_runs(
    cells: Int32,
    lengths: Int64,
    widths: Int64,
    block_start: Int32,
    number: int,
    num_blocks: Int64,
    block: Int32,
    start: Int32,
    count: int,
) -> int:
    """Rows at which a block begins (from block `number` on) or the slope of any column changes,
    behind the first `count`; gives their new number. The last row of a block goes on as the one
    before it did."""
    cell = 0
    for sequence in range(len(lengths)):
        length, width = lengths[sequence], widths[sequence]
        last = number + num_blocks[sequence] - 1
        while number <= last:
            begin = block_start[number]
            end = block_start[number + 1] if number < last else length
            block[count], start[count], count = number, begin, count + 1
            row, stretch = begin + 1, STRETCH
            while row < end - 1:
                next_row = min(row + stretch, end - 1)
                if _is_straight(cells, cell + row * width, cell + next_row * width, width):
                    row, stretch = next_row, STRETCH
                elif stretch > 1:
                    stretch = 1
                else:
                    block[count], start[count], count = number, row, count + 1
                    row = next_row
            number += 1
        cell += length * width
    return count


@inner
def _is_straight(cells: Int32, first: int, end: int, width: int) -> bool:
    """Whether no slope changes in rows of so many cells. Unsigned indices let it be vectorised."""
    bend, columns = 0, np.uint64(width)
    for cell in range(np.uint64(first), np.uint64(end)):
        slope = cells[cell + columns] - cells[cell]
        bend |= slope ^ (cells[cell] - cells[cell - columns])
    return bend == 0


@compiled
def _fill_runs(
    joined: JoinedRanges, sequence: Int32, start: Int32, base: Int32, slope: Int32
) -> None:
    """Ranges at the starts and how they grow there; columns that a sequence does not have are empty
    ranges."""
    first = np.zeros(len(joined.lengths), np.int64)
    for s in range(1, len(first)):
        first[s] = first[s - 1] + joined.lengths[s - 1] * joined.columns[s - 1]
    for run in range(len(start)):
        s = sequence[run]
        length, width, cells = joined.lengths[s], 2 * joined.columns[s], joined.cells
        row = first[s] + start[run] * joined.columns[s]
        for column in range(base.shape[1]):
            base[run, column] = cells[row + column // 2, column % 2] if column < width else length
        if start[run] + 1 < length:
            for column in range(width):
                at, side = row + column // 2, column % 2
                slope[run, column] = cells[at + joined.columns[s], side] - cells[at, side]


def split_row_runs(
    runs: RowRuns, num_blocks: int, rank: Int64, block: Int64, num_ranks: int
) -> list[RowRuns]:
    """The runs of the blocks that each rank needs: distinct (rank, block), ordered."""
    counts = np.bincount(runs.block, minlength=num_blocks)
    wanted = ranges_of(starts_of(counts)[block], counts[block])
    of_rank = starts_of(np.bincount(rank, counts[block], num_ranks).astype(np.int64))
    columns = (runs.block, runs.start, runs.base, runs.slope)
    return split_by_rank(RowRuns, [column[wanted] for column in columns], of_rank)
