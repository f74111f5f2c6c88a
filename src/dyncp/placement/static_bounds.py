"""Lower bounds of static methods, so that the planner can skip simulating most of them."""

from dataclasses import dataclass
from functools import cache

import numpy as np

from dyncp.arrays import Float64, Int64
from dyncp.blocks import BlockGraph
from dyncp.placement.megatron_hybrid import deal_documents, group_sizes, hybrid_shares, ring_seconds
from dyncp.placement.solver import Degrees
from dyncp.placement.static_layouts import deal_loads, sequence_load
from dyncp.placement.static_methods import METHODS, Method
from dyncp.topology import Topology

# Chunks end on whole tokens, and work is assumed to be even inside a block. So CERTAIN scales the
# estimates from chunks, and sequences with fewer than SHORT tokens per rank are ignored.
CERTAIN, SHORT = 0.95, 8
# Causal masks allow at least this share of all pairs.
DENSE = 0.5


# The bounds use only the loads of sequences.
#
# Whole sequences are dealt to groups of ranks. Methods that cut every sequence separately give a
# rank the same chunks of all sequences of its group, so its work is the sum of their work. Methods
# that balance chunks are even at best. The way keys are sent bounds the number of divisions and the
# bytes on the busiest link.


@dataclass(frozen=True, slots=True)
class Bound:
    """Lower bounds of a static method: the most loaded rank's share of the batch's work and tokens,
    its kernel calls, and the seconds of communication in the forward pass, per byte of a token's
    keys and values."""

    work: float
    tokens: float
    calls: int
    seconds_per_byte: float


class StaticBounds:
    """Bounds of static methods for one batch; `graph` may have any block sizes."""

    def __init__(self, graph: BlockGraph, topology: Topology) -> None:
        self._graph, self._topology = graph, topology
        self._lengths, self._num_tokens = graph.batch.lengths, graph.batch.num_tokens
        self._is_long = np.asarray(self._lengths) >= SHORT * topology.num_ranks
        # Causal or denser: the last rows of a sequence use the keys of all ranks, hop by hop.
        self._is_dense = self._is_long.copy()
        for pairs, rows in (whole_rows(graph, name) for name in graph.tiles):
            self._is_dense &= pairs >= DENSE * rows**2
        self._load = sequence_load(graph)
        self._row_work = graph.row_work / max(float(graph.row_work.sum()), 1.0)
        self._deal = cache(lambda groups: deal_loads(self._load, groups))
        self._chunks = cache(self._chunk_work)

    def of(self, degrees: Degrees) -> Bound:
        """The bounds of a static method with these degrees."""
        if degrees.method not in METHODS:
            return self._hybrid(degrees.tokens)
        method = METHODS[degrees.method]
        degree = degrees.ranks or self._topology.num_ranks
        heads = degree if method.only_heads else degrees.heads or 1
        groups = self._topology.num_ranks // degree
        group = self._deal(groups)
        columns = [np.bincount(group, own, groups) for own in self._load.T]
        share = np.stack(columns, axis=1).astype(np.float64)
        tokens = float(share[:, 1].max())
        return Bound(
            self._work(method, share, degree, heads),
            tokens / degree,
            degree // heads if method.pattern == "ring" and self._every_rank(share) else 1,
            self._seconds_per_byte(method, tokens * self._num_tokens, degree, heads),
        )

    def _every_rank(self, share: Float64) -> bool:
        """Whether the ranks of the group with the most work certainly use the keys of all ranks of
        that group. With one group any dense sequence ensures it, otherwise all must be dense."""
        return bool(self._is_dense.any() if len(share) == 1 else self._is_dense.all())

    def _work(self, method: Method, share: Float64, degree: int, heads: int) -> float:
        contexts, even = degree // heads, float(share[:, 0].max()) / degree
        if method.deal is not None or contexts == 1 or not self._is_long.any():
            return even
        chunks = self._chunks(method.chunks * contexts)
        if method.chunks == 2:
            chunks = chunks[:, :contexts] + chunks[:, : contexts - 1 : -1]
        place = self._deal(len(share))[:, None] * contexts + np.arange(contexts)
        by_rank = np.bincount(place.ravel(), chunks.ravel())
        return max(even, CERTAIN * float(by_rank.max()) / heads)

    def _chunk_work(self, count: int) -> Float64:
        """Share of the batch's work in each of `count` chunks of every long sequence. The work of a
        block that spans several chunks is divided by length."""
        # One cumulative sum per sequence s, over [2 s, 2 s + 1].
        blocks, lengths = self._graph.blocks, np.asarray(self._lengths, np.float64)
        sequence, sums = blocks.sequence, np.cumsum(self._row_work)
        first = np.searchsorted(sequence, np.arange(len(lengths)))
        before = np.append(0, sums)[first]
        ends = np.insert(
            2 * sequence + blocks.end / lengths[sequence], first, 2 * np.arange(len(first))
        )
        sums = np.insert(sums - before[sequence], first, 0)
        at = 2 * np.arange(len(lengths))[:, None] + np.arange(count + 1) / count
        work = np.diff(np.interp(at.ravel(), ends, sums).reshape(at.shape), axis=1)
        return np.where(self._is_long[:, None], work, 0.0)

    def _hybrid(self, tokens: int | None) -> Bound:
        ranks, lengths = self._topology.num_ranks, np.asarray(self._lengths)
        sizes = group_sizes(self._lengths, ranks, tokens)
        # The last of 2 * sizes chunks is shorter; its tokens may have twice the work of others.
        missing = np.where(sizes > 1, -lengths % (2 * sizes), 0)
        uneven = 2 * missing * sizes > (1 - CERTAIN) * lengths
        if uneven.any() or not self._is_long.all():
            return Bound(1 / ranks, 1 / ranks, 1, 0.0)
        first = deal_documents(self._load, sizes, ranks)
        work, held = CERTAIN * hybrid_shares(self._load, sizes, first, ranks).max(axis=0)
        travels = ring_seconds(self._lengths, sizes, first, self._topology)
        return Bound(float(work), float(held), 1, travels)

    def _seconds_per_byte(
        self, method: Method, group_tokens: float, degree: int, heads: int
    ) -> float:
        """Seconds per byte of one token's keys and values; a group has `group_tokens` tokens."""
        topology, contexts = self._topology, degree // heads
        spans = degree > topology.ranks_per_node
        if method.pattern == "ring":
            # Hop by hop, over a node border if the ring spans nodes.
            crosses = spans and (not method.context_first or contexts > topology.ranks_per_node)
            bandwidth = topology.nic_bandwidth if crosses else topology.intra.bandwidth
            return (contexts - 1) * group_tokens / contexts / heads / bandwidth
        if method.pattern == "all_gather" and spans:
            # A node receives what it does not own over its border, per rank or once.
            nodes = degree / topology.ranks_per_node
            copies = 1 if method.by_node else topology.ranks_per_node
            return copies * group_tokens * (1 - 1 / nodes) / topology.inter.bandwidth
        return 0.0


def whole_rows(graph: BlockGraph, name: str) -> tuple[Int64, Int64]:
    """Pairs and length of every sequence with mask `name`."""
    tiles = graph.tiles[name]
    lengths = np.asarray(graph.batch.lengths, np.int64)
    pairs = np.bincount(graph.blocks.sequence[tiles.q_block], tiles.pairs, len(lengths))
    return (pairs / len(graph.head_groups)).astype(np.int64), lengths
