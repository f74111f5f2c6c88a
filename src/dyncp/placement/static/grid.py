"""Grid: data-parallel groups of ranks, and inside each context × head positions.

Six ranks in one group with 2 heads and 3 contexts. The all-to-all over heads runs along a row, the
ring over contexts down a column:

    head-first (TransformerEngine)        context-first (LoongTrain)

               head 0   head 1                       head 0   head 1
    context 0     0        1              context 0     0        3
    context 1     2        3              context 1     1        4
    context 2     4        5              context 2     2        5

Head-first keeps an all-to-all on neighbouring ranks and lets rings cross nodes; context-first
keeps a ring on neighbouring ranks and lets all-to-alls cross.
"""

from dataclasses import dataclass

import numpy as np

from dyncp.arrays import Float64, Int64
from dyncp.blocks import BlockGraph
from dyncp.compiled import compiled
from dyncp.topology import Topology

# Data parallelism: whole sequences are dealt to groups of ranks, the heaviest first.


def deal_sequences(graph: BlockGraph, num_groups: int) -> Int64:
    """Group of every sequence: the longest goes first, always to the least loaded group.

    A group's load is its share of the tokens or of the work, whichever is larger: the rank with
    most tokens sets the time of everything outside attention. Loads 5 4 3 3 3 on 2 groups:

        group 0: 5 3      group 1: 4 3 3
    """
    return deal_loads(sequence_load(graph), num_groups)


def deal_loads(load: Float64, num_groups: int) -> Int64:
    """As `deal_sequences`, from the shares that `sequence_load` gives."""
    group = np.zeros(len(load), np.int64)
    order = np.argsort(-load.max(axis=1), kind="stable")
    deal(load, order, np.zeros((num_groups, 2)), group)
    return group


@compiled
def deal(load: Float64, order: Int64, group_load: Float64, group: Int64) -> None:
    """Deals loads in this order to groups that have `group_load` already; writes their groups."""
    for sequence in order:
        least, chosen = np.inf, 0
        for g in range(len(group_load)):
            most = max(group_load[g, 0] + load[sequence, 0], group_load[g, 1] + load[sequence, 1])
            if most < least:
                least, chosen = most, g
        group[sequence] = chosen
        for what in range(2):  # adding rows would take seconds to compile
            group_load[chosen, what] += load[sequence, what]


def sequence_load(graph: BlockGraph) -> Float64:
    """Every sequence's share of the batch's tokens and work, float64[sequences, 2]."""
    tokens = np.asarray(graph.batch.lengths, np.float64)
    work = np.bincount(graph.blocks.sequence, graph.row_work, len(tokens))
    return np.stack([tokens / tokens.sum(), work / max(work.sum(), 1.0)], axis=1)


@dataclass(frozen=True, slots=True)
class Grid:
    groups: int
    contexts: int
    heads: int = 1
    context_first: bool = False

    @staticmethod
    def of(topology: Topology, degree: int, heads: int, context_first: bool, name: str) -> "Grid":
        """Groups of `degree` ranks, `heads` of them beside each other; ValueError if impossible."""
        ranks = topology.num_ranks
        if degree < 1 or ranks % degree:
            raise ValueError(
                f"{name}: a context-parallel degree of {degree} does not divide {ranks} ranks; "
                f"allowed are {', '.join(map(str, divisors(ranks)))}"
            )
        if heads < 1 or degree % heads:
            raise ValueError(
                f"{name}: {heads} head groups do not divide the context-parallel degree {degree}; "
                f"allowed are {', '.join(map(str, divisors(degree)))}"
            )
        return Grid(ranks // degree, degree // heads, heads, context_first)

    @property
    def degree(self) -> int:
        return self.contexts * self.heads

    @property
    def ranks(self) -> Int64:
        """int64[groups, contexts, heads]"""
        if self.context_first:
            shape = (self.groups, self.heads, self.contexts)
            return np.arange(np.prod(shape)).reshape(shape).transpose(0, 2, 1)
        shape = (self.groups, self.contexts, self.heads)
        return np.arange(np.prod(shape)).reshape(shape)

    @property
    def rings(self) -> tuple[tuple[int, ...], ...]:
        """The columns of all groups: ring `group * heads + head`."""
        columns = self.ranks.transpose(0, 2, 1).reshape(-1, self.contexts)
        return tuple(tuple(column) for column in columns.tolist())


def divisors(number: int) -> list[int]:
    return [d for d in range(1, number + 1) if number % d == 0]
