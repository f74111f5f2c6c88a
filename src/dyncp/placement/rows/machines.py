"""The machine of every block: few bytes over the borders of machines, within their budgets.

Whole sequences, where the budgets allow it; otherwise sequences too long for a machine are cut into
pieces in several ways, the pieces are levelled like sequences, and the best is kept.
"""

from dataclasses import dataclass

import numpy as np

from dyncp.arrays import Float64, Int64
from dyncp.placement.bisection.problem import Problem
from dyncp.placement.rows.homes import Needs
from dyncp.placement.rows.level import Rows, level, make_rows
from dyncp.placement.rows.pieces import Lines, cut_ways, evenly, from_the_end, zigzag
from dyncp.topology import Topology

# Pieces have at most this share of a machine.
PIECES = (1.0, 0.93, 0.85, 0.5, 0.3)
MAX_MOVES = 100
# The best ways before levelling are levelled.
LEVELLED = 3


@dataclass(frozen=True, eq=False)
class Machines:
    """`caps` is what a machine may have of work and tokens."""

    problem: Problem
    needs: Needs
    topology: Topology  # one rank per machine
    caps: Float64

    @property
    def sequence(self) -> Int64:
        """Of every block."""
        blocks = np.diff(self.problem.first_block)
        return np.repeat(np.arange(len(blocks)), blocks)

    @property
    def load(self) -> Float64:
        """Work and tokens of every block."""
        return np.stack([self.needs.work, self.problem.tokens], axis=1)

    def rows(self, machine: Int64) -> Rows:
        return make_rows(self.problem, self.needs, self.topology, self.caps, machine)


def place_machines(machines: Machines) -> Int64:
    lines = Lines(machines.sequence, machines.load, machines.caps)
    count = machines.topology.num_ranks
    best = machines.rows(lines.level(lines.sequence, count))
    if (best.used <= best.aim * (1 + 1e-9)).all():
        return best.rank
    ways = cut_ways(lines, count, (from_the_end, evenly, zigzag), PIECES)
    options = sorted([best, *map(machines.rows, ways)], key=cost)
    for rows in options[:LEVELLED]:
        level(rows, MAX_MOVES, True)
    return min(options[:LEVELLED], key=cost).rank


def cost(rows: Rows) -> float:
    """Bytes over the busiest border (a machine's, one way), and a penalty where aims are missed."""
    owner = np.tile(rows.rank, 2)
    comes = np.where(rows.users > 0, rows.size[:, None], 0.0)
    comes[np.arange(len(owner)), owner] = 0.0
    leaves = np.bincount(owner, comes.sum(axis=1), comes.shape[1])
    busiest = max(comes.sum(axis=0).max(), leaves.max())
    missed = np.maximum(rows.used / rows.aim - 1 - 1e-9, 0).sum()
    return float(busiest + 0.1 * comes.sum() + 1e3 * missed * rows.size.sum())
