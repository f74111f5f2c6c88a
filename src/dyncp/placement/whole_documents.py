"""Whole documents: few bytes, no promise of balance.

`whole_documents` splits a sequence only when it is longer than a rank's fair share of tokens. The
longest sequence goes first. One that needs n ranks is spread in zigzag over the n least loaded
ones; all others stay whole on the least loaded rank. `uncut` splits none.
"""

import numpy as np

from dyncp.arrays import Float64, Int64
from dyncp.blocks import BlockGraph, TokenBlocks, choose_sizes_by_work
from dyncp.placement.placement import Limits, Placement
from dyncp.placement.solver import Solver
from dyncp.placement.static_layouts import deal_sequences, zigzag_ranks
from dyncp.topology import Topology


def place_whole_documents(
    graph: BlockGraph, topology: Topology, _limits: Limits, _seed: int
) -> Placement:
    num_ranks, lengths = topology.num_ranks, graph.batch.lengths
    load, rank_load = _relative_load(graph), np.zeros((num_ranks, 2))
    block_rank = np.zeros(len(graph.blocks), np.int64)
    first = np.searchsorted(graph.blocks.sequence, np.arange(len(lengths) + 1))
    for sequence in np.argsort([-n for n in lengths], kind="stable"):
        own = slice(first[sequence], first[sequence + 1])
        needed = -(-lengths[sequence] * num_ranks // graph.batch.num_tokens)
        chosen = np.argsort(rank_load.max(axis=1), kind="stable")[:needed]
        block_rank[own] = chosen[_spread(graph.blocks, own, lengths[sequence], needed)]
        np.add.at(rank_load, block_rank[own], load[own])
    return Placement.where_queries_live(
        graph, num_ranks, block_rank, "whole_documents", static=False
    )


def place_uncut(graph: BlockGraph, topology: Topology, _limits: Limits, _seed: int) -> Placement:
    rank = deal_sequences(graph, topology.num_ranks)[graph.blocks.sequence]
    return Placement.where_queries_live(graph, topology.num_ranks, rank, "uncut", static=False)


def _spread(blocks: TokenBlocks, own: slice, length: int, num_ranks: int) -> Int64:
    part = TokenBlocks(blocks.sequence[own], blocks.start[own], blocks.end[own])
    return zigzag_ranks(part, np.full(len(part), length), num_ranks)


def _relative_load(graph: BlockGraph) -> Float64:
    """Tokens and compute of every block's rows as shares of the batch: float64[blocks, 2]."""
    tokens, work = graph.blocks.tokens, graph.row_work
    return np.stack([tokens / tokens.sum(), work / max(int(work.sum()), 1)], axis=1)


whole_documents = Solver("whole_documents", place_whole_documents)
uncut = Solver("uncut", place_uncut, choose_sizes_by_work)
