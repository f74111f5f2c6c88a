"""What solvers work on: the batch as one matrix of work per sequence, and levelling of pieces."""

from typing import NamedTuple

import numpy as np

from dyncp.arrays import Float64, Int32, Int64, starts_of
from dyncp.blocks import K_KINDS, Q_KINDS, BlockGraph
from dyncp.compiled import compiled, inner
from dyncp.topology import Topology

# What travels for query blocks and for key blocks in both directions.
BOTH = [[kind for kinds in side.values() for kind in kinds] for side in (Q_KINDS, K_KINDS)]


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

    @property
    def sequence(self) -> Int64:
        """The sequence of every block."""
        return np.repeat(np.arange(len(self.first_block) - 1), np.diff(self.first_block))

    def mean(self, num_ranks: int) -> Float64:
        """Work and tokens of a rank. A batch may have no pairs at all; a mean of 0 would be no unit
        to measure shares with."""
        return np.maximum([self.work.sum() / num_ranks, self.tokens.sum() / num_ranks], 1e-9)


class Cells(NamedTuple):
    """Some cells of `Problem.work`: their index, query and key block."""

    cell: Int64
    q_block: Int64
    k_block: Int64


def make_problem(graph: BlockGraph) -> Problem:
    sequences = np.arange(len(graph.batch.lengths) + 1)
    first = np.searchsorted(graph.blocks.sequence, sequences).astype(np.int64)
    work_start = starts_of(np.diff(first) ** 2)
    work = np.zeros(work_start[-1])
    per_token = graph.payload_bytes.sum(axis=1)
    tokens = graph.blocks.tokens.astype(np.float64)
    q_bytes, kv_bytes = (tokens * per_token[kinds].sum() for kinds in BOTH)
    heads = np.array([0, *(group.num_kv_heads for group in graph.head_groups)])
    group_end = np.cumsum(heads) / heads.sum()
    problem = Problem(work, work_start, first, tokens, q_bytes, kv_bytes, group_end)
    for name, tiles in graph.tiles.items():
        cell = cell_of(problem, tiles.q_block, tiles.k_block)
        work += np.bincount(cell, graph.tile_work(name), len(work))
    return problem


def cell_of(problem: Problem, q_block: Int64 | Int32, k_block: Int64 | Int32) -> Int64:
    """The index in `Problem.work` of pairs of blocks of one sequence."""
    sequence = problem.sequence[q_block]
    first, stride = problem.first_block[sequence], np.diff(problem.first_block)[sequence]
    cell: Int64 = problem.work_start[sequence] + (q_block - first) * stride + k_block - first
    return cell


def diagonal(problem: Problem) -> Int64:
    """The cell of every block with itself."""
    blocks = np.arange(len(problem.tokens))
    return cell_of(problem, blocks, blocks)


def find_cells(problem: Problem) -> Cells:
    """Those that have work, ordered."""
    cell = np.flatnonzero(problem.work)
    sequence = np.searchsorted(problem.work_start, cell, side="right") - 1
    stride, first = np.diff(problem.first_block)[sequence], problem.first_block[sequence]
    row, column = np.divmod(cell - problem.work_start[sequence], stride)
    return Cells(cell, first + row, first + column)


# Heavy rows: those that attend so much that one rank could hardly compute them alone.
#
# The last rows of causal blockwise attend everything. No band of rows or columns suits them
# together with the others, so their tiles run where their keys live: they are folded into the
# diagonal tiles of their key blocks. The queries then travel to all ranks, which costs less than
# all keys to one.

# A heavy row has more than this share of a rank's mean work.
HEAVY = 0.5


def heavy_cells(problem: Problem, cells: Cells, num_ranks: int, unusual: float = 0.0) -> Cells:
    """The cells of heavy rows, except for their diagonal; only rows with `unusual` times the work
    of their sequence's mean row count."""
    row = np.bincount(cells.q_block, problem.work[cells.cell], len(problem.tokens))
    blocks, sequence = np.diff(problem.first_block), problem.sequence
    mean_row = (np.bincount(sequence, row, len(blocks)) / np.maximum(blocks, 1))[sequence]
    heavy = (row > HEAVY * problem.work.sum() / num_ranks) & (row > unusual * mean_row)
    chosen = heavy[cells.q_block] & (cells.q_block != cells.k_block)
    return Cells(*(column[chosen] for column in cells))


def fold(problem: Problem, heavy: Cells) -> Problem:
    """The problem with the work of heavy cells added to the diagonal of their key blocks."""
    work = problem.work.copy()
    work[heavy.cell] = 0.0
    np.add.at(work, diagonal(problem)[heavy.k_block], problem.work[heavy.cell])
    return problem._replace(work=work)


def border_price(topology: Topology) -> float:
    """How much longer a byte takes between nodes, on a rank's share of the NICs, than inside one;
    0 where there is one node."""
    if topology.nodes == 1:
        return 0.0
    return topology.intra.bandwidth * topology.ranks_per_node / topology.inter.bandwidth


# Levelling: spreads whole pieces over bins, largest first, then with moves and swaps that relieve
# the most loaded bin.

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
