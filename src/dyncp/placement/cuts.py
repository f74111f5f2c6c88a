"""Cuts one region in two.

Whole sequences come first: largest first, each goes to the side with more room. If that keeps both
caps, the split costs nothing. Otherwise one sequence is cut. The few with the most work are tried,
in two ways: either all others are placed first and the cut fills the remaining room, or the
sequence is cut where that is cheapest and the others are levelled around it. A cut takes a band of
rows or of columns (below), or separates head groups.
"""

from typing import NamedTuple

import numpy as np

from dyncp.arrays import Float64, Int32, Int64
from dyncp.compiled import inner
from dyncp.placement.problem import MAX_SWAPS, Problem, level_pieces

# Start rows tried per cut. With 12, 1.2 % more bytes move (12 batches); with all rows 0.7 % fewer,
# but planning takes 31 times as long.
MAX_STARTS = 48


# Cuts of one sequence's tiles: a band of rows (or columns) against the rest.
#
# With a = 0 the band [a, b) is a straight cut, otherwise a sandwich, as in zigzag. Cutting rows
# costs the KV bytes of the columns that both sides need:
#
#     A A . .        band of rows 1-2 (B) against rows 0 and 3 (A), causal: both sides need columns
#     B B . .        0, 1 and 2, only A needs column 3
#     B B B .
#     A A A A
#
# Compiled functions take plain arrays and write results into their arguments: passing tuples of
# arrays costs reference counts at run time, and most of the compile time.


@inner
def sum_lines(
    work: Float64,
    base: int,
    stride: int,
    tokens: Float64,
    lines: Int64,
    across: Int64,
    by_rows: bool,
    running: Float64,
    seen: Int32,
) -> None:
    """Cumulative sums over a piece's rows (or columns) `lines`; `across` are its columns (or rows).
    The work matrix of the sequence starts at `base`. `running` [lines + 1, 2] gets the work, and
    the tokens of blocks whose diagonal tile is in the piece, before each line; `seen`
    [lines + 1, across] the number of lines before it that have a tile in each crossing line."""
    step, other = (stride, 1) if by_rows else (1, stride)
    running[0, 0] = running[0, 1] = 0.0
    for j in range(len(across)):
        seen[0, j] = 0
    for i in range(len(lines)):
        total, owned, start = 0.0, 0.0, base + lines[i] * step
        for j in range(len(across)):
            weight = work[start + across[j] * other]
            total += weight
            seen[i + 1, j] = seen[i, j] + (1 if weight > 0 else 0)
            if lines[i] == across[j]:
                owned = tokens[lines[i]]
        running[i + 1, 0] = running[i, 0] + total
        running[i + 1, 1] = running[i, 1] + owned


