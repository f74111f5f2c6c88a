"""Exact pair counts per (query block, key block) by interval arithmetic, and drawings from them.

In a row with the range [s, e), the allowed keys below x are max(x - s, 0) - max(x - e, 0). At the
border x of a key block, the sum over the rows of a query block therefore needs only how many starts
and ends lie below x, and their sums: histograms over key blocks, added up from the left.

    causal, 4 tokens, blocks of 2; query block 1 holds the rows [0, 3) and [0, 4)
    border x               2                4
    starts below x         2, sum 0         2, sum 0
    ends below x           0, sum 0         1, sum 3
    keys below x           2*(2-0)-(0-0)=4  4*(2-1)-(0-3)=7      tiles: 4 and 7-4=3
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from dyncp.arrays import Int32
from dyncp.compiled import compiled

if TYPE_CHECKING:
    from dyncp.masks.mask import Mask


PairCounts = npt.NDArray[np.int64]

# Sequences up to so many tokens are counted in one call.
TOGETHER = 1 << 16


def count_tile_pairs(mask: Mask, block_size: int) -> PairCounts:
    """`int64[num_blocks, num_blocks]`: allowed pairs of every (query block, key block).

    The last block may be shorter. `count_tile_pairs(masks.causal(5), 2)`:

        3 0 0
        4 3 0
        2 2 1
    """
    return count_batch_tile_pairs([mask], [block_size])[0]


def count_batch_tile_pairs(masks: Sequence[Mask], block_sizes: Sequence[int]) -> list[PairCounts]:
    """`count_tile_pairs` of every mask with its own block size."""
    _check(masks, block_sizes)
    counts = []
    for mask, block_size in zip(masks, block_sizes, strict=True):
        num_blocks = -(-mask.length // block_size)
        q_block, k_block, pairs = list_tiles([mask], [block_size])
        matrix = np.zeros((num_blocks, num_blocks), np.int64)
        matrix[q_block, k_block] = pairs
        counts.append(matrix)
    return counts


def list_tiles(
    masks: Sequence[Mask], block_sizes: Sequence[int]
) -> tuple[Int32, Int32, PairCounts]:
    """Query block, key block and pairs of all tiles with any pairs, in that order; blocks are
    numbered through all sequences. `list_tiles([masks.causal(5)], [2])`:

        0 1 1 2 2 2    0 0 1 0 1 2    3 4 3 2 2 1
    """
    _check(masks, block_sizes)
    lengths = np.array([mask.length for mask in masks], np.int64)
    sizes = np.minimum(np.array(block_sizes, np.int64), lengths)
    num_blocks = -(-lengths // sizes)
    room = int((num_blocks**2).sum())  # memory that is not written costs nothing
    q_block, k_block = np.empty((2, room), np.int32)
    pairs = np.empty(room, np.int64)
    # Starts less ends in each key block; an end at the very end of a sequence may lie behind all.
    numbers, sums = np.zeros((2, int(num_blocks.max(initial=0)) + 1), np.int64)
    count = block = done = 0
    for rows, many in _joined([mask.ranges for mask in masks]):
        own = slice(done, done + many)
        count = _add_tiles(
            rows, lengths[own], sizes[own], block, q_block, k_block, pairs, count, numbers, sums
        )
        done, block = done + many, block + int(num_blocks[own].sum())
    return q_block[:count].copy(), k_block[:count].copy(), pairs[:count].copy()


def _joined(ranges: Sequence[Int32]) -> Iterator[tuple[Int32, int]]:
    """Rows of all sequences in order, those of many short ones together, and of how many."""
    first = 0
    while first < len(ranges):
        end, tokens, columns = first + 1, len(ranges[first]), ranges[first].shape[1]
        while end < len(ranges) and tokens < TOGETHER and ranges[end].shape[1] == columns:
            tokens, end = tokens + len(ranges[end]), end + 1
        own = ranges[first:end]
        yield np.ascontiguousarray(own[0]) if len(own) == 1 else np.concatenate(own), end - first
        first = end


def _check(masks: Sequence[Mask], block_sizes: Sequence[int]) -> None:
    if len(masks) != len(block_sizes):
        raise ValueError(f"{len(masks)} masks need as many block sizes, not {len(block_sizes)}")
    for index, block_size in enumerate(block_sizes):
        if block_size < 1:
            raise ValueError(f"block size {index} is {block_size}; allowed is at least 1")


@compiled
def _add_tiles(
    rows: Int32,
    lengths: PairCounts,
    sizes: PairCounts,
    first_block: int,
    q_block: Int32,
    k_block: Int32,
    pairs: PairCounts,
    count: int,
    numbers: PairCounts,
    sums: PairCounts,
) -> int:
    """Adds the tiles of sequences behind the first `count`; gives their new number. The histograms
    are 0 everywhere, before and after."""
    begin = 0
    for length, size in zip(lengths, sizes):  # noqa: B905 (not compiled otherwise)
        query = 0
        while query * size < length:
            row, end_row = begin + query * size, begin + min((query + 1) * size, length)
            first, last = _fill_histograms(rows, row, end_row, size, numbers, sums)
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
        first_block, begin = first_block + query, begin + length
    return count


@compiled
def _fill_histograms(
    rows: Int32, row: int, end_row: int, size: int, numbers: PairCounts, sums: PairCounts
) -> tuple[int, int]:
    """Adds the ranges of rows [row, end_row); gives the first and last key block they touch."""
    first, last, start_block, end_block = len(numbers), -1, 0, 0
    for token in range(row, end_row):
        for column in range(rows.shape[1]):
            start, end = rows[token, column, 0], rows[token, column, 1]
            if start < end:
                # Mostly those of the row before, and dividing takes long.
                if not start_block * size <= start < (start_block + 1) * size:
                    start_block = start // size
                if not end_block * size <= end < (end_block + 1) * size:
                    end_block = end // size
                numbers[start_block] += 1
                sums[start_block] += start
                numbers[end_block] -= 1
                sums[end_block] -= end
                first, last = min(first, start_block), max(last, end_block)
    return first, last


SHADES = "·░▒█"  # no pair, some, half of them or more, all


def draw_mask(mask: Mask, width: int = 64) -> str:
    """A line of numbers, then one line per query block: queries go down, keys to the right.

    A cell is █ if all its pairs are allowed, ▒ from half of them on, ░ below, · if none is.

        sliding_window: 4 tokens, 7 pairs, density 43.8 %
        █···
        ██··
        ·██·
        ··██
    """
    if width < 1:
        raise ValueError(f"width is {width}; allowed is at least 1 cell")
    block_size = -(-mask.length // width)
    pairs = count_tile_pairs(mask, block_size)
    edges = np.minimum(np.arange(len(pairs) + 1) * block_size, mask.length)
    possible = np.diff(edges)[:, None] * np.diff(edges)
    shades = (pairs > 0) * 1 + (2 * pairs >= possible) + (pairs == possible)
    rows = ["".join(SHADES[shade] for shade in row) for row in shades]
    return "\n".join([_caption(mask), *rows])


def _caption(mask: Mask) -> str:
    density = 100 * mask.num_pairs / mask.length**2
    numbers = f"{mask.length:,} tokens, {mask.num_pairs:,} pairs, density {density:.3g} %"
    return f"{mask.name}: {numbers}"
