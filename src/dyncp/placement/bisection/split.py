"""Splits regions, the tiles to be shared by some ranks, down a tree of groups of ranks.

Whole sequences first: largest first, each goes to the side with more room, and if both budgets hold
the split costs nothing. Otherwise one sequence is cut, trying the few with most work in two orders:
all others are placed first and the cut fills what is missing, or the sequence is cut where that is
cheapest and the others level the budgets. A cut is a band of rows or of columns (bands.py), or goes
between head groups.
"""

from typing import NamedTuple

import numpy as np

from dyncp.arrays import Bool, Float64, Int32, Int64
from dyncp.compiled import compiled, inner
from dyncp.placement.bisection.bands import best_band, miss, sum_lines
from dyncp.placement.bisection.leveling import MAX_SWAPS, level_pieces
from dyncp.placement.bisection.problem import Problem

# Sequences that are tried for cutting, those with most work first.
CUT_CANDIDATES = 3
# Swaps that level the others while a cut is tried.
TRIAL_SWAPS = 4
BY_ROWS, BY_COLUMNS, BY_GROUPS = 0, 1, 2


class Region(NamedTuple):
    """At most one piece per sequence: the tiles in rows × columns × head groups.

    `pieces` is [pieces, 7]: sequence, then begin and end of its rows and of its columns in `lines`
    (blocks counted from the sequence's first), then begin and end of its head groups. `load` is
    [pieces, 2]: work, and tokens of the blocks whose diagonal is in."""

    pieces: Int64
    lines: Int64
    load: Float64

    @property
    def rows(self) -> Int64:
        """The blocks of all rows, counted from their sequences' first."""
        parts = [self.lines[piece[1] : piece[2]] for piece in self.pieces]
        return np.concatenate([np.zeros(0, np.int64), *parts])


def whole_batch(problem: Problem) -> Region:
    first, groups = problem.first_block, problem.num_groups
    blocks = np.diff(first)
    sequence = np.arange(len(blocks))
    begin, end = first[:-1], first[1:]
    none = np.zeros(len(blocks), np.int64)
    pieces = np.stack([sequence, begin, end, begin, end, none, none + groups], axis=1)
    lines = np.arange(first[-1]) - np.repeat(begin, blocks)
    load = np.stack([_sums(problem.work, problem.work_start), _sums(problem.tokens, first)], axis=1)
    return Region(pieces, lines, load)


def _sums(values: Float64, start: Int64) -> Float64:
    return np.diff(np.append(0.0, np.cumsum(values))[start])


def region_of_rows(problem: Problem, chosen: Bool) -> Region:
    """The chosen blocks' rows with all columns of their sequences."""
    whole = whole_batch(problem)
    blocks = np.flatnonzero(chosen)
    of_block = np.searchsorted(problem.first_block, blocks, side="right") - 1
    sequence, begin, counts = np.unique(of_block, return_index=True, return_counts=True)
    pieces = whole.pieces[sequence]
    pieces[:, 3:5] += len(blocks)
    pieces[:, 1], pieces[:, 2] = begin, begin + counts
    lines = np.concatenate([blocks - problem.first_block[of_block], whole.lines])
    stride = np.diff(problem.first_block)[of_block]
    row = problem.work_start[of_block] + lines[: len(blocks)] * stride
    running = np.append(0.0, np.cumsum(problem.work))
    per_block = np.stack([running[row + stride] - running[row], problem.tokens[blocks]], axis=1)
    load = np.array([per_block[b : b + n].sum(axis=0) for b, n in zip(begin, counts, strict=True)])
    return Region(pieces, lines, load.reshape(-1, 2))


class Tree(NamedTuple):
    """Groups of ranks, parents first: `children` is [nodes, 2], -1 for single ranks; `caps` is
    [nodes, 2], most work and tokens."""

    children: Int64
    caps: Float64


class Taste(NamedTuple):
    """What is preferred among cuts: a byte of a row cut counts `row_bias` (of a column cut 1), all
    cuts are weighed by the factors of `noise` in turn, and missing a budget by all of it costs
    `penalty`. `rows_only` cuts nothing but rows; `sizes` of the band are tried when others level a
    cut sequence."""

    rows_only: bool
    sizes: int
    row_bias: float
    noise: Float64
    penalty: float


