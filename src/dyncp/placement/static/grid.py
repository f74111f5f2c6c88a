"""Grid: data-parallel groups of ranks, and inside each context × head positions.

Six ranks in one group with 2 heads and 3 contexts. The all-to-all over heads runs along a row, the
ring over contexts down a column:

    head-first (TransformerEngine)        context-first (LoongTrain)

               head 0   head 1                       head 0   head 1
    context 0     0        1              context 0     0        3
    context 1     2        3              context 1     1        4
    context 2     4        5              context 2     2        5

Head-first keeps an all-to-all on neighbouring ranks and lets rings cross machines; context-first
keeps a ring on neighbouring ranks and lets all-to-alls cross.
"""

from dataclasses import dataclass

import numpy as np

from dyncp.arrays import Int64
from dyncp.topology import Topology


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
