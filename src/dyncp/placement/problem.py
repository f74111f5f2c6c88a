"""What solvers work on: the batch as matrices of work, and levelling of pieces over bins."""

from typing import NamedTuple

import numpy as np

from dyncp.arrays import Bool, Float64, Int32, Int64, starts_of
from dyncp.blocks import Q_INPUT, Q_RESULT, BlockGraph, Payload
from dyncp.compiled import compiled, inner

Q_KINDS = [kind for side in (Q_INPUT, Q_RESULT) for kind in side.values()]
KV_KINDS = [Payload.KV, Payload.KV, Payload.DKV]  # forward, backward, gradient


# The batch as the bisection solver sees it: one work matrix per sequence, sizes per block.


class Problem(NamedTuple):
    """Blocks are numbered over the whole batch. `work` holds the blocks × blocks matrix of every
    sequence, one after the other (sequence s from `work_start[s]`), over all masks and head
    groups; `q_bytes` and `kv_bytes` are what a block's hyperedges cost per further rank, in both
    directions together. Head group g has the share `group_end[g + 1] - group_end[g]` of all."""

    work: Float64
    work_start: Int64
    first_block: Int64
    tokens: Float64
    q_bytes: Float64
    kv_bytes: Float64
    group_end: Float64

    @property
    def num_groups(self) -> int:
        return len(self.group_end) - 1


class Cells(NamedTuple):
    """The cells of `Problem.work` that have work, ordered: their index, query and key block."""

    cell: Int64
    q_block: Int64
    k_block: Int64


def make_problem(graph: BlockGraph) -> Problem:
    sequences = np.arange(len(graph.batch.lengths) + 1)
    first = np.searchsorted(graph.blocks.sequence, sequences).astype(np.int64)
    num_blocks = np.diff(first)
    work_start = starts_of(num_blocks**2)
    work = np.zeros(work_start[-1])
    for name, tiles in graph.tiles.items():
        sequence = graph.blocks.sequence[tiles.q_block]
        row, column = tiles.q_block - first[sequence], tiles.k_block - first[sequence]
        cell = work_start[sequence] + row * num_blocks[sequence] + column
        work += np.bincount(cell, graph.tile_work(name), len(work))
    per_token = graph.payload_bytes.sum(axis=1)
    tokens = graph.blocks.tokens.astype(np.float64)
    q_bytes, kv_bytes = (tokens * per_token[kinds].sum() for kinds in (Q_KINDS, KV_KINDS))
    heads = np.array([0, *(group.num_kv_heads for group in graph.head_groups)])
    group_end = np.cumsum(heads) / heads.sum()
    return Problem(work, work_start, first, tokens, q_bytes, kv_bytes, group_end)


def find_cells(problem: Problem) -> Cells:
    cell = np.flatnonzero(problem.work)
    sequence = np.searchsorted(problem.work_start, cell, side="right") - 1
    stride, first = np.diff(problem.first_block)[sequence], problem.first_block[sequence]
    row, column = np.divmod(cell - problem.work_start[sequence], stride)
    return Cells(cell, first + row, first + column)


def diagonal(problem: Problem) -> Int64:
    """The cell of every block with itself."""
    stride = np.diff(problem.first_block)
    sequence = np.repeat(np.arange(len(stride)), stride)
    within = np.arange(len(problem.tokens)) - problem.first_block[sequence]
    cells: Int64 = problem.work_start[sequence] + within * (stride[sequence] + 1)
    return cells


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
        begin, counts = self.pieces[:, 1], self.pieces[:, 2] - self.pieces[:, 1]
        within = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
        rows: Int64 = self.lines[np.repeat(begin, counts) + within]
        return rows


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


def region_of_rows(problem: Problem, whole: Region, row_load: Float64, chosen: Bool) -> Region:
    """The chosen blocks' rows, whose loads these are, with all columns of their sequences; `whole`
    is the whole batch."""
    blocks = np.flatnonzero(chosen)
    of_block = np.searchsorted(problem.first_block, blocks, side="right") - 1
    sequence, begin, counts = np.unique(of_block, return_index=True, return_counts=True)
    pieces = whole.pieces[sequence]
    pieces[:, 3:5] += len(blocks)
    pieces[:, 1], pieces[:, 2] = begin, begin + counts
    lines = np.concatenate([blocks - problem.first_block[of_block], whole.lines])
    load = np.add.reduceat(row_load[blocks], begin) if len(begin) else np.zeros((0, 2))
    return Region(pieces, lines, load)


class Parts(NamedTuple):
    """Regions of all nodes: pieces [span[n, 0], span[n, 1]) belong to node n. The other fields are
    a Region's, with free room at their ends."""

    pieces: Int64
    lines: Int64
    load: Float64
    span: Int64


# A heavy row has more than this share of a rank's mean work.
HEAVY = 0.5
# It also has so many times the work of its sequence's mean row; a causal sequence's last has twice.
UNUSUAL = 4.0


# Heavy rows: those that attend so much that one rank could not compute them alone.
#
# The last rows of causal blockwise attend everything. No band of rows or columns suits them
# together with the others, so they are first folded away: each of their tiles joins the diagonal
# tile of its key block. The queries then travel to all ranks, which costs less than all keys to
# one.