class Parts(NamedTuple):
    """Regions of all nodes: pieces [span[n, 0], span[n, 1]) belong to node n. The other fields are
    a Region's, with free room at their ends."""

    pieces: Int64
    lines: Int64
    load: Float64
    span: Int64


class Trial(NamedTuple):
    """Room for trying cuts of one region. `order` has its pieces by size, `side` and `best_side`
    their sides. `cut` is the best one so far: the piece that is cut (-1: none), how, its band of
    lines or head groups [a, b), and the side of the band; `best` its cost."""

    order: Int64
    side: Int64
    best_side: Int64
    cut: Int64
    best: Float64
    caps: Float64  # [sides, 2]
    used: Float64  # [sides, 2]
    room: Float64  # [2, 2]: least and most of work and of tokens
    found: Int64  # [2]


def split_region(problem: Problem, region: Region, tree: Tree, taste: Taste) -> Parts:
    nodes, count = len(tree.children), len(region.pieces)
    order = np.argsort(-(region.load / tree.caps[0]).max(axis=1), kind="stable")
    size = nodes * count + 1  # a region has at most one piece per sequence
    spans = int((region.pieces[:, [2, 4]] - region.pieces[:, [1, 3]]).sum())
    parts = Parts(
        np.empty((size, 7), np.int64),
        np.empty(len(region.lines) + (nodes + 1) * spans, np.int64),
        np.empty((size, 2)),
        np.zeros((nodes, 2), np.int64),
    )
    parts.pieces[:count], parts.load[:count] = region.pieces[order], region.load[order]
    parts.lines[: len(region.lines)] = region.lines
    parts.span[0, 1] = count
    _split_tree(problem, tree, taste, parts, _make_trial(count), len(region.lines))
    return parts


def _make_trial(pieces: int) -> Trial:
    order, side, best_side = np.empty((3, pieces), np.int64)
    caps, used, room = np.empty((3, 2, 2))
    cut, found = np.empty(5, np.int64), np.empty(2, np.int64)
    return Trial(order, side, best_side, cut, np.empty(1), caps, used, room, found)


@compiled
def _split_tree(
    problem: Problem, tree: Tree, taste: Taste, parts: Parts, trial: Trial, end: int
) -> None:
    """Fills `parts` from node 0 on; `end` says where free room begins in its lines."""
    top = parts.span[0, 1]
    for node in range(len(tree.children)):
        if tree.children[node, 0] < 0:
            continue
        first, last = parts.span[node, 0], parts.span[node, 1]
        for half in range(2):
            for what in range(2):
                trial.caps[half, what] = tree.caps[tree.children[node, half], what]
        _sort(parts.load, first, last, trial.caps, trial.order)
        _choose_cut(problem, taste, parts, first, last, node, trial)
        for half in range(2):
            child = tree.children[node, half]
            parts.span[child, 0] = top
            top, end = _take_side(problem, parts, first, last, trial, half, top, end)
            parts.span[child, 1] = top


@inner
def _take_side(
    problem: Problem,
    parts: Parts,
    first: int,
    last: int,
    trial: Trial,
    half: int,
    top: int,
    end: int,
) -> tuple[int, int]:
    """Writes the pieces of one side from `top` on; returns where free room then begins."""
    pieces, load = parts.pieces, parts.load
    for i in range(last - first):
        p = trial.order[i]
        if p != trial.cut[0] and trial.best_side[p] != half:
            continue
        for field in range(7):
            pieces[top, field] = pieces[first + p, field]
        load[top, 0], load[top, 1] = load[first + p, 0], load[first + p, 1]
        if p != trial.cut[0]:
            top += 1
            continue
        inside = trial.cut[4] == half
        if trial.cut[1] == BY_GROUPS:
            _cut_groups(problem.group_end, pieces, load, top, trial.cut[3], inside)
        else:
            middle = _cut_lines(pieces, parts.lines, top, trial.cut, inside, end)
            end = _prune(problem, parts, top, end, middle)
        if pieces[top, 2] > pieces[top, 1]:
            top += 1
    return top, end


