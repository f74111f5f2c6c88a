"""Recursive bisection along the topology: machines first, then the ranks of a machine."""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from dyncp.arrays import Float64, Int32, Int64
from dyncp.placement.bisection.cuts import Taste
from dyncp.placement.bisection.regions import Problem, Region, whole_batch
from dyncp.placement.bisection.split import Tree, split_region, write_ranks
from dyncp.topology import Topology

NO_NOISE = np.ones(1)


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
    """How to split: `rows_only` never cuts between columns; `peel` splits machines off one by one
    instead of by halves; `left` is the share of a machine's ranks that come first in a split;
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


def split(
    problem: Problem, region: Region, topology: Topology, budget: Budget, way: Way
) -> Iterator[Region]:
    """Regions of the ranks, in order."""
    groups = rank_tree(topology, way.peel, way.left)
    tree = Tree(groups.children, budget.of_nodes(groups))
    parts = split_region(problem, region, tree, way.taste(problem))
    for node in np.argsort(np.where(groups.rank < 0, topology.num_ranks, groups.rank)):
        if groups.rank[node] >= 0:
            own = slice(*parts.span[node])
            yield Region(parts.pieces[own], parts.lines, parts.load[own])


def owners(problem: Problem, regions: list[Region]) -> Int64:
    """The region of every block's rows."""
    owner = np.zeros(len(problem.tokens), np.int64)
    for number, region in enumerate(regions):
        first = problem.first_block[region.pieces[:, 0]]
        count = region.pieces[:, 2] - region.pieces[:, 1]
        owner[np.repeat(first, count) + region.rows] = number
    return owner


def halve(
    topology: Topology, *, peel: bool = False, left: float = 0.5
) -> tuple[Topology, Topology]:
    """Two parts of about equal size: 3 machines give 1 and 2, one machine of 8 ranks 4 and 4."""
    machines, ranks = topology.machines, topology.ranks_per_machine
    if machines > 1:
        first = 1 if peel else machines // 2
        return Topology(first, ranks), Topology(machines - first, ranks)
    first = max(1, int(ranks * left))
    return Topology(1, first), Topology(1, ranks - first)
