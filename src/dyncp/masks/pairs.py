"""Key ranges of a batch as runs of rows, and exact pair counts per (query block, key block).

From one row to the next, both ends of a mask's ranges usually stay or move by one, so a few runs
describe them all: rows 0..3 of a causal mask, [0,1) [0,2) [0,3) [0,4), are one run. A mask without
such structure needs one run per row.

Pairs are counted by interval arithmetic. A row with the range [s, e) has max(x - s, 0) -
max(x - e, 0) allowed keys below x. Summed over the rows of a query block, the count below the end x
of a key block needs only the number of starts and ends below x, and their sums. These are prefix
sums of histograms over key blocks. Along a run, starts and ends grow linearly, so many rows are
counted at once.

    causal, 4 tokens, blocks of 2; query block 1 holds the rows [0, 3) and [0, 4)
    border x               2                4
    starts below x         2, sum 0         2, sum 0
    ends below x           0, sum 0         1, sum 3
    keys below x           2*(2-0)-(0-0)=4  4*(2-1)-(0-3)=7      tiles: 4 and 7-4=3
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from dyncp.arrays import Int32, Int64, starts_of
from dyncp.checks import whole_number
from dyncp.compiled import compiled, inner

if TYPE_CHECKING:
    from dyncp.masks.mask import Mask


class LinearRanges(NamedTuple):
    """The ranges of all sequences as runs of rows. Along a run both ends of every range change by
    a constant from row to row: row `start + i` has the ranges base + i × slope. The runs of
    sequence s are `first[s]` to `first[s + 1]`, exclusive."""

    lengths: Int64  # [sequences]
    first: Int64  # [sequences + 1]
    start: Int32  # [runs]
    base: Int32  # [runs, R, 2]
    slope: Int32  # [runs, R, 2]


def find_runs(ranges: Sequence[Int32]) -> LinearRanges:
    """The longest possible runs of the ranges of all sequences, `int32[tokens, R, 2]` each.
    Sequences with fewer range columns than the widest one get empty ranges in the others."""
    lengths = np.array([len(rows) for rows in ranges], np.int64)
    columns = np.array([rows.shape[1] for rows in ranges], np.int64)
    cells = np.concatenate([rows.reshape(-1, 2) for rows in ranges])
    counts, start = np.empty_like(lengths), np.empty(int(lengths.sum()), np.int32)
    num_runs = _find_runs(cells.reshape(-1), lengths, 2 * columns, start, counts)
    start, width = start[:num_runs].copy(), int(columns.max())
    first_cell = np.repeat(starts_of(lengths * columns)[:-1], counts)
    length, columns = np.repeat(lengths, counts), np.repeat(columns, counts)
    column, row = np.arange(width), first_cell + start * columns
    here = row[:, None] + np.minimum(column, columns[:, None] - 1)
    base = cells[here]
    has_next = (start + 1 < length) * columns
    slope = cells[here + has_next[:, None]] - base
    absent = column >= columns[:, None]
    base[absent], slope[absent] = np.repeat(length, width - columns)[:, None], 0
    return LinearRanges(lengths, starts_of(counts), start, base, slope)


@compiled
def _find_runs(cells: Int32, lengths: Int64, widths: Int64, start: Int32, counts: Int64) -> int:
    """Writes to `start` the rows at which runs begin: first rows, and rows where the slope of any
    column changes. Writes to `counts` the number of runs of each sequence, and returns their sum.
    The last row of a sequence always continues the run before it."""
    first = count = 0
    for sequence in range(len(lengths)):
        width, before = widths[sequence], count
        start[count], count = 0, count + 1
        for row in range(1, lengths[sequence] - 1):
            bend, here = 0, first + row * width
            for cell in range(here, here + width):
                bend |= (cells[cell + width] - cells[cell]) ^ (cells[cell] - cells[cell - width])
            if bend != 0:
                start[count], count = row, count + 1
        counts[sequence] = count - before
        first += lengths[sequence] * width
    return count


def count_tile_pairs(mask: Mask, block_size: int) -> Int64:
    """`int64[num_blocks, num_blocks]`: the number of allowed pairs per (query block, key block).

    The last block may be shorter. `count_tile_pairs(masks.causal(5), 2)`:

        3 0 0
        4 3 0
        2 2 1
    """
    num_blocks = -(-mask.length // whole_number("block_size", block_size, 1))
    q_block, k_block, pairs = list_tiles(find_runs([mask.ranges]), [block_size])
    counts = np.zeros((num_blocks, num_blocks), np.int64)
    counts[q_block, k_block] = pairs
    return counts


def count_batch_tile_pairs(masks: Sequence[Mask], block_sizes: Sequence[int]) -> list[Int64]:
    """`count_tile_pairs` for every mask, each with its own block size."""
    if len(masks) != len(block_sizes):
        raise ValueError(f"{len(masks)} masks need as many block sizes; got {len(block_sizes)}")
    return [count_tile_pairs(*pair) for pair in zip(masks, block_sizes, strict=True)]


def list_tiles(
    runs: LinearRanges, block_sizes: Sequence[int] | Int64
) -> tuple[Int32, Int32, Int64]:
    """Query block, key block and number of pairs of every tile that has pairs, sorted by query
    block and key block. Blocks are numbered across all sequences. For `masks.causal(5)` in blocks
    of 2:

        0 1 1 2 2 2    0 0 1 0 1 2    3 4 3 2 2 1
    """
    sizes = np.minimum(np.asarray(block_sizes, np.int64), runs.lengths)
    num_blocks = -(-runs.lengths // sizes)
    room = int((num_blocks**2).sum())  # untouched pages cost no memory
    q_block, k_block = np.empty((2, room), np.int32)
    pairs = np.empty(room, np.int64)
    # Starts minus ends per key block; an end at the end of a sequence may fall after the last one.
    numbers, sums = np.zeros((2, int(num_blocks.max(initial=0)) + 1), np.int64)
    count = _add_tiles(runs, sizes, q_block, k_block, pairs, numbers, sums)
    return q_block[:count].copy(), k_block[:count].copy(), pairs[:count].copy()


@compiled
def _add_tiles(
    runs: LinearRanges,
    sizes: Int64,
    q_block: Int32,
    k_block: Int32,
    pairs: Int64,
    numbers: Int64,
    sums: Int64,
) -> int:
    """Writes the tiles and returns their number. The histograms `numbers` and `sums` are all zero
    before and after."""
    count = first_block = 0
    for sequence in range(len(sizes)):
        length, size, query = runs.lengths[sequence], sizes[sequence], 0
        run, last_run = runs.first[sequence], runs.first[sequence + 1] - 1
        while query * size < length:
            row, end = query * size, min((query + 1) * size, length)
            first, last = len(numbers), -1
            while row < end:
                while run < last_run and runs.start[run + 1] <= row:
                    run += 1
                until = min(end, runs.start[run + 1]) if run < last_run else end
                low, high = _add_rows(runs, run, row, until, size, numbers, sums)
                first, last, row = min(first, low), max(last, high), until
            number = total = below_left = 0
            for key in range(first, last + 1):
                number += numbers[key]
                total += sums[key]
                numbers[key] = sums[key] = 0
                below = min((key + 1) * size, length) * number - total
                if below != below_left:
                    q_block[count], k_block[count] = first_block + query, first_block + key
                    pairs[count] = below - below_left
                    count += 1
                below_left = below
            query += 1
        first_block += query
    return count


@inner
def _add_rows(
    runs: LinearRanges, run: int, row: int, end: int, size: int, numbers: Int64, sums: Int64
) -> tuple[int, int]:
    """Adds the ranges of rows [row, end) of a run to the histograms, and returns the first and the
    last key block that they touch. Empty ranges cancel out."""
    first, last, step, many = len(numbers), -1, row - runs.start[run], end - row
    for column in range(runs.base.shape[1]):
        start, grows = runs.base[run, column, 0], runs.slope[run, column, 0]
        stop, extends = runs.base[run, column, 1], runs.slope[run, column, 1]
        if start == stop and grows == extends:
            continue
        low, _ = _add_line(start + step * grows, grows, many, 1, size, numbers, sums)
        _, high = _add_line(stop + step * extends, extends, many, -1, size, numbers, sums)
        first, last = min(first, low), max(last, high)
    return first, last


@inner
def _add_line(
    value: int, slope: int, many: int, sign: int, size: int, numbers: Int64, sums: Int64
) -> tuple[int, int]:
    """Adds `many` numbers value, value + slope, ... to the histograms, and returns the first and
    the last block that contain one."""
    if slope < 0:
        value, slope = value + (many - 1) * slope, -slope
    first = block = value // size
    while many > 0:
        inside = many
        if slope > 0:
            inside = min(many, ((block + 1) * size - value + slope - 1) // slope)
        numbers[block] += sign * inside
        sums[block] += sign * (inside * value + slope * (inside * (inside - 1) // 2))
        many, value = many - inside, value + inside * slope
        if many > 0:
            block = value // size
    return first, block
