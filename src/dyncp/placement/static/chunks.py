"""Chunks of equal length: where each block of a sequence lies among the ranks that share it.

With 2 ranks and a causal mask (letters are ranks, rows are query chunks):

    contiguous   A . . .       zigzag   A . . .
                 A A . .                B B . .
                 B B B .                B B B .
                 B B B B                A A A A

Contiguous gives A 3 and B 7 of the tiles; zigzag, with chunks r and 2N − 1 − r on rank r, 5 each.
"""

from collections.abc import Sequence

import numpy as np

from dyncp.arrays import Int64
from dyncp.blocks import TokenBlocks


def contiguous_ranks(blocks: TokenBlocks, lengths: Int64, num_ranks: int) -> Int64:
    """Chunk of every block by its middle token; `lengths` is its sequence's, per block."""
    middle = (blocks.start.astype(np.int64) + blocks.end) // 2
    chunk: Int64 = middle * num_ranks // lengths
    return chunk


def zigzag_ranks(blocks: TokenBlocks, lengths: Int64, num_ranks: int) -> Int64:
    """Zigzag rank of every block by its middle token; `lengths` is its sequence's, per block."""
    chunk = contiguous_ranks(blocks, lengths, 2 * num_ranks)
    ranks: Int64 = np.minimum(chunk, 2 * num_ranks - 1 - chunk)
    return ranks


def contiguous_sizes(lengths: Sequence[int], num_ranks: int) -> Int64:
    """One block per rank."""
    sizes: Int64 = -(-np.asarray(lengths, np.int64) // num_ranks)
    return sizes


def zigzag_sizes(lengths: Sequence[int], num_ranks: int) -> Int64:
    """Two blocks per rank."""
    return contiguous_sizes(lengths, 2 * num_ranks)
