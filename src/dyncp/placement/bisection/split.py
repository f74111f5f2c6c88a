"""Splits a region, the tiles to be shared by some ranks, between two groups of them.

Whole sequences first: largest first, each goes to the side with more room, and if both budgets hold
the split costs nothing. Otherwise one sequence is cut, trying the few with most work in two orders:
all others are placed first and the cut fills what is missing, or the sequence is cut where that is
cheapest and the others level the budgets.
"""

from typing import NamedTuple

import numba
import numpy as np

from dyncp.arrays import Float64, Int64
from dyncp.placement.bisection.bands import best_band, sum_lines
from dyncp.placement.bisection.problem import Problem

# Sequences that are tried for cutting, those with most work first.
CUT_CANDIDATES = 3


class Region(NamedTuple):
    """At most one piece per sequence: the tiles in rows × columns, both as blocks counted from the
    sequence's first. `load` is [pieces, 2]: work, and tokens of the blocks whose diagonal is in."""

    sequence: Int64
    row_start: Int64
    rows: Int64
    column_start: Int64
    columns: Int64
    load: Float64


class Cut(NamedTuple):
    """`piece` (-1: none) is cut into a band of lines [a, b), which goes to `band_side`, and the
    rest; every other piece goes to side[piece]. `cost` has bytes and penalties."""

    cost: float
    side: Int64
    piece: int
    by_rows: bool
    a: int
    b: int
    band_side: int


@numba.njit(cache=True, nogil=True)
def choose_cut(
    problem: Problem, region: Region, caps: Float64, mean: Float64, penalty: float
) -> Cut:
    """The cheapest way found to split `region`. `caps` is [sides, 2]: most work and tokens."""
    pieces = len(region.sequence)
    order = np.argsort(-_largest_share(region.load, mean), kind="mergesort")
    side = np.zeros(pieces, np.int64)
    missed = _level(region.load, order, -1, np.zeros((2, 2)), caps, side)
    best = Cut(penalty * missed, side.copy(), -1, True, 0, 0, 0)
    if missed == 0:
        return best
    by_work = np.argsort(-region.load[:, 0], kind="mergesort")
    for piece in by_work[:CUT_CANDIDATES]:
        rows = region.rows[region.row_start[piece] : region.row_start[piece + 1]]
        columns = region.columns[region.column_start[piece] : region.column_start[piece + 1]]
        used = np.zeros((2, 2))
        _level(region.load, order, piece, used, caps, side)
        for by_rows in (True, False):
            lines = sum_lines(problem, region.sequence[piece], rows, columns, by_rows)
            for fill in (True, False):
                if not fill and pieces == 1:
                    continue
                room = np.maximum(caps - used, 0.0) if fill else caps
                for band_side in range(2):
                    low = np.maximum(region.load[piece] - room[1 - band_side], 0.0)
                    high = np.maximum(np.minimum(region.load[piece], room[band_side]), low)
                    cost, a, b = best_band(lines, low, high, penalty)
                    if not np.isfinite(cost):
                        continue
                    taken = np.zeros((2, 2))
                    taken[band_side, 0] = lines.work[b] - lines.work[a]
                    taken[band_side, 1] = lines.tokens[b] - lines.tokens[a]
                    taken[1 - band_side] = region.load[piece] - taken[band_side]
                    missed = _level(region.load, order, piece, taken, caps, side)
                    total = cost + penalty * missed
                    if total < best.cost:
                        best = Cut(total, side.copy(), piece, by_rows, a, b, band_side)
    return best


@numba.njit(cache=True, nogil=True)
def _largest_share(load: Float64, mean: Float64) -> Float64:
    shares = np.empty(len(load))
    for i in range(len(load)):
        shares[i] = max(load[i, 0] / mean[0], load[i, 1] / mean[1])
    return shares


