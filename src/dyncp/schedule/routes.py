"""Remote blocks: which ranks use them, on which route they arrive, and how results go back.

Inside a node, the owner sends directly. If several ranks of another node use a block, it crosses
the node border once, to one of them (the relay), which passes it on. The relay also sums their
partial results, and the sum crosses the border once. Two nodes, A B | C D, and a block of A that
all ranks use:

    A → B, A → C, then C → D          back: B → A, D → C, then C → A the sum
"""

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from dyncp.arrays import Bool, Float64, Int64
from dyncp.blocks import K_KINDS, Q_KINDS, BlockGraph, Direction
from dyncp.compiled import compiled
from dyncp.placement import Placement, find_remote_uses
from dyncp.topology import Topology


@dataclass(frozen=True, eq=False)
class Uses:
    """Uses of blocks by ranks that do not own them, int64[uses] each: of query blocks, then of key
    blocks. `sent` and `result` are the kinds of the payloads that the rank receives and sends back
    (-1: none), `num_bytes` and `result_bytes` their sizes."""

    side: Int64  # 0 for queries, 1 for keys
    rank: Int64
    block: Int64
    head_group: Int64
    owner: Int64
    sent: Int64
    result: Int64
    num_bytes: Int64
    result_bytes: Int64

    def __len__(self) -> int:
        return len(self.rank)


@dataclass(frozen=True, eq=False)
class Work:
    """Tiles with their ranks and seconds. `use`, int64[2, tiles], is the use that brings the tile's
    query block and its key block (-1: local)."""

    rank: Int64
    seconds: Float64
    use: Int64

    @cached_property
    def local(self) -> Bool:
        return np.asarray((self.use < 0).all(axis=0))

    def first_and_last(self, division: Int64, num_uses: int) -> tuple[Int64, Int64]:
        """First and last division of the tiles of every use."""
        count = int(division.max(initial=0)) + 1
        used = np.zeros((num_uses + 1) * count, np.bool_)
        for use in self.use:
            used[use * count + division] = True  # index -1 is a spare row at the end
        used = used.reshape(-1, count)[:-1]
        return used.argmax(axis=1), count - 1 - used[:, ::-1].argmax(axis=1)


def find_uses(graph: BlockGraph, placement: Placement, name: str, direction: Direction) -> Uses:
    """All remote uses of mask `name` in one direction."""
    queries, keys = (find_remote_uses(graph, placement, name, keys=keys) for keys in (False, True))
    side = np.repeat([0, 1], [len(queries), len(keys)])
    block = np.concatenate([queries.block, keys.block])
    group = np.concatenate([queries.head_group, keys.head_group])
    q_kinds, k_kinds = Q_KINDS[direction], K_KINDS[direction]
    sent = np.array([q_kinds[0], k_kinds[0]])[side]
    result = np.array([q_kinds[1], *k_kinds[1:], -1])[side]
    per_token = np.vstack([graph.payload_bytes, np.zeros_like(graph.payload_bytes[:1])])
    tokens = graph.blocks.tokens[block].astype(np.int64)
    return Uses(
        side,
        np.concatenate([queries.rank, keys.rank]),
        block,
        group,
        placement.block_rank[block].astype(np.int64),
        sent,
        result,
        per_token[sent, group] * tokens,
        per_token[result, group] * tokens,
    )


def find_work(graph: BlockGraph, placement: Placement, name: str, seconds: Float64) -> Work:
    """The tiles of a mask; their uses are indices into `find_uses`."""
    queries, keys = (find_remote_uses(graph, placement, name, keys=keys) for keys in (False, True))
    of_keys = np.where(keys.of_tile < 0, -1, keys.of_tile + len(queries))
    rank = placement.tile_rank[name].astype(np.int64)
    return Work(rank, seconds, np.stack([queries.of_tile, of_keys]))


@dataclass(frozen=True, eq=False)
class Crossings:
    """Uses of other nodes' blocks, in groups that cross a node border once: group c has the uses
    `order[start[c]:start[c + 1]]` of one block in one node."""

    order: Int64
    start: Int64

    @property
    def firsts(self) -> Int64:
        """One use of every group."""
        return self.order[self.start[:-1]]

    def mark(self, num_uses: int) -> Bool:
        marked = np.zeros(num_uses, np.bool_)
        marked[self.order] = True
        return marked


@dataclass(frozen=True, eq=False)
class Relays:
    """For every use: `source` is the rank that sends its block and receives its results; `relay` is
    the use that passes the block on (-1: the owner sends it directly); `crosses` says whether the
    block crosses a node border on its way to this rank."""

    source: Int64
    relay: Int64
    crosses: Bool

    @cached_property
    def straight(self) -> Bool:
        """Uses whose block is sent directly by an owner in the same node."""
        inside: Bool = (self.relay < 0) & ~self.crosses
        return inside

    @cached_property
    def passed_on(self) -> Int64:
        """Uses that get their blocks from a relay."""
        return np.flatnonzero(self.relay >= 0)


def find_crossings(uses: Uses, topology: Topology, *, joined: bool) -> Crossings:
    """With `joined`, all uses of one block in one node cross together; otherwise each crosses
    separately."""
    node = uses.rank // topology.ranks_per_node
    far = np.flatnonzero(node != uses.owner // topology.ranks_per_node)
    keys = [key[far] for key in (uses.block, uses.head_group, uses.side, node)]
    by = np.lexsort(keys)
    changed = np.ones(len(far), np.bool_)
    if joined and len(far):
        changed[1:] = np.any([key[by][1:] != key[by][:-1] for key in keys], axis=0)
    return Crossings(far[by], np.append(np.flatnonzero(changed), len(far)))


def choose_relays(uses: Uses, crossings: Crossings, phase: Int64, topology: Topology) -> Relays:
    """Chooses a relay for every crossing so that NICs receive about equally many bytes. Crossings
    of early phases choose first."""
    order, start = crossings.order, crossings.start
    chosen = _least_loaded(
        uses.rank[order],
        uses.num_bytes[order].astype(np.float64),
        start,
        np.argsort(phase, kind="stable"),
        topology.num_ranks,
        topology.ranks_per_nic,
    )
    relay = np.full(len(uses), -1, np.int64)
    relay[order] = np.repeat(order[chosen], np.diff(start))
    relay[order[chosen]] = -1
    crosses = np.zeros(len(uses), np.bool_)
    crosses[order[chosen]] = True
    source = np.where(relay < 0, uses.owner, uses.rank[relay])
    return Relays(source, relay, crosses)


def travel_seconds(
    uses: Uses, relays: Relays, num_bytes: Int64, topology: Topology
) -> tuple[float, float]:
    """Seconds that `num_bytes` of each use take on the busiest intra-node port, and on the busiest
    NIC."""
    size, far = num_bytes.astype(np.float64), relays.crosses
    ends = (uses.rank, relays.source)
    inside = max(np.bincount(end[~far], size[~far], 1).max() for end in ends)
    nics = (end[far] // topology.ranks_per_nic for end in ends)
    between = max(np.bincount(nic, size[far], 1).max() for nic in nics)
    return float(inside) / topology.intra.bandwidth, float(between) / topology.nic_bandwidth


@compiled
def _least_loaded(
    rank: Int64, size: Float64, start: Int64, turn: Int64, num_ranks: int, ranks_per_nic: int
) -> Int64:
    """For every group, the index of the use whose NIC, then whose rank, receives the fewest bytes
    so far."""
    nic_load, rank_load = np.zeros(num_ranks), np.zeros(num_ranks)
    chosen = np.zeros(len(turn), np.int64)
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
    return chosen
