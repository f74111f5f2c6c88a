"""Tile lists: which kernel tiles of a call are full and which are partial, and the ranges of the
partial ones.

GPU kernels work on kernel tiles of 128 × 128 rows. Full tiles need no mask. In a partial tile, a
query row attends the key *rows* (not coordinates) that are in its ranges. Ranges are never read for
full and unlisted tiles, so what they say there does not matter, and few ranges suffice. Example
with tiles of 4 rows, for one query row:

    keys   0 1 2 3 | 4 5 6 7 | 8 9 . .      tiles 0 and 1 are full for all rows of this query tile,
    tile      full |    full | partial      tile 2 is partial

The row gets one range, [8, 10) or [0, 10): either is correct. Ranges stay this simple for received
blocks in any order, because they are ranges of rows, not of positions.
"""

from dataclasses import dataclass

import numpy as np

from dyncp.arrays import Bool, Int16, Int32, Int64, UInt8
from dyncp.compiled import compiled, inner
from dyncp.kernels.kernel import KernelCall

SIDE = 128
HALF = 64  # for kernels that are faster with finer lists
NONE, PARTIAL, FULL = 0, 1, 2
HEAVY = 2.0


@dataclass(frozen=True, eq=False)
class KernelTileMap:
    """The state of every kernel tile, and the ranges of the partial ones."""

    state: UInt8  # [query tiles, key tiles]: NONE, PARTIAL or FULL
    ranges: Int32  # [R, 2, query rows in whole tiles]: key rows, half-open


@dataclass(frozen=True, eq=False)
class TileLists:
    """The query tiles (or key tiles) to run. The entry of each lists the tiles of the other side
    that it is computed with: full ones as runs `[first, end)` of neighbours, partial ones by
    number.

        tile | number of runs | number of partial tiles | runs (`most_runs`) | partial tiles

    Tiles with the most work come first, so that the last ones to finish are short. The first
    `num_heavy` tiles have more than twice the mean work; kernels start these first, for all heads.
    """

    entries: Int32  # [tiles, columns]
    most_runs: int
    num_heavy: int


def map_kernel_tiles(call: KernelCall) -> KernelTileMap:
    state = classify_tiles(call, SIDE)
    rectangles, first_coordinate = _merge_neighbours(call)
    ranges = np.zeros((1, 2, len(state) * SIDE), np.int32)
    most = _fill_ranges(ranges, state, rectangles, first_coordinate, call.ranges)
    if most > 1:  # rounded up to a power of two: kernels are compiled for each number of ranges
        ranges = np.zeros((1 << (most - 1).bit_length(), 2, len(state) * SIDE), np.int32)
        _fill_ranges(ranges, state, rectangles, first_coordinate, call.ranges)
    return KernelTileMap(state, ranges)