@inner
def _sort(load: Float64, first: int, last: int, caps: Float64, order: Int64) -> None:
    """Pieces [first, last) by the greater of their shares, counted from `first`; they are almost in
    order, as their parents were."""
    work, tokens = caps[0, 0] + caps[1, 0], caps[0, 1] + caps[1, 1]
    for i in range(last - first):
        share = max(load[first + i, 0] / work, load[first + i, 1] / tokens)
        j = i
        while j > 0:
            before = first + order[j - 1]
            if max(load[before, 0] / work, load[before, 1] / tokens) >= share:
                break
            order[j] = order[j - 1]
            j -= 1
        order[j] = i


@inner
def _choose_cut(
    problem: Problem, taste: Taste, parts: Parts, first: int, last: int, draw: int, trial: Trial
) -> None:
    """The cheapest way found to split a region, its pieces [first, last)."""
    count, load = last - first, parts.load[first:last]
    _clear(trial.used)
    missed = level_pieces(
        load, trial.order, count, -1, trial.used, trial.caps, trial.best_side, MAX_SWAPS
    )
    trial.best[0] = taste.penalty * missed
    trial.cut[0] = -1
    if missed == 0:
        return
    piece = -1
    for _ in range(min(count, CUT_CANDIDATES)):
        piece = _next_by_work(load, count, piece)
        for how in range(3):
            if how == BY_ROWS or not taste.rows_only:
                _try_cuts(problem, taste, parts, load, first, piece, how, draw, trial)
                draw += 13


