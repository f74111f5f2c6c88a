"""Recursive bisection along the topology: nodes first, then the ranks of a node.

Every group of ranks is split in two, with the cheapest cut of its region (cuts.py)."""

from functools import lru_cache
from typing import NamedTuple

import numpy as np

from dyncp.arrays import Bool, Float64, Int32, Int64, ranges_of
from dyncp.compiled import compiled, inner
from dyncp.placement.cuts import BY_GROUPS, Parts, SplitStrategy, Trial, choose_cut, make_trial
from dyncp.placement.problem import Problem
from dyncp.topology import Topology


class Region(NamedTuple):
    """The tiles of a group of ranks: at most one piece (rows × columns × head groups) per sequence.

    `pieces` is [pieces, 7]: the sequence, begin and end of its rows and of its columns in `lines`
    (block numbers inside the sequence), then begin and end of its head groups. `load` is
    [pieces, 2]: work, and tokens of the blocks whose diagonal tile is in the piece."""

    pieces: Int64
    lines: Int64
    load: Float64


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
    """The rows of the chosen blocks with all columns of their sequences. `whole` is the region of
    the whole batch, `row_load` [blocks, 2] has the work and tokens of rows."""
    blocks = np.flatnonzero(chosen)
    of_block = problem.sequence[blocks]
    sequence, begin, counts = np.unique(of_block, return_index=True, return_counts=True)
    pieces = whole.pieces[sequence]
    pieces[:, 3:5] += len(blocks)
    pieces[:, 1], pieces[:, 2] = begin, begin + counts
    lines = np.concatenate([blocks - problem.first_block[of_block], whole.lines])
    load = np.add.reduceat(row_load[blocks], begin) if len(begin) else np.zeros((0, 2))
    return Region(pieces, lines, load)


class RankTree(NamedTuple):
    """Groups of ranks, parents before children. `siblings` is the number of ranks of the parent;
    `rank` is -1 for groups of several ranks, and `children` are -1 for single ranks."""

    children: Int64  # [groups, 2]
    num_ranks: Int64
    siblings: Int64
    rank: Int32

    def caps(self, mean: Float64, tolerance: Float64, spend: float) -> Float64:
        """Most work and tokens of every group; some of the tolerance is left to later levels."""
        levels = np.ceil(np.log2(self.siblings))
        slack = np.minimum(1.0, spend / np.maximum(levels, 1))[:, None] * tolerance
        return self.num_ranks[:, None] * mean * (1 + slack)


@lru_cache(maxsize=64)
def rank_tree(topology: Topology, peel: bool, left: float) -> RankTree:
    queue, parent, first = [topology], [topology.num_ranks], [0]
    children: list[tuple[int, int]] = []
    for group in queue:  # grows during the loop
        if group.num_ranks == 1:
            children.append((-1, -1))
            continue
        begin, parts = first[len(children)], halve(group, peel=peel, left=left)
        children.append((len(queue), len(queue) + 1))
        queue.extend(parts)
        first.extend([begin, begin + parts[0].num_ranks])
        parent.extend([group.num_ranks] * 2)
    num_ranks = np.array([group.num_ranks for group in queue])
    rank = np.where(num_ranks == 1, first, -1).astype(np.int32)
    return RankTree(np.array(children), num_ranks, np.array(parent), rank)


def halve(
    topology: Topology, *, peel: bool = False, left: float = 0.5
) -> tuple[Topology, Topology]:
    """Two parts of about equal size: 3 nodes give 1 and 2, one node of 8 ranks 4 and 4."""
    nodes, ranks = topology.nodes, topology.ranks_per_node
    if nodes > 1:
        first = 1 if peel else nodes // 2
        return Topology(first, ranks), Topology(nodes - first, ranks)
    first = max(1, int(ranks * left))
    return Topology(1, first), Topology(1, ranks - first)


def split_cells(
    problem: Problem,
    topology: Topology,
    mean: Float64,
    tolerance: Float64,
    strategy: SplitStrategy,
) -> Int32:
    """Rank of every head group and cell of `problem.work`, [head groups, cells]. A rank may exceed
    the `mean` work and tokens by the share `tolerance`."""
    region = whole_batch(problem)
    parts, rank_of_group = _split(problem, region, topology, mean, tolerance, strategy)
    cell_rank = np.zeros((problem.num_groups, len(problem.work)), np.int32)
    write_ranks(problem, parts, rank_of_group, cell_rank)
    return cell_rank