def classify_tiles(call: KernelCall, side: int) -> UInt8:
    """The state of every tile of side × side rows, uint8[query tiles, key tiles]. A tile is FULL if
    it is whole and all its pairs are allowed."""
    num_rows, num_keys = len(call.q_coordinates), len(call.k_coordinates)
    area = np.zeros((-(-num_rows // side), -(-num_keys // side)), np.int16)
    _mark_tiles(area, *_merge_neighbours(call), call.ranges, side)
    state: UInt8 = np.where(area == side * side, FULL, area != 0).astype(np.uint8)
    return state


def list_tiles_of(state: UInt8, touched: Bool, side: int = SIDE) -> TileLists:
    """Lists of the tiles along the first axis of `state`. Every tile with a `touched` row is
    listed, even if it has no pairs to compute, because its results must be set to 0."""
    tiles = np.unique(np.flatnonzero(touched) // side)
    work = (state[tiles] != NONE).sum(axis=1)
    by_work = np.argsort(-work, kind="stable")
    tiles, work = tiles[by_work], work[by_work]
    full = np.pad(state[tiles] == FULL, ((0, 0), (1, 1)))
    num_runs, first = list_marked(full[:, 1:-1] & ~full[:, :-2])
    _, last = list_marked(full[:, 1:-1] & ~full[:, 2:])
    num_partial, partial = list_marked(state[tiles] == PARTIAL)
    runs = np.stack([first, last + 1], axis=-1).reshape(len(tiles), 2 * first.shape[1])
    entries = np.column_stack([tiles.astype(np.int32), num_runs, num_partial, runs, partial])
    num_heavy = int(np.count_nonzero(work > HEAVY * work.mean())) if len(tiles) else 0
    return TileLists(entries, first.shape[1], num_heavy)


def list_marked(marked: Bool) -> tuple[Int32, Int32]:
    """The number of marked columns of every row, [rows], and these columns, [rows, most]."""
    count = marked.sum(axis=1, dtype=np.int32)
    listed = np.zeros((len(marked), max(1, int(count.max(initial=0)))), np.int32)
    _fill_marked(listed, marked)
    return count, listed


@compiled
def _fill_marked(listed: Int32, marked: Bool) -> None:
    for row in range(marked.shape[0]):
        count = 0
        for column in range(marked.shape[1]):
            if marked[row, column]:
                listed[row, count] = column
                count += 1


def _merge_neighbours(call: KernelCall) -> tuple[Int64, Int64]:
    """The rectangles by query row and key row, and the coordinate of the first key of each.
    Rectangles of the same query rows are joined if rows and coordinates of their keys continue."""
    rectangles = call.rectangles
    ordered = rectangles[np.lexsort((rectangles[:, 2], rectangles[:, 0]))]
    last = call.k_coordinates[ordered[:-1, 3] - 1]
    follows = (ordered[1:, 0] == ordered[:-1, 0]) & (ordered[1:, 2] == ordered[:-1, 3])
    follows &= call.k_coordinates[ordered[1:, 2]] == last + 1
    head: Bool = np.append(True, ~follows)[: len(ordered)]
    merged = ordered[head]
    merged[:, 3] = ordered[np.append(head[1:], True)[: len(ordered)], 3]
    return merged, call.k_coordinates[merged[:, 2]]


@compiled
def _mark_tiles(
    area: Int16, rectangles: Int64, first_coordinate: Int64, ranges: Int32, side: int
) -> None:
    """Counts in `area` the pairs of every tile that are in fully allowed pieces. A tile with a
    partly allowed piece becomes -1 and stays -1."""
    for i in range(len(rectangles)):
        q0, q1, k0, k1 = rectangles[i]
        shift = k0 - first_coordinate[i]
        for q_tile in range(q0 // side, (q1 - 1) // side + 1):
            first, end = max(q0, q_tile * side), min(q1, (q_tile + 1) * side)
            for r in range(ranges.shape[1]):
                _mark_range(area[q_tile], ranges[first:end, r], shift, k0, k1, side)


@inner
def _mark_range(area: Int16, ranges: Int32, shift: int, k0: int, k1: int, side: int) -> None:
    """Marks one range of the rows of a query tile. Keys between the latest start and the earliest
    end are fully allowed; other keys between the earliest start and the latest end are partly
    allowed."""
    rows = len(ranges)
    first, inside, until, end = k1, k0, k1, k0
    for row in range(rows):
        start = min(max(ranges[row, 0] + shift, k0), k1)
        stop = min(max(ranges[row, 1] + shift, k0), k1)
        if start >= stop:
            start, stop = k1, k0
        else:
            first, end = min(first, start), max(end, stop)
        inside, until = max(inside, start), min(until, stop)
    if first >= end:
        return
    for k_tile in range(first // side, (end - 1) // side + 1):
        piece, piece_end = max(k0, k_tile * side), min(k1, (k_tile + 1) * side)
        if inside <= piece and piece_end <= until:
            if area[k_tile] >= 0:
                area[k_tile] += rows * (piece_end - piece)
        else:
            area[k_tile] = -1


@compiled
def _fill_ranges(
    filled: Int32, state: UInt8, rectangles: Int64, first_coordinate: Int64, ranges: Int32
) -> int:
    """Writes each row's ranges of key rows, as many as fit into `filled`. Returns the most ranges
    that a row has."""
    partial_before = np.zeros(state.shape[1] + 1, np.int64)
    spans = np.empty((len(rectangles) * ranges.shape[1] + 1, 2), np.int64)
    most, i, tile = 1, 0, -1
    while i < len(rectangles):
        end = i
        while end < len(rectangles) and rectangles[end, 0] == rectangles[i, 0]:
            end += 1
        for row in range(rectangles[i, 0], rectangles[i, 1]):
            if row // SIDE != tile:
                tile = row // SIDE
                for k_tile in range(state.shape[1]):
                    listed = state[tile, k_tile] == PARTIAL
                    partial_before[k_tile + 1] = partial_before[k_tile] + listed
            count = _spans_of_row(
                spans, rectangles[i:end], first_coordinate[i:end], ranges[row], partial_before
            )
            most = max(most, count)
            for r in range(min(count, filled.shape[0])):
                filled[r, 0, row], filled[r, 1, row] = spans[r, 0], spans[r, 1]
        i = end
    return most


@inner
def _spans_of_row(
    spans: Int64, rectangles: Int64, first_coordinate: Int64, ranges: Int32, partial_before: Int64
) -> int:
    """Writes the allowed key rows of one query row as few spans, exact only inside partial tiles.
    Returns the number of spans."""
    count = 0
    for i in range(len(rectangles)):
        k0, k1 = rectangles[i, 2], rectangles[i, 3]
        shift = k0 - first_coordinate[i]
        for r in range(len(ranges)):
            start, end = max(ranges[r, 0] + shift, k0), min(ranges[r, 1] + shift, k1)
            if start >= end or not any_partial(partial_before, start, end):
                continue
            if count and not any_partial(partial_before, spans[count - 1, 1], start):
                spans[count - 1, 1] = end
            else:
                spans[count, 0], spans[count, 1] = start, end
                count += 1
    return count


@inner
def any_partial(partial_before: Int64, start: int, end: int) -> bool:
    """Whether any of the rows [start, end) is in a partial tile."""
    if start >= end:
        return False
    found: bool = partial_before[(end - 1) // SIDE + 1] > partial_before[start // SIDE]
    return found


def transpose_ranges(tiles: KernelTileMap) -> Int32:
    """The ranges of *query* rows for every key row, int32[R, 2, key rows in whole tiles]. Again,
    what they say about full and unlisted tiles does not matter."""
    size = (2, tiles.state.shape[1] * SIDE)
    transposed = np.zeros((1, *size), np.int32)
    most = _transpose_ranges(transposed, tiles.state, tiles.ranges)
    if most > 1:
        transposed = np.zeros((most, *size), np.int32)
        _transpose_ranges(transposed, tiles.state, tiles.ranges)
    return transposed


@compiled
def _transpose_ranges(transposed: Int32, state: UInt8, ranges: Int32) -> int:
    """Writes each key row's ranges of query rows, as many as fit into `transposed`. Returns the
    most ranges that a key row has."""
    most = 1
    partial_before = np.zeros(state.shape[0] + 1, np.int64)
    for k_tile in range(state.shape[1]):
        for q_tile in range(state.shape[0]):
            listed = state[q_tile, k_tile] == PARTIAL
            partial_before[q_tile + 1] = partial_before[q_tile] + listed
        keys = slice(k_tile * SIDE, (k_tile + 1) * SIDE)
        runs = np.zeros((2, SIDE), np.int64)  # by key: number of ranges so far, end of the last
        for q_tile in range(state.shape[0]):
            if state[q_tile, k_tile] == PARTIAL:
                rows = range(q_tile * SIDE, (q_tile + 1) * SIDE)
                _add_rows(transposed[:, :, keys], runs, rows, ranges, keys.start, partial_before)
        most = max(most, runs[0].max())
    return most


@inner
def _add_rows(
    filled: Int32, runs: Int64, rows: range, ranges: Int32, first_key: int, partial_before: Int64
) -> None:
    """Adds query rows to the ranges of the keys that they attend. A row extends the key's last
    range unless a partial tile is between the two."""
    count, end = runs
    for row in rows:
        for r in range(ranges.shape[0]):
            first = max(ranges[r, 0, row] - first_key, 0)
            for key in range(first, min(ranges[r, 1, row] - first_key, SIDE)):
                begins = not count[key] or any_partial(partial_before, end[key], row)
                count[key] += begins
                end[key] = row + 1
                number = count[key] - 1
                if number < len(filled):
                    filled[number, 1, key] = row + 1
                    if begins:
                        filled[number, 0, key] = row