@numba.njit(cache=True, nogil=True)
def _level(
    load: Float64, order: Int64, skip: int, used: Float64, caps: Float64, side: Int64
) -> float:
    """Puts every piece but `skip` on the side with more room, adding to `used`; returns by how much
    the budgets are missed, as a share of them."""
    for piece in order:
        if piece == skip:
            continue
        full = np.zeros(2)
        for s in range(2):
            for what in range(2):
                full[s] = max(full[s], (used[s, what] + load[piece, what]) / caps[s, what])
        side[piece] = 1 if full[1] < full[0] else 0
        used[side[piece]] += load[piece]
    missed = 0.0
    for s in range(2):
        for what in range(2):
            missed += max(0.0, used[s, what] / caps[s, what] - 1.0 - 1e-9)
    return missed


@numba.njit(cache=True, nogil=True)
def take_side(problem: Problem, region: Region, cut: Cut, wanted: int) -> Region:
    """The region of one side of a cut."""
    pieces = len(region.sequence)
    sequence = np.empty(pieces, np.int64)
    row_start, column_start = np.zeros(pieces + 1, np.int64), np.zeros(pieces + 1, np.int64)
    rows, columns = np.empty(len(region.rows), np.int64), np.empty(len(region.columns), np.int64)
    load = np.empty((pieces, 2))
    n = 0
    for piece in range(pieces):
        if piece != cut.piece and cut.side[piece] != wanted:
            continue
        own_rows = region.rows[region.row_start[piece] : region.row_start[piece + 1]]
        own_columns = region.columns[region.column_start[piece] : region.column_start[piece + 1]]
        if piece == cut.piece:
            inside = cut.band_side == wanted
            if cut.by_rows:
                own_rows = _band_or_rest(own_rows, cut.a, cut.b, inside)
            else:
                own_columns = _band_or_rest(own_columns, cut.a, cut.b, inside)
        sequence[n] = region.sequence[piece]
        row_start[n + 1] = row_start[n] + len(own_rows)
        column_start[n + 1] = column_start[n] + len(own_columns)
        rows[row_start[n] : row_start[n + 1]] = own_rows
        columns[column_start[n] : column_start[n + 1]] = own_columns
        if piece == cut.piece:
            lines = sum_lines(problem, sequence[n], own_rows, own_columns, True)
            load[n, 0], load[n, 1] = lines.work[-1], lines.tokens[-1]
        else:
            load[n] = region.load[piece]
        n += 1
    return Region(
        sequence[:n],
        row_start[: n + 1],
        rows[: row_start[n]],
        column_start[: n + 1],
        columns[: column_start[n]],
        load[:n],
    )


@numba.njit(cache=True, nogil=True)
def _band_or_rest(lines: Int64, a: int, b: int, band: bool) -> Int64:
    return lines[a:b].copy() if band else np.concatenate((lines[:a], lines[b:]))


@numba.njit(cache=True, nogil=True)
def whole_batch(problem: Problem) -> Region:
    pieces = len(problem.first_block) - 1
    start = problem.first_block - problem.first_block[0]
    lines = np.empty(start[-1], np.int64)
    load = np.empty((pieces, 2))
    for s in range(pieces):
        own = np.arange(start[s + 1] - start[s])
        lines[start[s] : start[s + 1]] = own
        sums = sum_lines(problem, s, own, own, True)
        load[s, 0], load[s, 1] = sums.work[-1], sums.tokens[-1]
    return Region(np.arange(pieces), start, lines, start, lines.copy(), load)


@numba.njit(cache=True, nogil=True)
def write_ranks(problem: Problem, region: Region, rank: int, cell_rank: Int64) -> None:
    """Gives all tiles of a region to one rank; `cell_rank` is laid out like `problem.work`."""
    for piece in range(len(region.sequence)):
        s = region.sequence[piece]
        stride = problem.first_block[s + 1] - problem.first_block[s]
        for row in region.rows[region.row_start[piece] : region.row_start[piece + 1]]:
            base = problem.work_start[s] + row * stride
            for column in region.columns[
                region.column_start[piece] : region.column_start[piece + 1]
            ]:
                cell_rank[base + column] = rank
