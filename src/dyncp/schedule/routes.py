"""Routes: how a block reaches the ranks that use it, and how their results come back.

Inside a node straight from the owner. A block that several ranks of another node use crosses
the border once, to one of them (its relay), which passes it on; their partial results are summed
there and cross back once. Two nodes, A B | C D, a block of A used by all:

    A → B, A → C, then C → D          back: B → A, D → C, then C → A the sum
"""

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from dyncp.arrays import Bool, Float64, Int64
from dyncp.compiled import compiled
from dyncp.schedule.uses import Uses
from dyncp.topology import Topology


@dataclass(frozen=True, eq=False)
class Crossings:
    """Uses of other nodes' blocks: `order` has them sorted so that those of one block and
    node stand together, from `start[c]` to `start[c + 1]`; each such group crosses once."""

    order: Int64
    start: Int64

    def __len__(self) -> int:
        return len(self.start) - 1

    @property
    def firsts(self) -> Int64:
        """One use of every group."""
        return self.order[self.start[:-1]]

    def mark(self, num_uses: int) -> Bool:
        marked = np.zeros(num_uses, np.bool_)
        marked[self.order] = True
        return marked


@dataclass(frozen=True, eq=False)
class Routes:
    """`source` is the rank that a use gets its block from, and where its results go; `relay` is the
    use that passes it on (-1: it comes straight from the owner). `crosses` marks those that come
    over the border of a node."""

    source: Int64
    relay: Int64
    crosses: Bool

    @cached_property
    def straight(self) -> Bool:
        """Which come straight from an owner in the same node."""
        inside: Bool = (self.relay < 0) & ~self.crosses
        return inside

    @cached_property
    def passed_on(self) -> Int64:
        """Uses that get their blocks from a relay."""
        return np.flatnonzero(self.relay >= 0)


def find_crossings(uses: Uses, topology: Topology, *, joined: bool) -> Crossings:
    """With `joined`, uses of one block in one node cross together."""
    node = uses.rank // topology.ranks_per_node
    far = np.flatnonzero(node != uses.owner // topology.ranks_per_node)
    keys = [key[far] for key in (uses.block, uses.head_group, uses.side, node)]
    by = np.lexsort(keys)
    changed = np.ones(len(far), np.bool_)
    if joined and len(far):
        changed[1:] = np.any([key[by][1:] != key[by][:-1] for key in keys], axis=0)
    return Crossings(far[by], np.append(np.flatnonzero(changed), len(far)))


def find_routes(uses: Uses, crossings: Crossings, phase: Int64, topology: Topology) -> Routes:
    """Chooses relays, `phase` by phase (of every crossing), so that NICs have equally much."""
    relay = np.full(len(uses), -1, np.int64)
    chosen = np.zeros(len(crossings), np.int64)
    order, start = crossings.order, crossings.start
    _choose_relays(
        uses.rank[order],
        uses.num_bytes[order].astype(np.float64),
        start,
        np.argsort(phase, kind="stable"),
        np.zeros(topology.num_ranks),
        np.zeros(topology.num_ranks),
        topology.ranks_per_nic,
        chosen,
    )
    relay[order] = np.repeat(order[chosen], np.diff(start))
    relay[order[chosen]] = -1
    crosses = np.zeros(len(uses), np.bool_)
    crosses[order[chosen]] = True
    source = np.where(relay < 0, uses.owner, uses.rank[relay])
    return Routes(source, relay, crosses)


def travel_seconds(
    uses: Uses, routes: Routes, num_bytes: Int64, topology: Topology
) -> tuple[float, float]:
    """Seconds that `num_bytes` of each use take on the busiest port inside nodes, and on the
    busiest NIC."""
    size, far = num_bytes.astype(np.float64), routes.crosses
    ends = (uses.rank, routes.source)
    inside = max(np.bincount(end[~far], size[~far], 1).max() for end in ends)
    nics = (end[far] // topology.ranks_per_nic for end in ends)
    between = max(np.bincount(nic, size[far], 1).max() for nic in nics)
    return float(inside) / topology.intra.bandwidth, float(between) / topology.nic_bandwidth


@compiled
def _choose_relays(
    rank: Int64,
    size: Float64,
    start: Int64,
    turn: Int64,
    nic_load: Float64,
    rank_load: Float64,
    ranks_per_nic: int,
    chosen: Int64,
) -> None:
    """Of every group of uses the one whose NIC, then whose rank, has least to receive so far."""
    for g in turn:
        best = start[g]
        for i in range(start[g] + 1, start[g + 1]):
            r, b = rank[i], rank[best]
            nic, other = nic_load[r // ranks_per_nic], nic_load[b // ranks_per_nic]
            if nic < other or (nic == other and rank_load[r] < rank_load[b]):
                best = i
        chosen[g] = best
        nic_load[rank[best] // ranks_per_nic] += size[best]
        rank_load[rank[best]] += size[best]
