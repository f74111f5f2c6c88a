"""RowRuns: the allowed key ranges of query rows, stored as runs that grow linearly.

Along a sequence, both ends of a mask's ranges mostly stay or move by one from row to row, so a few
runs say it all. Rows 0..3 of a causal mask, [0,1) [0,2) [0,3) [0,4), are one run: base [0,1), slope
[0,1). A mask without any such structure takes a run per row.
"""

from dataclasses import dataclass

import numpy as np

from dyncp.arrays import Int32, Int64, frozen, ranges_of, split_by_rank, starts_of
from dyncp.blocks import TokenBlocks
from dyncp.masks import LinearRanges


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


def build_row_runs(runs: LinearRanges, blocks: TokenBlocks) -> RowRuns:
    """The runs of all sequences, cut where blocks begin."""
    of_sequence = np.repeat(starts_of(runs.lengths)[:-1], np.diff(runs.first))
    run_row, block_row = of_sequence + runs.start, starts_of(blocks.tokens)
    of_run = np.searchsorted(block_row, run_row, side="right") - 1
    # The last row of a block goes on as the one before it did.
    inside = (run_row > block_row[of_run]) & (run_row < block_row[of_run + 1] - 1)
    row = np.concatenate([block_row[:-1], run_row[inside]])
    block = np.concatenate([np.arange(len(blocks)), of_run[inside]])
    order = np.argsort(row)
    row, block = row[order], block[order]
    run = np.searchsorted(run_row, row, side="right") - 1
    step, slope = row - run_row[run], runs.slope[run]
    base = runs.base[run] + step[:, None, None].astype(np.int32) * slope
    slope[blocks.tokens[block] == 1] = 0
    start = row - block_row[block] + blocks.start[block]
    return RowRuns(*map(frozen, (block, start, base, slope)))


def split_row_runs(
    runs: RowRuns, num_blocks: int, rank: Int64, block: Int64, num_ranks: int
) -> list[RowRuns]:
    """The runs of the blocks that each rank needs: distinct (rank, block), ordered."""
    counts = np.bincount(runs.block, minlength=num_blocks)
    wanted = ranges_of(starts_of(counts)[block], counts[block])
    of_rank = starts_of(np.bincount(rank, counts[block], num_ranks).astype(np.int64))
    columns = (runs.block, runs.start, runs.base, runs.slope)
    return split_by_rank(RowRuns, [column[wanted] for column in columns], of_rank)
