"""Where static methods put blocks: groups of ranks, grids inside them, and chunks of sequences.

One group of six ranks with 2 heads and 3 contexts. All-to-alls over heads run along the rows, rings
over contexts down the columns:

    head-first (TransformerEngine)        context-first (LoongTrain)

               head 0   head 1                       head 0   head 1
    context 0     0        1              context 0     0        3
    context 1     2        3              context 1     1        4
    context 2     4        5              context 2     2        5

Head-first runs all-to-alls on neighbouring ranks, and rings may cross nodes. Context-first runs
rings on neighbouring ranks, and all-to-alls may cross nodes.
"""

import heapq
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from dyncp.arrays import Float64, Int64
from dyncp.blocks import BlockGraph
from dyncp.placement.problem import level_all
from dyncp.topology import Topology

# Data parallelism: whole sequences are dealt to groups of ranks, the heaviest first.


def deal_sequences(graph: BlockGraph, num_groups: int) -> Int64:
    """Group of every sequence: the longest goes first, always to the least loaded group.

    A group's load is its share of the work or of the tokens, whichever is larger: the rank with
    the most tokens sets the time of everything outside attention. Loads 5 4 3 3 3 on 2 groups:

        group 0: 5 3      group 1: 4 3 3
    """
    return deal_loads(sequence_load(graph), num_groups)


def deal_loads(load: Float64, num_groups: int) -> Int64:
    """Like `deal_sequences`, for loads that `sequence_load` returned."""
    return level_all(load, np.ones(2), num_groups, max_swaps=0)


def sequence_load(graph: BlockGraph) -> Float64:
    """Every sequence's share of the batch's work and tokens, float64[sequences, 2]."""
    tokens = np.asarray(graph.batch.lengths, np.float64)
    work = np.bincount(graph.blocks.sequence, graph.row_work, len(tokens))
    return np.stack([work / max(work.sum(), 1.0), tokens / tokens.sum()], axis=1)


@dataclass(frozen=True, slots=True)
class Grid:
    """Data-parallel groups of ranks, each with contexts × heads positions."""

    groups: int
    contexts: int
    heads: int = 1
    context_first: bool = False

    @staticmethod
    def of(topology: Topology, degree: int, heads: int, context_first: bool, name: str) -> "Grid":
        """Groups of `degree` ranks that split the heads `heads` ways; ValueError if impossible."""
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
        """The columns of all groups; ring `group * heads + head` is that group's column `head`."""
        columns = self.ranks.transpose(0, 2, 1).reshape(-1, self.contexts)
        return tuple(tuple(column) for column in columns.tolist())


def divisors(number: int) -> list[int]:
    return [d for d in range(1, number + 1) if number % d == 0]


# Chunks of equal length: which rank gets each block of a sequence.
#
# With 2 ranks and a causal mask (letters are ranks, rows are query chunks):
#
#     contiguous   A . . .       zigzag   A . . .
#                  A A . .                B B . .
#                  B B B .                B B B .
#                  B B B B                A A A A
#
# With contiguous chunks A has 3 tiles and B has 7. Zigzag puts chunks r and 2N − 1 − r of 2N on
# rank r: 5 tiles each.


def chunk_sizes(lengths: Sequence[int], chunks: Int64 | int) -> Int64:
    """Block size of every sequence, cut into `chunks` chunks."""
    sizes: Int64 = -(-np.asarray(lengths, np.int64) // chunks)
    return sizes


def contiguous_ranks(graph: BlockGraph, num_ranks: Int64 | int) -> Int64:
    """Chunk of every block, by its middle token; `num_ranks` may differ per block."""
    length = np.asarray(graph.batch.lengths, np.int64)[graph.blocks.sequence]
    middle = (graph.blocks.start.astype(np.int64) + graph.blocks.end) // 2
    chunk: Int64 = middle * num_ranks // length
    return chunk


def zigzag_ranks(graph: BlockGraph, num_ranks: Int64 | int) -> Int64:
    """Zigzag rank of every block, by its middle token; `num_ranks` may differ per block."""
    chunk = contiguous_ranks(graph, 2 * num_ranks)
    ranks: Int64 = np.minimum(chunk, 2 * num_ranks - 1 - chunk)
    return ranks


# Packed chunks: some methods cut the packed batch, not each sequence, into chunks of equal length.
#
# The sequences of a group are concatenated. A block belongs to the chunk of its middle token, so
# chunks end at block borders. Lengths 6 and 2, four chunks of 2 tokens, blocks of 2:
#
#     tokens  0 1 | 2 3 | 4 5 | 6 7
#     chunk     0     1     2     3       the second sequence is chunk 3

# MagiAttention recommends at least 8 chunks per rank, so that a heap can balance them. Torch deals
# rows of one kernel tile: 32 per rank with 131,072 tokens on 32 ranks. That has 16 times the tiles
# and lowers ptrr's compute max/mean on long-tailed documents from 1.11 to 1.01.
CHUNKS_PER_RANK = 8
# Rows of a kernel tile: torch's balancer deals them, MagiAttention's chunks are multiples of them.
ROW_MULTIPLE = 128
# Sequences of at least this many chunks are cut into whole chunks, shorter ones into quarters. On
# 33 long-tailed documents and 32 ranks the quarters lower tokens max/mean from 1.11 (magi) and 1.20
# (ptrr) to 1.06 and 1.05.
LONG = 16

# Returns the rank of every chunk, given the work of all chunks and the number of ranks.
Deal = Callable[[Int64, int], Int64]


def packed_sizes(lengths: Sequence[int], num_ranks: int) -> Int64:
    """Block sizes: one chunk in long sequences, a quarter of a chunk in short ones. Short sequences
    have few blocks, but most of the chunk borders that fall inside a block."""
    length = np.asarray(lengths, np.int64)
    chunk = -(-int(length.sum()) // (num_ranks * CHUNKS_PER_RANK))
    size = np.where(length < LONG * chunk, -(-chunk // 4), chunk)
    size = np.where(size >= ROW_MULTIPLE, -(-size // ROW_MULTIPLE) * ROW_MULTIPLE, size)
    return np.minimum(length, size)


def packed_ranks(graph: BlockGraph, group: Int64, grid: Grid, deal_chunks: Deal) -> Int64:
    """Position of every block in its group; the packed sequences of a group are cut into chunks."""
    position, chunks = np.zeros(len(group), np.int64), grid.degree * CHUNKS_PER_RANK
    for number in range(grid.groups):
        blocks = np.flatnonzero(group == number)
        tokens = graph.blocks.tokens[blocks].astype(np.int64)
        middle = np.cumsum(tokens) - tokens + tokens // 2
        chunk = middle * chunks // max(int(tokens.sum()), 1)
        work = np.bincount(chunk, graph.row_work[blocks], chunks).astype(np.int64)
        position[blocks] = deal_chunks(work, grid.degree)[chunk]
    return position


def heap_ranks(work: Int64, num_ranks: int) -> Int64:
    """Rank of every chunk: heaviest first, to the rank with the least work; all ranks get equally
    many chunks.

    Work 9 7 6 1 on two ranks: 9 to A, 7 and 6 to B, which is then full, so 1 goes to A.
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
    """Rank of every chunk: heaviest first, dealt in alternating order (0 1 2, 2 1 0, ...).

    Work 9 7 6 1 on two ranks: A B B A.
    """
    turn = np.arange(len(work))
    position, backwards = turn % num_ranks, turn // num_ranks % 2 == 1
    ranks = np.empty(len(work), np.int64)
    ranks[np.argsort(-work, kind="stable")] = np.where(
        backwards, num_ranks - 1 - position, position
    )
    return ranks
