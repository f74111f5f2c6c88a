"""Ranges the other way round: query rows by key row, for kernels that work by key tiles."""

import numpy as np

from dyncp.arrays import Bool, Int32, Int64, UInt8
from dyncp.compiled import compiled, inner
from dyncp.kernels.tile_lists import PARTIAL, SIDE, KernelTileMap, any_partial


def turn_ranges(tiles: KernelTileMap) -> Int32:
    """The ranges of *query* rows of every key row, int32[R, 2, key rows in whole tiles]. Again,
    what they say about full and unlisted tiles does not matter."""
    size = (2, tiles.state.shape[1] * SIDE)
    turned = np.zeros((1, *size), np.int32)
    most = _turn_ranges(turned, tiles.state, tiles.ranges)
    if most > 1:
        turned = np.zeros((most, *size), np.int32)
        _turn_ranges(turned, tiles.state, tiles.ranges)
    return turned


@compiled
def _turn_ranges(turned: Int32, state: UInt8, ranges: Int32) -> int:
    """Fills ranges of query rows, as many as `turned` has room for; gives the most of a key row."""
    most = 1
    runs = np.zeros((3, SIDE), np.int64)  # of every key: ranges, start of the open one, last end
    inside, line = np.zeros(SIDE, np.bool_), np.zeros(SIDE, np.bool_)
    partial_before = np.zeros(state.shape[0] + 1, np.int64)
    for k_tile in range(state.shape[1]):
        for q_tile in range(state.shape[0]):
            listed = state[q_tile, k_tile] == PARTIAL
            partial_before[q_tile + 1] = partial_before[q_tile] + listed
        runs[0] = 0
        keys = turned[:, :, k_tile * SIDE : (k_tile + 1) * SIDE]
        for q_tile in range(state.shape[0]):
            if state[q_tile, k_tile] != PARTIAL:
                continue
            for row in range(q_tile * SIDE, (q_tile + 1) * SIDE):
                if row % SIDE and _same_ranges(ranges, row):
                    continue
                _allowed_line(line, ranges, row, k_tile)
                _close_ranges(keys, runs, inside, line, row, partial_before)
            line[:] = False
            end = (q_tile + 1) * SIDE
            _close_ranges(keys, runs, inside, line, end, partial_before)
        most = max(most, runs[0].max())
    return most


@inner
def _same_ranges(ranges: Int32, row: int) -> bool:
    """Whether a query row has the ranges of the one before."""
    for r in range(ranges.shape[0]):
        if ranges[r, 0, row] != ranges[r, 0, row - 1] or ranges[r, 1, row] != ranges[r, 1, row - 1]:
            return False
    return True


@inner
def _allowed_line(line: Bool, ranges: Int32, row: int, k_tile: int) -> None:
    """Which keys of a key tile a query row attends."""
    line[:] = False
    first = k_tile * SIDE
    for r in range(ranges.shape[0]):
        line[max(ranges[r, 0, row] - first, 0) : max(min(ranges[r, 1, row] - first, SIDE), 0)] = (
            True
        )


@inner
def _close_ranges(
    keys: Int32, runs: Int64, inside: Bool, line: Bool, row: int, partial_before: Int64
) -> None:
    """From `row` on the keys of `line` are attended, before it those of `inside`: opens ranges, and
    writes those that end to `keys`, as part of the last one where nothing partial lies between."""
    count, opened, ended = runs
    for key in range(SIDE):
        if line[key] == inside[key]:
            continue
        inside[key] = line[key]
        if line[key]:
            opened[key] = row
            continue
        joins = count[key] > 0 and not any_partial(partial_before, ended[key], opened[key])
        if not joins:
            count[key] += 1
        number = count[key] - 1
        if number < len(keys):
            keys[number, 1, key] = row
            if not joins:
                keys[number, 0, key] = opened[key]
        ended[key] = row