def split_rows(
    problem: Problem,
    region: Region,
    topology: Topology,
    mean: Float64,
    tolerance: Float64,
    strategy: SplitStrategy,
) -> Int64:
    """The rank of every block's rows; 0 for blocks outside the region."""
    parts, rank_of_group = _split(problem, region, topology, mean, tolerance, strategy)
    first, end = parts.span[rank_of_group >= 0].T
    of_rank = ranges_of(first, end - first)
    rank = np.repeat(rank_of_group[rank_of_group >= 0], end - first)
    sequence, begin, stop = parts.pieces[of_rank, :3].T
    lines = parts.lines[ranges_of(begin, stop - begin)]
    owner = np.zeros(len(problem.tokens), np.int64)
    owner[np.repeat(problem.first_block[sequence], stop - begin) + lines] = np.repeat(
        rank, stop - begin
    )
    return owner


def _split(
    problem: Problem,
    region: Region,
    topology: Topology,
    mean: Float64,
    tolerance: Float64,
    strategy: SplitStrategy,
) -> tuple[Parts, Int32]:
    """The regions of all groups of ranks, and the rank of each group (-1: several ranks)."""
    tree = rank_tree(topology, strategy.peel, strategy.left)
    caps = tree.caps(mean, tolerance, strategy.spend)
    groups, count = len(caps), len(region.pieces)
    order = np.argsort(-(region.load / caps[0]).max(axis=1), kind="stable")
    size = groups * count + 1  # a region has at most one piece per sequence
    spans = int((region.pieces[:, [2, 4]] - region.pieces[:, [1, 3]]).sum())
    parts = Parts(
        np.empty((size, 7), np.int64),
        np.empty(len(region.lines) + (groups + 1) * spans, np.int64),
        np.empty((size, 2)),
        np.zeros((groups, 2), np.int64),
    )
    parts.pieces[:count], parts.load[:count] = region.pieces[order], region.load[order]
    parts.lines[: len(region.lines)] = region.lines
    parts.span[0, 1] = count
    trial = make_trial(count, 4.0 * float(problem.q_bytes.sum() + problem.kv_bytes.sum()))
    split_tree(problem, tree.children, caps, strategy, parts, trial, len(region.lines))
    return parts, tree.rank


@compiled
def split_tree(
    problem: Problem,
    children: Int64,
    caps: Float64,
    strategy: SplitStrategy,
    parts: Parts,
    trial: Trial,
    end: int,
) -> None:
    """Splits the region of group 0 down to single ranks, into `parts`; `end` is the first free
    index of its lines."""
    top = parts.span[0, 1]
    for group in range(len(children)):
        if children[group, 0] < 0:
            continue
        first, last = parts.span[group, 0], parts.span[group, 1]
        for half in range(2):
            for what in range(2):
                trial.caps[half, what] = caps[children[group, half], what]
        _sort(parts.load, first, last, trial.caps, trial.order)
        choose_cut(problem, strategy, parts, first, last, group, trial)
        for half in range(2):
            child = children[group, half]
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
    """Writes the pieces of one side, starting at index `top`; returns the first free indices of
    pieces and lines."""
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
    """Sorts pieces [first, last), numbered from `first`, by the greater of their shares of work and
    tokens. Insertion sort: they are almost in order, because their parents were sorted."""
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
def _cut_groups(
    group_end: Float64, pieces: Int64, load: Float64, p: int, b: int, inside: bool
) -> None:
    """Keeps the first b head groups of piece p if `inside`, otherwise the others."""
    whole = group_end[pieces[p, 6]] - group_end[pieces[p, 5]]
    pieces[p, 6 if inside else 5] = pieces[p, 5] + b
    share = (group_end[pieces[p, 6]] - group_end[pieces[p, 5]]) / whole
    load[p, 0], load[p, 1] = load[p, 0] * share, load[p, 1] * share


@inner
def _cut_lines(pieces: Int64, lines: Int64, p: int, cut: Int64, inside: bool, end: int) -> int:
    """Keeps the band of piece p's rows or columns if `inside`, otherwise the rest, and all crossing
    lines. Writes the lines from index `end` on; returns where the columns start."""
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
    """Drops the rows and columns of a new piece that have no tiles, and sums its load. Its rows
    start at line `begin`, its columns at line `middle`. Returns the first free line."""
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
def write_ranks(problem: Problem, parts: Parts, rank_of_group: Int32, cell_rank: Int32) -> None:
    """Writes the rank of every tile to `cell_rank` [head groups, cells], from the regions of single
    ranks."""
    pieces, lines = parts.pieces, parts.lines
    for group in range(len(parts.span)):
        if rank_of_group[group] < 0:
            continue
        for p in range(parts.span[group, 0], parts.span[group, 1]):
            s = pieces[p, 0]
            stride = problem.first_block[s + 1] - problem.first_block[s]
            for g in range(pieces[p, 5], pieces[p, 6]):
                for i in range(pieces[p, 1], pieces[p, 2]):
                    base = problem.work_start[s] + lines[i] * stride
                    for j in range(pieces[p, 3], pieces[p, 4]):
                        cell_rank[g, base + lines[j]] = rank_of_group[group]
