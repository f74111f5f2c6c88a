"""Zigzag: every sequence is cut into 2N chunks, and rank r owns chunks r and 2N − 1 − r.

With N = 2 and a causal mask (letters are ranks, rows are query chunks) both ranks compute five:

    A . . .        chunks   0 1 2 3
    B B . .        owners   A B B A
    B B B .
    A A A A
"""

from collections.abc import Sequence

import numpy as np

from dyncp.arrays import Int64
from dyncp.blocks import BlockGraph, TokenBlocks
from dyncp.placement.placement import Limits, Placement
from dyncp.placement.solver import Solver
from dyncp.topology import Topology


def zigzag_ranks(blocks: TokenBlocks, lengths: Int64, num_ranks: int) -> Int64:
    """Zigzag rank of every block by its middle token; `lengths` is its sequence's, per block."""
    middle = (blocks.start.astype(np.int64) + blocks.end) // 2
    chunk = middle * (2 * num_ranks) // lengths
    ranks: Int64 = np.minimum(chunk, 2 * num_ranks - 1 - chunk)
    return ranks


def place_zigzag(graph: BlockGraph, topology: Topology, _limits: Limits, _seed: int) -> Placement:
    lengths = np.asarray(graph.batch.lengths, np.int64)[graph.blocks.sequence]
    ranks = zigzag_ranks(graph.blocks, lengths, topology.num_ranks)
    return Placement.where_queries_live(graph, topology.num_ranks, ranks, "zigzag", static=True)


def zigzag_block_sizes(lengths: Sequence[int], num_ranks: int) -> Int64:
    return -(-np.asarray(lengths, np.int64) // (2 * num_ranks))


zigzag = Solver("zigzag", place_zigzag, zigzag_block_sizes)