@inner
def _try_cuts(
    problem: Problem,
    taste: Taste,
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
    _measure(problem, parts, first + piece, how, taste.row_bias, running, seen, size)
    count, order, caps, used = len(load), trial.order, trial.caps, trial.used
    for part in range(-1, taste.sizes if count > 1 else 0):  # -1: fill what is missing
        _clear(used)
        if part < 0:
            level_pieces(load, order, count, piece, used, caps, trial.side, TRIAL_SWAPS)
        for half in range(2):
            if part >= 0:
                _clear(used)
            _find_room(load, piece, caps, used, part, taste.sizes, half, trial.room)
            if how == BY_GROUPS:
                cost = _best_groups(running, lines, trial.room, taste.penalty, size, trial.found)
            else:
                cost = best_band(running, seen, size, lines, trial.room, taste.penalty, trial.found)
            draw += 1
            cost *= taste.noise[draw % len(taste.noise)]
            if cost < trial.best[0]:
                _weigh(load, piece, how, running, half, cost, taste.penalty, trial)


@inner
def _weigh(
    load: Float64,
    piece: int,
    how: int,
    running: Float64,
    half: int,
    cost: float,
    penalty: float,
    trial: Trial,
) -> None:
    """Levels the others around a cut, and keeps it if it is the best so far."""
    a, b, count, cut = trial.found[0], trial.found[1], len(load), trial.cut
    taken = np.empty((2, 2))
    for what in range(2):
        taken[half, what] = running[b, what] - running[a, what]
        taken[1 - half, what] = load[piece, what] - taken[half, what]
    cost += penalty * level_pieces(
        load, trial.order, count, piece, taken, trial.caps, trial.side, TRIAL_SWAPS
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
    """Sums before each line (or head group) of piece p, and bytes of the lines across; for head
    groups `size` has those of the blocks that the piece owns."""
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
    """How many rows, columns or head groups a piece has."""
    return int(pieces[p, 2 + 2 * how] - pieces[p, 1 + 2 * how])


@inner
def _clear(used: Float64) -> None:
    for half in range(2):
        used[half, 0] = used[half, 1] = 0.0


@inner
def _next_by_work(load: Float64, count: int, last: int) -> int:
    """The piece with most work after piece `last` (-1: of all); the lower number where equal."""
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
    """Least and most of work and tokens that the band on `band_side` should have."""
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
    """Cheapest cut between head groups. Each side owns its part of the blocks, and the others'
    groups of these blocks travel."""
    best, best_bytes = 1e300, 1e300
    for b in range(1, groups):
        part = b / groups
        cost = size[0] * 2.0 * part * (1.0 - part)
        missed = miss(running, groups, 0, b, room, penalty)
        if cost + missed < best:
            best, best_bytes = cost + missed, cost
            found[0], found[1] = 0, b
    return best_bytes


@inner
def _cut_groups(
    group_end: Float64, pieces: Int64, load: Float64, p: int, b: int, inside: bool
) -> None:
    """Keeps the first b head groups of piece p (or the others)."""
    whole = group_end[pieces[p, 6]] - group_end[pieces[p, 5]]
    pieces[p, 6 if inside else 5] = pieces[p, 5] + b
    share = (group_end[pieces[p, 6]] - group_end[pieces[p, 5]]) / whole
    load[p, 0], load[p, 1] = load[p, 0] * share, load[p, 1] * share


@inner
def _cut_lines(pieces: Int64, lines: Int64, p: int, cut: Int64, inside: bool, end: int) -> int:
    """Writes the band of piece p's rows or columns (or the rest), and all lines across it, to
    `end`; returns where its columns begin."""
    middle = end
    for which in range(2):  # rows, then columns
        begin, count = pieces[p, 1 + 2 * which], pieces[p, 2 + 2 * which] - pieces[p, 1 + 2 * which]
        pieces[p, 1 + 2 * which], middle = end, end
        for i in range(count):
            if cut[1] != which or (cut[2] <= i < cut[3]) == inside:
                lines[end] = lines[begin + i]
                end += 1
        pieces[p, 2 + 2 * which] = end
    return middle


@inner
def _prune(problem: Problem, parts: Parts, p: int, begin: int, middle: int) -> int:
    """Drops rows and columns of a new piece without tiles, and sums its load; its rows are written
    from `begin`, its columns from `middle` on. Returns where free room then begins."""
    pieces, lines, end = parts.pieces, parts.lines, parts.pieces[p, 4]
    s, work = pieces[p, 0], problem.work
    block, base = problem.first_block[s], problem.work_start[s]
    stride = problem.first_block[s + 1] - block
    kept = np.zeros(end - begin, np.uint8)
    total, owned = 0.0, 0.0
    for i in range(begin, middle):
        row = lines[i]
        for j in range(middle, end):
            weight = work[base + row * stride + lines[j]]
            total += weight
            if row == lines[j]:
                owned += problem.tokens[block + row]
            if weight > 0 or row == lines[j]:
                kept[i - begin] = kept[j - begin] = 1
    share = problem.group_end[pieces[p, 6]] - problem.group_end[pieces[p, 5]]
    parts.load[p, 0], parts.load[p, 1] = total * share, owned * share
    free = begin
    for which in range(2):
        old, last = (begin, middle) if which == 0 else (middle, end)
        pieces[p, 1 + 2 * which] = free
        for i in range(old, last):
            if kept[i - begin]:
                lines[free] = lines[i]
                free += 1
        pieces[p, 2 + 2 * which] = free
    return free


@compiled
def write_ranks(problem: Problem, parts: Parts, rank_of_node: Int32, cell_rank: Int32) -> None:
    """Gives all tiles of single ranks' regions to them; `cell_rank` is [head groups, cells]."""
    pieces, lines = parts.pieces, parts.lines
    for node in range(len(parts.span)):
        if rank_of_node[node] < 0:
            continue
        for p in range(parts.span[node, 0], parts.span[node, 1]):
            s = pieces[p, 0]
            stride = problem.first_block[s + 1] - problem.first_block[s]
            for g in range(pieces[p, 5], pieces[p, 6]):
                for i in range(pieces[p, 1], pieces[p, 2]):
                    base = problem.work_start[s] + lines[i] * stride
                    for j in range(pieces[p, 3], pieces[p, 4]):
                        cell_rank[g, base + lines[j]] = rank_of_node[node]