@inner
def best_band(
    running: Float64,
    seen: Int32,
    size: Float64,
    count: int,
    room: Float64,
    penalty: float,
    found: Int64,
) -> float:
    """Bytes of the cheapest band among `count` lines, 1e300 if there is none; writes its first and
    end line to `found`.

    Its work and tokens should be between room[what, 0] and room[what, 1]. Missing that by the whole
    load of the piece costs `penalty` bytes in the choice."""
    best, best_bytes = 1e300, 1e300
    step = max(1, count // MAX_STARTS)
    for a in range(0, count, step):
        tried = -1
        for aim in range(3):
            target = running[a, 0] + room[0, 0] + (room[0, 1] - room[0, 0]) * aim / 2
            nearest = _first_at_least(running, count, target)
            for b in range(nearest - 1, nearest + 1):
                if b <= a or b > count or b <= tried or b - a == count:
                    continue
                tried = b
                missed = miss(running, count, a, b, room, penalty)
                if missed >= best:
                    continue
                cost = _crossing_bytes(seen, size, count, a, b, best - missed)
                if cost + missed < best:
                    best, best_bytes = cost + missed, cost
                    found[0], found[1] = a, b
    return best_bytes


@inner
def miss(running: Float64, count: int, a: int, b: int, room: Float64, penalty: float) -> float:
    """The penalty of band [a, b) for missing its target load."""
    missed = 0.0
    for what in range(2):
        value, total = running[b, what] - running[a, what], running[count, what]
        if total > 0:
            missed += max(0.0, room[what, 0] - value, value - room[what, 1]) / total
    return missed * penalty


@inner
def _first_at_least(running: Float64, count: int, target: float) -> int:
    """Binary search in the work; numpy's searchsorted takes half a second longer to compile."""
    low, high = 0, count + 1
    while low < high:
        middle = (low + high) // 2
        if running[middle, 0] < target:
            low = middle + 1
        else:
            high = middle
    return low


@inner
def _crossing_bytes(seen: Int32, size: Float64, count: int, a: int, b: int, enough: float) -> float:
    """Bytes of the crossing lines that both the band and the rest need; stops at `enough`."""
    cost = 0.0
    for j in range(len(size)):
        inside = seen[b, j] - seen[a, j]
        if 0 < inside < seen[count, j]:
            cost += size[j]
            if cost >= enough:
                break
    return cost


# How many sequences are tried for cutting, those with the most work first. With 1, 1.7 % more bytes
# move (12 batches).
CUT_CANDIDATES = 3
BY_ROWS, BY_COLUMNS, BY_GROUPS = 0, 1, 2
NO_NOISE = np.ones(1)


class Parts(NamedTuple):
    """Regions of all groups of ranks: pieces [span[g, 0], span[g, 1]) belong to group g. The other
    fields are those of a Region, with unused elements at the end."""

    pieces: Int64
    lines: Int64
    load: Float64
    span: Int64


class SplitStrategy(NamedTuple):
    """How a tree of ranks is split. `left` is the share of a node's ranks on the first side of a
    split; `peel` splits nodes off one by one instead of halving. The first levels may spend the
    tolerance of `spend` levels. A byte of a row cut costs `row_bias`, of a column cut 1;
    `rows_only` forbids other cuts than rows. `sizes` sizes of the band are tried when the other
    sequences are levelled around a cut. The costs of cuts are multiplied by the factors of `noise`,
    round robin."""

    spend: float = 1.0
    left: float = 0.5
    peel: bool = False
    rows_only: bool = False
    sizes: int = 1
    row_bias: float = 1.0
    noise: Float64 = NO_NOISE


class Trial(NamedTuple):
    """Scratch arrays for trying cuts of one region. `order` has its pieces, largest first; `side`
    and `best_side` are their sides. `cut` is the best cut so far: the piece that is cut (-1: none),
    how, its band of lines or head groups [a, b), and the side of the band; `best` is its cost.
    Exceeding a cap by all of it costs `penalty` bytes."""

    order: Int64
    side: Int64
    best_side: Int64
    cut: Int64
    best: Float64
    caps: Float64  # [sides, 2]
    used: Float64  # [sides, 2]
    taken: Float64  # [sides, 2]
    room: Float64  # [2, 2]: least and most of work and of tokens
    found: Int64  # [2]
    penalty: float


def make_trial(pieces: int, penalty: float) -> Trial:
    order, side, best_side = np.empty((3, pieces), np.int64)
    caps, used, taken, room = np.empty((4, 2, 2))
    cut, found = np.empty(5, np.int64), np.empty(2, np.int64)
    return Trial(order, side, best_side, cut, np.empty(1), caps, used, taken, room, found, penalty)


@inner
def choose_cut(
    problem: Problem,
    strategy: SplitStrategy,
    parts: Parts,
    first: int,
    last: int,
    draw: int,
    trial: Trial,
) -> None:
    """Writes the cheapest split found of the region with pieces [first, last) to `trial`."""
    count, load = last - first, parts.load[first:last]
    _clear(trial.used)
    missed = level_pieces(
        load, trial.order, count, -1, trial.used, trial.caps, trial.best_side, MAX_SWAPS
    )
    trial.best[0] = trial.penalty * missed
    trial.cut[0] = -1
    if missed == 0:
        return
    piece = -1
    for _ in range(min(count, CUT_CANDIDATES)):
        piece = _next_by_work(load, count, piece)
        for how in range(3):
            if how == BY_ROWS or not strategy.rows_only:
                _try_cuts(problem, strategy, parts, load, first, piece, how, draw, trial)
                draw += 13


@inner
def _try_cuts(
    problem: Problem,
    strategy: SplitStrategy,
    parts: Parts,
    load: Float64,
    first: int,
    piece: int,
    how: int,
    draw: int,
    trial: Trial,
) -> None:
    """Tries to cut one piece by rows, by columns or between head groups."""
    lines = _extent(parts.pieces, first + piece, how)
    across = _extent(parts.pieces, first + piece, 1 - how) if how != BY_GROUPS else 1
    if lines < 2:
        return
    running, size = np.empty((lines + 1, 2)), np.empty(across)
    seen = np.empty((lines + 1, across), np.int32)
    _measure(problem, parts, first + piece, how, strategy.row_bias, running, seen, size)
    count, order, caps, used = len(load), trial.order, trial.caps, trial.used
    for part in range(-1, strategy.sizes if count > 1 else 0):  # -1: fill the remaining room
        _clear(used)
        if part < 0:
            level_pieces(load, order, count, piece, used, caps, trial.side, MAX_SWAPS)
        for half in range(2):
            if part >= 0:
                _clear(used)
            _find_room(load, piece, caps, used, part, strategy.sizes, half, trial.room)
            if how == BY_GROUPS:
                cost = _best_groups(running, lines, trial.room, trial.penalty, size, trial.found)
            else:
                cost = best_band(running, seen, size, lines, trial.room, trial.penalty, trial.found)
            draw += 1
            cost *= strategy.noise[draw % len(strategy.noise)]
            if cost < trial.best[0]:
                _weigh(load, piece, how, running, half, cost, trial)


@inner
def _weigh(
    load: Float64,
    piece: int,
    how: int,
    running: Float64,
    half: int,
    cost: float,
    trial: Trial,
) -> None:
    """Levels the other pieces around a cut, and keeps the cut if it is the best so far."""
    a, b, count, cut = trial.found[0], trial.found[1], len(load), trial.cut
    taken = trial.taken
    for what in range(2):
        taken[half, what] = running[b, what] - running[a, what]
        taken[1 - half, what] = load[piece, what] - taken[half, what]
    cost += trial.penalty * level_pieces(
        load, trial.order, count, piece, taken, trial.caps, trial.side, MAX_SWAPS
    )
    if cost < trial.best[0]:
        trial.best[0] = cost
        cut[0], cut[1], cut[2], cut[3], cut[4] = piece, how, a, b, half
        for i in range(count):
            trial.best_side[i] = trial.side[i]


@inner
def _measure(
    problem: Problem,
    parts: Parts,
    p: int,
    how: int,
    row_bias: float,
    running: Float64,
    seen: Int32,
    size: Float64,
) -> None:
    """Writes the cumulative sums over the lines (or head groups) of piece p, and to `size` the
    bytes of the crossing lines, or for head groups those of the blocks that the piece owns."""
    s, pieces, group_end = parts.pieces[p, 0], parts.pieces, problem.group_end
    block, last = problem.first_block[s], problem.first_block[s + 1]
    share = group_end[pieces[p, 6]] - group_end[pieces[p, 5]]
    rows = parts.lines[pieces[p, 1] : pieces[p, 2]]
    columns = parts.lines[pieces[p, 3] : pieces[p, 4]]
    if how == BY_GROUPS:
        for g in range(len(running)):
            part = (group_end[pieces[p, 5] + g] - group_end[pieces[p, 5]]) / share
            running[g, 0], running[g, 1] = parts.load[p, 0] * part, parts.load[p, 1] * part
        per_token = (problem.q_bytes[block] + problem.kv_bytes[block]) / problem.tokens[block]
        size[0] = parts.load[p, 1] * per_token
        return
    lines, across = (rows, columns) if how == BY_ROWS else (columns, rows)
    tokens = problem.tokens[block:last]
    base, by_rows = problem.work_start[s], how == BY_ROWS
    sum_lines(problem.work, base, last - block, tokens, lines, across, by_rows, running, seen)
    for i in range(len(running)):
        running[i, 0] *= share
        running[i, 1] *= share
    for j in range(len(across)):
        at = block + across[j]
        size[j] = share * (problem.kv_bytes[at] * row_bias if by_rows else problem.q_bytes[at])


@inner
def _extent(pieces: Int64, p: int, how: int) -> int:
    """Number of rows, columns or head groups of a piece."""
    return int(pieces[p, 2 + 2 * how] - pieces[p, 1 + 2 * how])


@inner
def _clear(used: Float64) -> None:
    for half in range(2):
        used[half, 0] = used[half, 1] = 0.0


@inner
def _next_by_work(load: Float64, count: int, last: int) -> int:
    """The piece with the most work after piece `last` (-1: of all); ties by lower index."""
    best = -1
    for p in range(count):
        if last >= 0 and (
            load[p, 0] > load[last, 0] or (load[p, 0] == load[last, 0] and p <= last)
        ):
            continue
        if best < 0 or load[p, 0] > load[best, 0]:
            best = p
    return best


@inner
def _find_room(
    load: Float64,
    piece: int,
    caps: Float64,
    used: Float64,
    part: int,
    sizes: int,
    band_side: int,
    room: Float64,
) -> None:
    """Writes the least and most work and tokens that the band on `band_side` should have."""
    for what in range(2):
        whole = load[piece, what]
        own, other = caps[band_side, what], caps[1 - band_side, what]
        if part < 0:
            own -= used[band_side, what]
            other -= used[1 - band_side, what]
        room[what, 0] = max(whole - max(other, 0.0), 0.0)
        room[what, 1] = max(min(whole, max(own, 0.0)), room[what, 0])
    if part >= 0:
        step, low = (room[0, 1] - room[0, 0]) / sizes, room[0, 0]
        room[0, 0], room[0, 1] = low + part * step, low + (part + 1) * step


@inner
def _best_groups(
    running: Float64, groups: int, room: Float64, penalty: float, size: Float64, found: Int64
) -> float:
    """Bytes of the cheapest cut between head groups. Each side owns its share of the blocks; the
    other side's head groups of these blocks are sent."""
    best, best_bytes = 1e300, 1e300
    for b in range(1, groups):
        part = b / groups
        cost = size[0] * 2.0 * part * (1.0 - part)
        missed = miss(running, groups, 0, b, room, penalty)
        if cost + missed < best:
            best, best_bytes = cost + missed, cost
            found[0], found[1] = 0, b
    return best_bytes
