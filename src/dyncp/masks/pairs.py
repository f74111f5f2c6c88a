"""Exact numbers of allowed pairs per (query block, key block), by interval arithmetic.

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
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

import numpy as np
import numpy.typing as npt

from dyncp.masks.compose import IntArray

if TYPE_CHECKING:
    from dyncp.masks.mask import Mask

PairCounts = npt.NDArray[np.int64]
Integer = TypeVar("Integer", np.int32, np.int64)

# Ranges counted in one pass: 4,000 sequences of 60 tokens take 13 ms, and 18 ms with 1 << 17.
PASS_RANGES = 1 << 15


def count_tile_pairs(mask: Mask, block_size: int) -> PairCounts:
    """`int64[num_blocks, num_blocks]`: allowed pairs of every (query block, key block).

    The last block may be shorter. `count_tile_pairs(masks.causal(5), 2)`:

        3 0 0
        4 3 0
        2 2 1
    """
    return count_batch_tile_pairs([mask], [block_size])[0]


def count_batch_tile_pairs(masks: Sequence[Mask], block_sizes: Sequence[int]) -> list[PairCounts]:
    """`count_tile_pairs` of every mask with its own block size; short sequences share a pass."""
    _check(masks, block_sizes)
    counts: list[PairCounts] = []
    for first, last in _passes(masks):
        counts += _count_pass(masks[first:last], block_sizes[first:last])
    return counts


def _check(masks: Sequence[Mask], block_sizes: Sequence[int]) -> None:
    if len(masks) != len(block_sizes):
        raise ValueError(f"{len(masks)} masks need as many block sizes, not {len(block_sizes)}")
    for index, block_size in enumerate(block_sizes):
        if block_size < 1:
            raise ValueError(f"block size {index} is {block_size}; allowed is at least 1")


def _passes(masks: Sequence[Mask]) -> Iterator[tuple[int, int]]:
    """Consecutive masks with about PASS_RANGES ranges together; a long one is a pass of its own."""
    first = filled = 0
    for index, mask in enumerate(masks):
        size = mask.ranges.shape[0] * mask.ranges.shape[1]
        if index > first and filled + size > PASS_RANGES:
            yield first, index
            first, filled = index, 0
        filled += size
    if first < len(masks):
        yield first, len(masks)


@dataclass(frozen=True, slots=True)
class _Grid:
    """The tiles of a pass in one line: sequence by sequence, query block by query block."""

    lengths: PairCounts  # tokens of each sequence
    sizes: PairCounts  # block size of each sequence
    num_blocks: PairCounts
    first_tile: PairCounts  # where each sequence's tiles begin
    num_tiles: int


def _count_pass(masks: Sequence[Mask], block_sizes: Sequence[int]) -> list[PairCounts]:
    grid = _grid([mask.length for mask in masks], block_sizes)
    borders = _borders(masks)
    tiles = _tiles_of(borders, masks, grid)
    counts = _difference_of_borders(grid, *_histograms(tiles, borders, grid.num_tiles))
    shapes = zip(grid.first_tile.tolist(), grid.num_blocks.tolist(), strict=True)
    return [counts[first : first + n * n].reshape(n, n) for first, n in shapes]


def _borders(masks: Sequence[Mask]) -> IntArray:
    """Starts and ends of all ranges, `int32[2, ranges]`."""
    ranges = [mask.ranges.reshape(-1, 2) for mask in masks]
    return np.ascontiguousarray((ranges[0] if len(ranges) == 1 else np.concatenate(ranges)).T)


def _grid(lengths: Sequence[int], block_sizes: Sequence[int]) -> _Grid:
    length = np.array(lengths, np.int64)
    size = np.minimum(np.array(block_sizes, np.int64), length)
    num_blocks = -(-length // size)
    last_tile = np.cumsum(num_blocks**2)
    return _Grid(length, size, num_blocks, last_tile - num_blocks**2, int(last_tile[-1]))


def _tiles_of(borders: IntArray, masks: Sequence[Mask], grid: _Grid) -> PairCounts:
    """The tile that every start and every end falls in, `int64[2, ranges]`."""
    columns = np.array([mask.ranges.shape[1] for mask in masks], np.int64)
    num_ranges = grid.lengths * columns
    sizes = _spread(grid.sizes.astype(np.int32), num_ranges)
    num_blocks = _spread(grid.num_blocks.astype(np.int32), num_ranges)
    key_blocks = borders // sizes
    # The border at the very end of a sequence counts nothing, whichever block it falls in.
    np.minimum(key_blocks, num_blocks - 1, out=key_blocks)
    # Range r of a sequence belongs to token r // columns, so to query block r // (columns * size).
    ranges = np.arange(borders.shape[1], dtype=np.int32)
    ranges -= _spread((np.cumsum(num_ranges) - num_ranges).astype(np.int32), num_ranges)
    query_blocks = ranges // _spread((columns * grid.sizes).astype(np.int32), num_ranges)
    first_tile = query_blocks * _spread(grid.num_blocks, num_ranges)
    first_tile += _spread(grid.first_tile, num_ranges)
    return first_tile + key_blocks


def _histograms(
    tiles: PairCounts, borders: IntArray, num_tiles: int
) -> tuple[PairCounts, PairCounts]:
    """Per tile, starts less ends: how many, and their sum (exact in float64 below 2^53)."""
    starts, ends = (np.bincount(side, minlength=num_tiles) for side in tiles)
    start_sums, end_sums = (
        np.bincount(side, weights, num_tiles) for side, weights in zip(tiles, borders, strict=True)
    )
    return starts - ends, (start_sums - end_sums).astype(np.int64)


def _difference_of_borders(grid: _Grid, counts: PairCounts, sums: PairCounts) -> PairCounts:
    """Pairs per tile of the histograms: keys below its right border less those below its left."""
    row_tiles = np.repeat(grid.num_blocks, grid.num_blocks)  # tiles in each row of tiles
    row_first = np.cumsum(row_tiles) - row_tiles
    key_block = np.arange(grid.num_tiles) - np.repeat(row_first, row_tiles)
    of_sequence = grid.num_blocks**2
    border = (key_block + 1) * _spread(grid.sizes, of_sequence)
    np.minimum(border, _spread(grid.lengths, of_sequence), out=border)
    below = border * _sum_along_rows(counts, row_first, row_tiles)
    below -= _sum_along_rows(sums, row_first, row_tiles)
    pairs = np.diff(below, prepend=0)
    pairs[row_first] = below[row_first]
    return pairs


def _sum_along_rows(values: PairCounts, row_first: PairCounts, row_tiles: PairCounts) -> PairCounts:
    """Running sums that begin anew in every row of tiles."""
    running = np.cumsum(values)
    before_row = running[row_first] - values[row_first]
    return running - np.repeat(before_row, row_tiles)


def _spread(values: npt.NDArray[Integer], counts: PairCounts) -> npt.NDArray[Integer]:
    """Every value as often as its count says; one value stays one and broadcasts."""
    return values if len(values) == 1 else np.repeat(values, counts)
