"""Packed chunks: methods that cut the packed batch, not each sequence, into equally long chunks.

A group's sequences lie behind each other; a block belongs to the chunk of its middle token, so that
chunks end where blocks do. Lengths 6 and 2, four chunks of 2 tokens, blocks of 2:

    tokens  0 1 | 2 3 | 4 5 | 6 7
    chunk     0     1     2     3       the second sequence is chunk 3
"""

import heapq
from collections.abc import Sequence

import numpy as np

from dyncp.arrays import Int64
from dyncp.blocks import BlockGraph
from dyncp.placement.static.grid import block_work

# MagiAttention wants at least 8 chunks per rank, so that a heap can balance them. Torch deals rows
# of one kernel tile: on 131,072 tokens and 32 ranks 32 per rank, which takes 16 times the tiles and
# brings ptrr's compute max/mean on long-tailed documents from 1.11 to 1.01.
CHUNKS_PER_RANK = 8
# Rows of a kernel tile: torch's balancer deals rows of them, MagiAttention's chunks are multiples.
ROW_MULTIPLE = 128

# Chunks from which on a sequence is cut into whole ones. On 33 long-tailed documents and 32 ranks
# the quarters bring tokens max/mean from 1.11 (magi) and 1.20 (ptrr) to 1.06 and 1.05.
LONG = 16


def packed_sizes(lengths: Sequence[int], num_ranks: int) -> Int64:
    """Blocks of one chunk in long sequences; of a quarter in short ones, which have few blocks but
    many of the places where chunks do not end with a block."""
    length = np.asarray(lengths, np.int64)
    chunk = -(-int(length.sum()) // (num_ranks * CHUNKS_PER_RANK))
    size = np.where(length < LONG * chunk, -(-chunk // 4), chunk)
    size = np.where(size >= ROW_MULTIPLE, -(-size // ROW_MULTIPLE) * ROW_MULTIPLE, size)
    return np.minimum(length, size)


def packed_chunks(graph: BlockGraph, blocks: Int64, num_ranks: int) -> Int64:
    """Chunk of each of a group's `blocks`, CHUNKS_PER_RANK for every rank."""
    tokens = graph.blocks.tokens[blocks].astype(np.int64)
    middle = np.cumsum(tokens) - tokens + tokens // 2
    chunk: Int64 = middle * (num_ranks * CHUNKS_PER_RANK) // max(int(tokens.sum()), 1)
    return chunk


def chunk_work(graph: BlockGraph, blocks: Int64, chunk: Int64, num_ranks: int) -> Int64:
    work = np.zeros(num_ranks * CHUNKS_PER_RANK, np.int64)
    np.add.at(work, chunk, block_work(graph)[blocks])
    return work


def heap_ranks(work: Int64, num_ranks: int) -> Int64:
    """Rank of every chunk, heaviest first to the rank with least work; all get equally many.

    Work 9 7 6 1 on two ranks: 9 to A, 7 and 6 to B, which is full then, so 1 goes to A.
    """
    cap = -(-len(work) // num_ranks)
    heap = [(0, rank, 0) for rank in range(num_ranks)]  # work, rank, chunks
    ranks = np.zeros(len(work), np.int64)
    for chunk in np.argsort(-work, kind="stable"):
        load, rank, count = heapq.heappop(heap)
        ranks[chunk] = rank
        if count + 1 < cap:
            heapq.heappush(heap, (load + int(work[chunk]), rank, count + 1))
    return ranks


def snake_ranks(work: Int64, num_ranks: int) -> Int64:
    """Rank of every chunk, dealt by falling work forwards and backwards in turn.

    Work 9 7 6 1 on two ranks: A B B A.
    """
    turn = np.arange(len(work))
    position, backwards = turn % num_ranks, turn // num_ranks % 2 == 1
    ranks = np.empty(len(work), np.int64)
    ranks[np.argsort(-work, kind="stable")] = np.where(
        backwards, num_ranks - 1 - position, position
    )
    return ranks
