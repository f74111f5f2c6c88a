"""Recursive bisection along the topology: machines first, then the ranks of a machine."""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from dyncp.arrays import Float64, Int64
from dyncp.placement.bisection.problem import Problem
from dyncp.placement.bisection.split import (
    Region,
    choose_cut,
    take_side,
    whole_batch,
    write_owners,
    write_ranks,
)
from dyncp.topology import Topology


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

    def of_sides(self, left: int, right: int) -> Float64:
        """Most work and tokens of two groups of ranks, [2, 2]; later levels keep some slack."""
        levels = np.ceil(np.log2(left + right))
        slack = self.tolerance * min(1.0, self.spend / levels)
        return np.outer([left, right], self.mean * (1 + slack))


@dataclass(frozen=True, slots=True)
class Way:
    """How to split: `rows_only` never cuts between columns; `peel` splits machines off one by one
    instead of by halves; `sizes` of the band are tried when others level a cut sequence."""

    rows_only: bool = False
    peel: bool = False
    sizes: int = 1


def bisect(problem: Problem, topology: Topology, budget: Budget) -> Int64:
    """Rank of every cell of `problem.work`."""
    cell_rank = np.zeros(len(problem.work), np.int64)
    for rank, region in enumerate(split(problem, whole_batch(problem), topology, budget, Way())):
        write_ranks(problem, region, rank, cell_rank)
    return cell_rank


def split(
    problem: Problem,
    region: Region,
    topology: Topology,
    budget: Budget,
    way: Way,
) -> Iterator[Region]:
    """Regions of the ranks, in order."""
    if topology.num_ranks == 1:
        yield region
        return
    parts = halve(topology, peel=way.peel)
    caps = budget.of_sides(*(part.num_ranks for part in parts))
    penalty = 4.0 * float(problem.q_bytes.sum() + problem.kv_bytes.sum())
    cut = choose_cut(problem, region, caps, budget.mean, penalty, way.rows_only, way.sizes)
    for side, part in enumerate(parts):
        own = take_side(problem, region, cut, side)
        yield from split(problem, own, part, budget, way)


def owners(problem: Problem, regions: list[Region]) -> Int64:
    """The region of every block's rows."""
    owner = np.zeros(len(problem.tokens), np.int64)
    for number, region in enumerate(regions):
        write_owners(problem, region, number, owner)
    return owner


def halve(topology: Topology, *, peel: bool = False) -> tuple[Topology, Topology]:
    """Two parts of about equal size: 3 machines give 1 and 2, one machine of 8 ranks 4 and 4."""
    machines, ranks = topology.machines, topology.ranks_per_machine
    if machines > 1:
        left = 1 if peel else machines // 2
        return Topology(left, ranks), Topology(machines - left, ranks)
    return Topology(1, ranks // 2), Topology(1, ranks - ranks // 2)
