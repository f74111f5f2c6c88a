"""Splits a region down a tree of groups of ranks, each time by the cheapest cut (cuts.py)."""

from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from dyncp.arrays import Float64, Int32, Int64, ranges_of
from dyncp.compiled import compiled, inner
from dyncp.placement.cuts import BY_GROUPS, Taste, Trial, choose_cut, make_trial
from dyncp.placement.problem import Parts, Problem, Region, whole_batch
from dyncp.topology import Topology


class Tree(NamedTuple):
    """Groups of ranks, parents first: `children` is [nodes, 2], -1 for single ranks; `caps` is
    [nodes, 2], most work and tokens."""

    children: Int64
    caps: Float64


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
    split_tree(problem, tree, taste, parts, make_trial(count), len(region.lines))
    return parts


@compiled
def split_tree(
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
        choose_cut(problem, taste, parts, first, last, node, trial)
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


NO_NOISE = np.ones(1)


# Recursive bisection along the topology: nodes first, then the ranks of a node.


@dataclass(frozen=True, eq=False)
class Budget:
    """Mean load of a rank (work, tokens), the share by which a rank may exceed it, and how many
    levels' worth of that share the first levels of the recursion may spend."""

    mean: Float64
    tolerance: Float64
    spend: float

    @property
    def caps(self) -> Float64:
        """Most work and tokens of a rank."""
        return self.mean * (1 + self.tolerance)

    def of_nodes(self, groups: "RankTree") -> Float64:
        """Most work and tokens of every group of ranks; later levels keep some slack."""
        levels = np.ceil(np.log2(groups.siblings))
        slack = np.minimum(1.0, self.spend / np.maximum(levels, 1))[:, None] * self.tolerance
        return groups.num_ranks[:, None] * self.mean * (1 + slack)


@dataclass(frozen=True, slots=True)
class Way:
    """How to split: `rows_only` never cuts between columns; `peel` splits nodes off one by one
    instead of by halves; `left` is the share of a node's ranks that come first in a split;
    `sizes` of the band are tried when others level a cut sequence. Row cuts count `row_bias` per
    byte, and noise makes another result likely where many cuts are about as good."""

    rows_only: bool = False
    peel: bool = False
    left: float = 0.5
    sizes: int = 1
    row_bias: float = 1.0
    noise: Float64 | None = None

    def taste(self, problem: Problem) -> Taste:
        noise = NO_NOISE if self.noise is None else self.noise
        penalty = 4.0 * float(problem.q_bytes.sum() + problem.kv_bytes.sum())
        return Taste(self.rows_only, self.sizes, self.row_bias, noise, penalty)


@dataclass(frozen=True, eq=False)
class RankTree:
    """Groups of ranks, parents first: children (-1 for single ranks), how many ranks a group and
    its parent have, and the rank of single ones (-1 for others)."""

    children: Int64
    num_ranks: Int64
    siblings: Int64
    rank: Int32


@lru_cache(maxsize=64)
def rank_tree(topology: Topology, peel: bool, left: float) -> RankTree:
    queue, parent, first = [topology], [topology.num_ranks], [0]
    children: list[tuple[int, int]] = []
    for group in queue:  # grows while it is read
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


def bisect(problem: Problem, topology: Topology, budget: Budget, way: Way | None = None) -> Int32:
    """Rank of every head group and cell of `problem.work`, [head groups, cells]."""
    way = way or Way()
    groups = rank_tree(topology, way.peel, way.left)
    tree = Tree(groups.children, budget.of_nodes(groups))
    parts = split_region(problem, whole_batch(problem), tree, way.taste(problem))
    cell_rank = np.zeros((problem.num_groups, len(problem.work)), np.int32)
    write_ranks(problem, parts, groups.rank, cell_rank)
    return cell_rank


def split_rows(
    problem: Problem, region: Region, topology: Topology, budget: Budget, way: Way
) -> Int64:
    """The rank of every block's rows, 0 for blocks that are not in the region."""
    groups = rank_tree(topology, way.peel, way.left)
    tree = Tree(groups.children, budget.of_nodes(groups))
    parts = split_region(problem, region, tree, way.taste(problem))
    first, end = parts.span[groups.rank >= 0].T
    of_rank = ranges_of(first, end - first)
    rank = np.repeat(groups.rank[groups.rank >= 0], end - first)
    sequence, begin, behind = parts.pieces[of_rank, :3].T
    lines = parts.lines[ranges_of(begin, behind - begin)]
    owner = np.zeros(len(problem.tokens), np.int64)
    owner[np.repeat(problem.first_block[sequence], behind - begin) + lines] = np.repeat(
        rank, behind - begin
    )
    return owner


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
