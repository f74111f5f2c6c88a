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


def bisect(problem: Problem, topology: Topology, budget: Budget) -> Int64:
    """Rank of every cell of `problem.work`."""
    penalty = 4.0 * float(problem.q_bytes.sum() + problem.kv_bytes.sum())
    cell_rank = np.zeros(len(problem.work), np.int64)
    for region, rank in _leaves(problem, whole_batch(problem), 0, topology, budget, penalty):
        write_ranks(problem, region, rank, cell_rank)
    return cell_rank


def _leaves(
    problem: Problem, region: Region, first: int, topology: Topology, budget: Budget, penalty: float
) -> Iterator[tuple[Region, int]]:
    if topology.num_ranks == 1:
        yield region, first
        return
    left, right = halve(topology)
    caps = budget.of_sides(left.num_ranks, right.num_ranks)
    cut = choose_cut(problem, region, caps, budget.mean, penalty)
    for side, part, start in ((0, left, first), (1, right, first + left.num_ranks)):
        part_region = take_side(problem, region, cut, side)
        yield from _leaves(problem, part_region, start, part, budget, penalty)


def halve(topology: Topology) -> tuple[Topology, Topology]:
    """Two parts of about equal size: 3 machines give 1 and 2, one machine of 8 ranks 4 and 4."""
    machines, ranks = topology.machines, topology.ranks_per_machine
    if machines > 1:
        return Topology(machines // 2, ranks), Topology(machines - machines // 2, ranks)
    return Topology(1, ranks // 2), Topology(1, ranks - ranks // 2)
