"""Splits a region, the tiles to be shared by some ranks, between two groups of them.

Whole sequences first: largest first, each goes to the side with more room, and if both budgets hold
the split costs nothing. Otherwise one sequence is cut, trying the few with most work in two orders:
all others are placed first and the cut fills what is missing, or the sequence is cut where that is
cheapest and the others level the budgets.
"""

from typing import NamedTuple

import numba
import numpy as np

from dyncp.arrays import Bool, Float64, Int64, starts_of
from dyncp.placement.bisection.bands import best_band, sum_lines
from dyncp.placement.bisection.leveling import level_pieces
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


def choose_cut(
    problem: Problem,
    region: Region,
    caps: Float64,
    mean: Float64,
    penalty: float,
    rows_only: bool,
    sizes: int,
) -> Cut:
    """The cheapest way found to split `region`. `caps` is [sides, 2]: most work and tokens."""
    by_share = np.argsort(-(region.load / mean).max(axis=1), kind="stable")
    by_work = np.argsort(-region.load[:, 0], kind="stable")[:CUT_CANDIDATES]
    return _choose_cut(problem, region, caps, penalty, by_share, by_work, rows_only, sizes)


@numba.njit(cache=True, nogil=True)
def _choose_cut(
    problem: Problem,
    region: Region,
    caps: Float64,
    penalty: float,
    order: Int64,
    by_work: Int64,
    rows_only: bool,
    sizes: int,
) -> Cut:
    pieces = len(region.sequence)
    side = np.zeros(pieces, np.int64)
    missed = level_pieces(region.load, order, -1, np.zeros((2, 2)), caps, side)
    best = Cut(penalty * missed, side.copy(), -1, True, 0, 0, 0)
    if missed == 0:
        return best
    for piece in by_work:
        rows = region.rows[region.row_start[piece] : region.row_start[piece + 1]]
        columns = region.columns[region.column_start[piece] : region.column_start[piece + 1]]
        used = np.zeros((2, 2))
        level_pieces(region.load, order, piece, used, caps, side)
        for by_rows in (True, False):
            if rows_only and not by_rows:
                continue
            lines = sum_lines(problem, region.sequence[piece], rows, columns, by_rows)
            for part in range(-1, sizes if pieces > 1 else 0):  # -1: fill what is missing
                room = np.maximum(caps - used, 0.0) if part < 0 else caps
                for band_side in range(2):
                    low = np.maximum(region.load[piece] - room[1 - band_side], 0.0)
                    high = np.maximum(np.minimum(region.load[piece], room[band_side]), low)
                    if part >= 0:
                        step = (high[0] - low[0]) / sizes
                        low[0], high[0] = low[0] + part * step, low[0] + (part + 1) * step
                    cost, a, b = best_band(lines, low, high, penalty)
                    if cost >= best.cost:
                        continue
                    taken = np.zeros((2, 2))
                    taken[band_side, 0] = lines.work[b] - lines.work[a]
                    taken[band_side, 1] = lines.tokens[b] - lines.tokens[a]
                    for what in range(2):
                        rest = region.load[piece, what] - taken[band_side, what]
                        taken[1 - band_side, what] = rest
                    missed = level_pieces(region.load, order, piece, taken, caps, side)
                    total = cost + penalty * missed
                    if total < best.cost:
                        best = Cut(total, side.copy(), piece, by_rows, a, b, band_side)
    return best


def take_side(problem: Problem, region: Region, cut: Cut, wanted: int) -> Region:
    """The region of one side of a cut."""
    pieces = [p for p in range(len(region.sequence)) if p == cut.piece or cut.side[p] == wanted]
    rows = [region.rows[region.row_start[p] : region.row_start[p + 1]] for p in pieces]
    columns = [region.columns[region.column_start[p] : region.column_start[p + 1]] for p in pieces]
    load = region.load[pieces]
    if cut.piece >= 0:
        at, inside = pieces.index(cut.piece), cut.band_side == wanted
        lines = rows if cut.by_rows else columns
        lines[at] = _band_or_rest(lines[at], cut.a, cut.b, inside)
        sums = sum_lines(problem, region.sequence[cut.piece], rows[at], columns[at], True)
        load[at] = sums.work[-1], sums.tokens[-1]
    return _region(region.sequence[pieces], rows, columns, load)


def _band_or_rest(lines: Int64, a: int, b: int, band: bool) -> Int64:
    return lines[a:b].copy() if band else np.concatenate([lines[:a], lines[b:]])


def _region(sequence: Int64, rows: list[Int64], columns: list[Int64], load: Float64) -> Region:
    row_start, column_start = (starts_of(np.array([len(x) for x in p])) for p in (rows, columns))
    none = [np.zeros(0, np.int64)]
    return Region(
        sequence,
        row_start,
        np.concatenate(rows or none),
        column_start,
        np.concatenate(columns or none),
        load,
    )


def whole_batch(problem: Problem) -> Region:
    lines = [np.arange(n) for n in np.diff(problem.first_block)]
    sums = [sum_lines(problem, s, own, own, True) for s, own in enumerate(lines)]
    load = np.array([[x.work[-1], x.tokens[-1]] for x in sums])
    return _region(np.arange(len(lines)), lines, lines, load)


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


def region_of_rows(problem: Problem, chosen: Bool) -> Region:
    """The chosen blocks' rows with all columns of their sequences."""
    blocks = np.flatnonzero(chosen)
    of_block = np.searchsorted(problem.first_block, blocks, side="right") - 1
    sequence, counts = np.unique(of_block, return_counts=True)
    rows = np.split(blocks - problem.first_block[of_block], np.cumsum(counts)[:-1])
    columns = [np.arange(n) for n in np.diff(problem.first_block)[sequence]]
    sums = [
        sum_lines(problem, s, own, across, True)
        for s, own, across in zip(sequence, rows, columns, strict=True)
    ]
    load = np.array([[x.work[-1], x.tokens[-1]] for x in sums]).reshape(-1, 2)
    return _region(sequence, rows if len(blocks) else [], columns, load)


def write_owners(problem: Problem, region: Region, rank: int, owner: Int64) -> None:
    """Gives the blocks of all rows of a region to one rank."""
    first = problem.first_block[region.sequence]
    owner[np.repeat(first, np.diff(region.row_start)) + region.rows] = rank
