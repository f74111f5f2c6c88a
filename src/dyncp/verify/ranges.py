"""The verifier's own arithmetic of key ranges: decoding row runs and counting pairs."""

from itertools import pairwise

import numpy as np

from dyncp.arrays import Int32, Int64
from dyncp.plan import OwnedBlocks, RowRuns


def decode_rows(blocks: OwnedBlocks, rows: RowRuns) -> tuple[Int64, Int64, Int64]:
    """Every row that the runs speak of: its block int64[rows], its position in the sequence
    int64[rows], and its ranges int64[rows, R, 2].

    A run goes on to the next one of its block, or to the block's end: runs that start at rows 4
    and 6 of a block [4, 9) have rows 4, 5 and 6, 7, 8.
    """
    runs = len(rows.block)
    stop = blocks.end[rows.block].astype(np.int64)
    goes_on = np.flatnonzero(rows.block[1:] == rows.block[:-1])
    stop[goes_on] = rows.start[goes_on + 1]
    count = stop - rows.start
    run = np.repeat(np.arange(runs), count)
    step = np.arange(len(run)) - np.repeat(np.cumsum(count) - count, count)
    ranges = rows.base[run] + step[:, None, None] * rows.slope[run].astype(np.int64)
    return rows.block[run].astype(np.int64), rows.start[run] + step, ranges


def count_pairs(ranges: Int32, borders: Int64) -> Int64:
    """Allowed pairs of one sequence between blocks with these borders, int64[blocks, blocks].

    A row's range, cut to a key block, has as many keys as both of the block's borders lie apart
    when they are moved into the range: range [1, 4) and borders 0, 2, 6 give 1, 2, 4, so 1 and 2.
    """
    rows = np.zeros((len(borders) - 1, len(borders)), np.int64)
    for block, (first, last) in enumerate(pairwise(borders)):
        start, end = (ranges[first:last, :, side].reshape(-1, 1) for side in (0, 1))
        moved = np.minimum(np.maximum(borders, start), end)
        rows[block] = moved.sum(axis=0)
    return np.diff(rows, axis=1)