def heavy_cells(problem: Problem, cells: Cells, num_ranks: int) -> Bool:
    """Which cells are in heavy rows, but for their own diagonal."""
    row = np.bincount(cells.q_block, problem.work[cells.cell], len(problem.tokens))
    blocks = np.diff(problem.first_block)
    sequence = np.repeat(np.arange(len(blocks)), blocks)
    mean_row = (np.bincount(sequence, row, len(blocks)) / np.maximum(blocks, 1))[sequence]
    heavy = (row > HEAVY * problem.work.sum() / num_ranks) & (row > UNUSUAL * mean_row)
    chosen: Bool = heavy[cells.q_block] & (cells.q_block != cells.k_block)
    return chosen


def fold(problem: Problem, cells: Cells, chosen: Bool) -> Problem:
    """The problem with the work of chosen cells added to the diagonal of their key blocks."""
    work, moved = problem.work.copy(), cells.cell[chosen]
    work[moved] = 0.0
    np.add.at(work, _homes(problem, cells, chosen), problem.work[moved])
    return problem._replace(work=work)


def unfold(problem: Problem, cells: Cells, chosen: Bool, cell_rank: Int32) -> None:
    """Chosen cells get the rank of their key block's diagonal."""
    cell_rank[:, cells.cell[chosen]] = cell_rank[:, _homes(problem, cells, chosen)]


def _homes(problem: Problem, cells: Cells, chosen: Bool) -> Int64:
    return diagonal(problem)[cells.k_block[chosen]]


# Only so many of the largest pieces are swapped, so often.
SWAPPED_PIECES, MAX_SWAPS = 96, 60
_EPSILON = 1e-9


def level_all(load: Float64, caps: Float64, bins: int) -> Int64:
    """The bin of every piece; `caps` (work, tokens) are those of a bin."""
    order = np.argsort(-(load / caps).max(axis=1), kind="stable")
    place, used = np.zeros(len(load), np.int64), np.zeros((bins, 2))
    level_pieces(load, order, len(order), -1, used, np.tile(caps, (bins, 1)), place, MAX_SWAPS)
    return place


@compiled
def level_pieces(
    load: Float64,
    order: Int64,
    count: int,
    skip: int,
    used: Float64,
    caps: Float64,
    place: Int64,
    max_swaps: int,
) -> float:
    """Puts every piece but `skip` into the bin that it leaves least full, by the first `count` of
    `order`, adding to `used`; returns by how much the caps are missed, as a share of them.

    `load` is [pieces, 2]: work and tokens; `used` and `caps` are [bins, 2]."""
    for i in range(count):
        piece = order[i]
        if piece == skip:
            continue
        best, least = 0, 1e300
        for b in range(len(caps)):
            share = _share(used, caps, b, load[piece, 0], load[piece, 1])
            if share < least:
                best, least = b, share
        place[piece] = best
        used[best, 0] += load[piece, 0]
        used[best, 1] += load[piece, 1]
    for _ in range(max_swaps):
        if not _relieve(load, order, min(count, SWAPPED_PIECES), skip, used, caps, place):
            break
    missed = 0.0
    for b in range(len(caps)):
        for what in range(2):
            missed += max(0.0, used[b, what] / caps[b, what] - 1.0 - _EPSILON)
    return missed


@inner
def _share(used: Float64, caps: Float64, b: int, work: float, tokens: float) -> float:
    return float(max((used[b, 0] + work) / caps[b, 0], (used[b, 1] + tokens) / caps[b, 1]))


@inner
def _fullest(used: Float64, caps: Float64) -> int:
    full = 0
    for b in range(len(caps)):
        if _share(used, caps, b, 0.0, 0.0) > _share(used, caps, full, 0.0, 0.0):
            full = b
    return full


@inner
def _relieve(
    load: Float64, order: Int64, count: int, skip: int, used: Float64, caps: Float64, place: Int64
) -> bool:
    """The move or swap that leaves the fullest bin and its partner least full, while the fullest
    misses its caps."""
    full = _fullest(used, caps)
    best = _share(used, caps, full, 0.0, 0.0)
    if best <= 1.0 + _EPSILON:
        return False
    best, best_p, best_q, best_b = best - _EPSILON, -1, -1, -1
    for i in range(count):
        p = order[i]
        if p == skip or place[p] != full:
            continue
        for j in range(count):  # p itself stands for a move without a swap
            q = order[j]
            if q == skip or (place[q] == full and q != p):
                continue
            work = load[p, 0] - (load[q, 0] if q != p else 0.0)
            tokens = load[p, 1] - (load[q, 1] if q != p else 0.0)
            left = _share(used, caps, full, -work, -tokens)
            if left >= best:
                continue
            first, last = (place[q], place[q] + 1) if q != p else (0, len(caps))
            for b in range(first, last):
                if b == full:
                    continue
                worse = max(left, _share(used, caps, b, work, tokens))
                if worse < best:
                    best, best_p, best_q, best_b = worse, p, q, b
    if best_p < 0:
        return False
    _move(load, used, place, best_p, best_b)
    if best_q != best_p:
        _move(load, used, place, best_q, full)
    return True


@inner
def _move(load: Float64, used: Float64, place: Int64, p: int, b: int) -> None:
    for what in range(2):
        used[place[p], what] -= load[p, what]
        used[b, what] += load[p, what]
    place[p] = b
