"""Groups per document (Megatron's hybrid context parallelism).

A document is split in zigzag over neighbouring ranks. Their number is the smallest power of two for
which each rank's share fits a budget of tokens, and the first rank is a multiple of it. Lengths
900 400 200 200 on 4 ranks with a budget of 450 tokens:

    ranks      0    1    2    3
             [900/2  ] [400] [200]      rank 3 also gets the last 200
"""

from collections.abc import Sequence
from functools import partial

import numpy as np

from dyncp.arrays import Float64, Int64, frozen, ranges_of
from dyncp.blocks import BlockGraph
from dyncp.placement.placement import Limits, Placement, Traffic
from dyncp.placement.problem import level_pieces
from dyncp.placement.solver import Degrees, Solver
from dyncp.placement.static_layouts import chunk_sizes, sequence_load, zigzag_ranks
from dyncp.topology import Topology


def hybrid_with_budget(tokens: int) -> Solver:
    """megatron_hybrid with at most `tokens` tokens of one document on a rank."""
    if tokens < 1:
        raise ValueError(f"megatron_hybrid's budget is {tokens} tokens; at least 1 is needed")
    return _solver(f"megatron_hybrid/tokens{tokens}", tokens)


def hybrid_candidates(lengths: Sequence[int], topology: Topology) -> list[Solver]:
    """megatron_hybrid with a budget of a rank's fair share of the tokens, and of 1/2, 1/4 and 1/8
    of it if the longest document then still fits: smaller budgets spread long documents over more
    ranks."""
    most = 1 << (topology.num_ranks.bit_length() - 1)
    budgets = [-(-sum(lengths) // (most * part)) for part in (2, 4, 8)]
    fitting = [budget for budget in budgets if budget * most >= max(lengths)]
    return [megatron_hybrid, *(hybrid_with_budget(budget) for budget in fitting)]


def _solver(name: str, budget: int | None) -> Solver:
    place, sizes = partial(_place, name, budget), partial(_block_sizes, budget)
    return Solver(name, place, sizes, degrees=Degrees("megatron_hybrid", tokens=budget))


def group_sizes(lengths: Sequence[int], num_ranks: int, budget: int | None) -> Int64:
    """Number of ranks of every document. The default budget is a fair share of the batch's tokens,
    so a document that is the whole batch gets all ranks (or the next lower power of two)."""
    most = 1 << (num_ranks.bit_length() - 1)
    share = -(-sum(lengths) // most) if budget is None else budget
    needed = -(-np.asarray(lengths, np.int64) // share)
    sizes = 1 << np.frexp((needed - 1).astype(np.float64))[1].astype(np.int64)  # powers of two
    if sizes.max() > most:
        raise ValueError(
            f"a document of {max(lengths)} tokens needs {sizes.max()} ranks with {share} tokens "
            f"each; groups have up to {most} of the {num_ranks} ranks: raise the budget"
        )
    return sizes


def _block_sizes(budget: int | None, lengths: Sequence[int], num_ranks: int) -> Int64:
    sizes = group_sizes(lengths, num_ranks, budget)
    return chunk_sizes(lengths, np.where(sizes > 1, 2 * sizes, 1))


def _place(
    name: str,
    budget: int | None,
    graph: BlockGraph,
    topology: Topology,
    _limits: Limits,
    _seed: int,
) -> Placement:
    num_ranks, lengths = topology.num_ranks, graph.batch.lengths
    sizes = group_sizes(lengths, num_ranks, budget)
    first_rank = deal_documents(sequence_load(graph), sizes, num_ranks)
    sequence = graph.blocks.sequence
    owner = first_rank[sequence] + zigzag_ranks(graph, sizes[sequence])
    rings, ring = _rings(first_rank, sizes)
    groups = len(graph.head_groups)
    ring, home = (np.repeat(own[:, None], groups, axis=1) for own in (ring[sequence], owner))
    traffic = Traffic("ring", rings, frozen(ring), frozen(home))
    return Placement.where_queries_live(graph, num_ranks, owner, name, static=True, traffic=traffic)


def hybrid_shares(load: Float64, sizes: Int64, first: Int64, num_ranks: int) -> Float64:
    """Each rank's share of the batch's work and tokens, [ranks, 2], if every document is split
    evenly over its group: `sizes` ranks from rank `first` on."""
    shares, part = np.zeros((num_ranks, 2)), load / sizes[:, None]
    np.add.at(shares, ranges_of(first, sizes), np.repeat(part, sizes, axis=0))
    return shares


def ring_seconds(lengths: Sequence[int], sizes: Int64, first: Int64, topology: Topology) -> float:
    """Least seconds on the busiest link, per byte of a token's keys and values. Every rank of a
    group sends all of the document, except its own share, to the next rank."""
    ranks = topology.ranks_per_node
    port, nic = np.zeros(topology.num_ranks), np.zeros(topology.nodes)
    for document in np.flatnonzero(sizes > 1).tolist():
        begin, size, length = first[document], sizes[document], lengths[document]
        moved = length - 2 * -(-length // (2 * size))
        if ranks % size == 0:
            port[begin : begin + size] += moved
        else:  # crosses the borders of all nodes that the group covers completely
            nic[-(-begin // ranks) : (begin + size) // ranks] += moved
    between = float(nic.max()) / topology.nic_bandwidth if topology.nodes > 1 else 0.0
    return max(float(port.max()) / topology.intra.bandwidth, between)


def deal_documents(load: Float64, sizes: Int64, num_ranks: int) -> Int64:
    """First rank of every document's group: the document with the most load per rank goes first, to
    the aligned group whose fullest rank stays lowest."""
    per_rank = load / sizes[:, None]
    rank_load, first = np.zeros((num_ranks, 2)), np.zeros(len(sizes), np.int64)
    order = np.lexsort((-per_rank.max(axis=1), -sizes))
    several = int((sizes > 1).sum())
    for document in order[:several]:
        size = sizes[document]
        aligned = rank_load[: num_ranks // size * size].reshape(-1, size, 2)
        fullest = (aligned + per_rank[document]).max(axis=(1, 2))
        first[document] = fullest.argmin() * size
        rank_load[first[document] : first[document] + size] += per_rank[document]
    whole, caps = order[several:], np.ones_like(rank_load)
    level_pieces(load, whole, len(whole), -1, rank_load, caps, first, 0)
    return first


def _rings(first_rank: Int64, sizes: Int64) -> tuple[tuple[tuple[int, ...], ...], Int64]:
    """The distinct groups, and the index of each document's group."""
    spans, ring = np.unique(np.stack([first_rank, sizes], 1), axis=0, return_inverse=True)
    rings = tuple(tuple(range(first, first + size)) for first, size in spans.tolist())
    return rings, ring.reshape(-1)


megatron_hybrid = _solver("megatron_hybrid", None)
