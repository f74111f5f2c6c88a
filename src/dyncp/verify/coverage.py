"""Invariants 1 and 6: the tiles of all ranks cover every allowed pair of the batch exactly once,
and kernel calls compute exactly the pairs of their tiles."""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from dyncp.arrays import Bool, Columns, Int32, Int64
from dyncp.blocks import Batch
from dyncp.plan import OwnedBlocks, Plan, RankPlan, RowRuns

IntArray = Int32 | Int64


def decode_rows(blocks: OwnedBlocks, rows: RowRuns) -> tuple[Int64, Int64, Int64]:
    """Every row that the runs describe: its block int64[rows], its index in the sequence
    int64[rows], and its key ranges int64[rows, R, 2].

    A run ends at the next run of its block, or at the block's end: runs that start at rows 4
    and 6 of a block [4, 9) have rows 4, 5 and 6, 7, 8.
    """
    stop = blocks.end[rows.block].astype(np.int64)
    not_last = np.flatnonzero(rows.block[1:] == rows.block[:-1])
    stop[not_last] = rows.start[not_last + 1]
    count = stop - rows.start
    run = np.repeat(np.arange(len(rows)), count)
    step = np.arange(len(run)) - np.repeat(np.cumsum(count) - count, count)
    ranges = rows.base[run] + step[:, None, None] * rows.slope[run].astype(np.int64)
    return rows.block[run].astype(np.int64), rows.start[run] + step, ranges


def count_pairs(ranges: Int32, borders: Int64) -> Int64:
    """Allowed pairs of one sequence between blocks with these borders, int64[blocks, blocks].

    To count a range's keys in each key block, borders outside the range are moved to its ends:
    range [1, 4) and borders 0, 2, 6 give 1, 2, 4, so 1 key in the first block and 2 in the second.
    """
    rows = np.zeros((len(borders) - 1, len(borders)), np.int64)
    for block, (first, last) in enumerate(pairwise(borders)):
        start, end = (ranges[first:last, :, side].reshape(-1, 1) for side in (0, 1))
        moved = np.minimum(np.maximum(borders, start), end)
        rows[block] = moved.sum(axis=0)
    return np.diff(rows, axis=1)


def check_batch(plan: Plan, batch: Batch) -> Iterator[str]:
    """One sentence for each difference in sequence lengths and mask names."""
    part = plan.parts[0]
    if part.lengths.tolist() != list(batch.lengths):
        planned, given = _short(part.lengths), _short(batch.lengths)
        yield f"the plan is for lengths {planned}, the batch has {given}"
    if part.masks.keys() != batch.masks.keys():
        yield f"the plan has masks {sorted(part.masks)}, the batch has {sorted(batch.masks)}"


def _short(values: object) -> str:
    numbers = np.asarray(values).tolist()
    return str(numbers if len(numbers) <= 8 else [*numbers[:8], "..."])


@dataclass(frozen=True, eq=False)
class AllTiles(Columns):
    """The tiles of one mask on all ranks."""

    rank: Int64
    q_block: Int64
    k_block: Int64
    head_group: Int64
    pairs: Int64

    def keys(self, part: RankPlan) -> Int64:
        """A number that identifies (query block, key block, head group)."""
        blocks = self.q_block * len(part.blocks) + self.k_block
        return blocks * len(part.head_groups) + self.head_group

    def name(self, index: int | np.integer) -> str:
        return (
            f"the tile of query block {self.q_block[index]}, key block {self.k_block[index]} and "
            f"head group {self.head_group[index]}"
        )


def collect_tiles(plan: Plan, name: str) -> AllTiles:
    tiles = [part.masks[name].tiles for part in plan.parts]
    q_block, k_block, group, pairs = (
        np.concatenate([getattr(t, column) for t in tiles]).astype(np.int64)
        for column in ("q_block", "k_block", "head_group", "pairs")
    )
    rank = np.repeat(np.arange(len(tiles)), [len(t) for t in tiles])
    return AllTiles(rank, q_block, k_block, group, pairs)


def _required_tiles(batch: Batch, name: str, part: RankPlan) -> AllTiles:
    """The tiles that the batch's masks require, counted from their ranges; rank is -1."""
    q_blocks, k_blocks, pairs = [], [], []
    first = 0
    for sequence, mask in enumerate(batch.masks[name]):
        own = part.blocks.sequence == sequence
        borders = np.append(part.blocks.start[own], mask.length).astype(np.int64)
        counts = count_pairs(mask.ranges, borders)
        q_index, k_index = np.nonzero(counts)
        q_blocks.append(q_index + first)
        k_blocks.append(k_index + first)
        pairs.append(counts[q_index, k_index])
        first += len(counts)
    groups = len(part.head_groups)
    q_block, k_block, count = (
        np.tile(np.concatenate(x), groups) for x in (q_blocks, k_blocks, pairs)
    )
    group = np.repeat(np.arange(groups), len(q_block) // groups)
    return AllTiles(np.full(len(group), -1), q_block, k_block, group, count)


def check_tiles(given: AllTiles, part: RankPlan, batch: Batch, name: str) -> Iterator[str]:
    """Checks that every required tile is on one rank, with its true number of pairs."""
    wanted = _required_tiles(batch, name, part)
    given_keys, wanted_keys = given.keys(part), wanted.keys(part)
    allowed = dict(zip(wanted_keys.tolist(), wanted.pairs.tolist(), strict=True))
    declared = zip(given_keys.tolist(), given.pairs.tolist(), strict=True)
    for index, (key, pairs) in enumerate(declared):
        if allowed.get(key) != pairs:
            where = f"{given.name(index)} on rank {given.rank[index]}"
            yield f"{where} declares {pairs} pairs; the mask allows {allowed.get(key, 0)}"
    for index in np.flatnonzero(~np.isin(wanted_keys, given_keys)).tolist():
        yield f"{wanted.name(index)} ({wanted.pairs[index]} pairs) is on no rank"
    _, first, count = np.unique(given_keys, return_index=True, return_counts=True)
    for index in first[count > 1]:
        ranks = given.rank[given_keys == given_keys[index]].tolist()
        yield f"{given.name(index)} is computed twice, on ranks {ranks}"
    total = sum(int(np.diff(mask.ranges.astype(np.int64)).sum()) for mask in batch.masks[name])
    for group in range(len(part.head_groups)):
        held = int(given.pairs[given.head_group == group].sum())
        if held != total:
            yield f"the tiles of head group {group} hold {held} pairs; the mask allows {total}"


def check_rows(part: RankPlan, batch: Batch, name: str) -> Iterator[str]:
    """Checks that the row runs decode to the ranges of the batch's masks. Additional columns must
    be empty ranges at the end of the sequence."""
    of_row, row, ranges = decode_rows(part.blocks, part.masks[name].rows)
    blocks, bounds = np.unique(of_row, return_index=True)
    for block, own in zip(blocks.tolist(), pairwise([*bounds, len(row)]), strict=True):
        mask, rows = batch.masks[name][part.blocks.sequence[block]], slice(*own)
        columns = max(ranges.shape[1], mask.ranges.shape[1])
        wanted = np.full((len(row[rows]), columns, 2), mask.length)
        wanted[:, : mask.ranges.shape[1]] = mask.ranges[row[rows]]
        given = np.full_like(wanted, -1)
        given[:, : ranges.shape[1]] = ranges[rows]
        wrong = (given != wanted).any(axis=(1, 2))
        if wrong.any():
            first = int(np.argmax(wrong))
            yield (
                f"row {row[rows][first]} of block {block} has key ranges {given[first].tolist()}; "
                f"the batch's mask says {wanted[first].tolist()}"
            )


@dataclass(frozen=True, eq=False)
class ListedKernelTiles:
    """The kernel tiles that a GPU kernel computes, as plain arrays. A kernel tile has `side` query
    rows × `side` key rows. If it is `full`, all its pairs are computed; otherwise those whose key
    row is in a range of the query row."""

    side: int
    q_tile: Int64  # [listed]
    k_tile: Int64  # [listed]
    full: Bool  # [listed]
    ranges: IntArray  # [query rows, R, 2], ranges of key rows
    q_coordinates: Int64  # [query rows], -1 if unused
    k_coordinates: Int64  # [key rows], -1 if unused


def compare_pairs(wanted: Int64, computed: Int64, unused: Int64) -> Iterator[str]:
    """One sentence for each pair that is not computed `wanted` times, and for each query that
    attends unused rows."""
    for query in np.flatnonzero(unused).tolist():
        yield f"the query at coordinate {query} attends rows that hold no key"
    for query, key in np.argwhere(wanted != computed).tolist():
        yield (
            f"the pair of coordinates ({query}, {key}) is computed {computed[query, key]} times by "
            f"the kernel tiles, and belongs to {wanted[query, key]} tiles of the call"
        )


def find_misplaced(batch: Batch, listed: ListedKernelTiles) -> Iterator[str]:
    """One sentence for each array with an index out of bounds or of the wrong length."""
    for name, tile, coordinates in (
        ("query", listed.q_tile, listed.q_coordinates),
        ("key", listed.k_tile, listed.k_coordinates),
    ):
        count = -(-len(coordinates) // listed.side)
        if ((tile < 0) | (tile >= count)).any():
            yield f"a listed kernel tile is outside the {count} of the {name} rows"
        if ((coordinates < -1) | (coordinates >= batch.num_tokens)).any():
            yield f"a {name} row has a coordinate outside the batch"
    lengths = (
        {len(listed.q_tile), len(listed.k_tile), len(listed.full)},
        {len(listed.ranges), len(listed.q_coordinates)},
    )
    if max(map(len, lengths)) > 1:
        yield "the arrays of the kernel call differ in length"


def pairs_of_tiles(
    batch: Batch, name: str, blocks: OwnedBlocks, q_block: IntArray, k_block: IntArray
) -> Int64:
    """How many of the tiles (q_block[i], k_block[i]) each allowed pair is in, [tokens, tokens]."""
    pairs = np.zeros((batch.num_tokens, batch.num_tokens), np.int64)
    dense = {s: batch.masks[name][s].dense() for s in np.unique(blocks.sequence[q_block]).tolist()}
    for q_index, k_index in zip(q_block.tolist(), k_block.tolist(), strict=True):
        sequence = int(blocks.sequence[q_index])
        first = sum(batch.lengths[:sequence])
        rows = slice(int(blocks.start[q_index]), int(blocks.end[q_index]))
        keys = slice(int(blocks.start[k_index]), int(blocks.end[k_index]))
        shifted = (slice(first + side.start, first + side.stop) for side in (rows, keys))
        pairs[tuple(shifted)] += dense[sequence][rows, keys]
    return pairs


def pairs_of_kernel_tiles(batch: Batch, listed: ListedKernelTiles) -> tuple[Int64, Int64]:
    """How many times the kernel computes each pair, [tokens, tokens], counting overlapping ranges
    and rows several times; and how many unused key rows each query attends, [tokens]."""
    pairs = np.zeros((batch.num_tokens, batch.num_tokens), np.int64)
    unused = np.zeros(batch.num_tokens, np.int64)
    columns, side = (listed.q_tile, listed.k_tile, listed.full), listed.side
    for q_tile, k_tile, full in zip(*(column.tolist() for column in columns), strict=True):
        rows, keys = (slice(tile * side, (tile + 1) * side) for tile in (q_tile, k_tile))
        start, end = listed.ranges[rows, :, :1], listed.ranges[rows, :, 1:]
        query, key = listed.q_coordinates[rows], listed.k_coordinates[keys]
        key_row = keys.start + np.arange(len(key))
        times = ((key_row >= start) & (key_row < end)).sum(axis=1)
        times = np.ones_like(times) if full else times
        row, column = np.nonzero(times * (query >= 0)[:, None])
        real = key[column] >= 0
        np.add.at(unused, query[row[~real]], 1)
        row, column = row[real], column[real]
        np.add.at(pairs, (query[row], key[column]), times[row, column])
    return pairs, unused
