"""Groups per document (Megatron's hybrid context parallelism).

A document goes to the smallest power of two of ranks whose share of it fits a budget of tokens, in
zigzag over neighbouring ranks that start at a multiple of that number. Lengths 900 400 200 200 on
4 ranks with a budget of 450 tokens:

    ranks      0    1    2    3
             [900/2  ] [400] [200]      then the last 200 beside the other
"""

import heapq
from collections.abc import Sequence
from functools import partial

import numpy as np

from dyncp.arrays import Float64, Int64, frozen
from dyncp.blocks import BlockGraph, TokenBlocks
from dyncp.placement.placement import Limits, Placement, Traffic
from dyncp.placement.solver import Degrees, Solver
from dyncp.placement.static.grid import deal, sequence_load
from dyncp.topology import Topology

# Chunks of equal length: where each block of a sequence lies among the ranks that share it.
#
# With 2 ranks and a causal mask (letters are ranks, rows are query chunks):
#
#     contiguous   A . . .       zigzag   A . . .
#                  A A . .                B B . .
#                  B B B .                B B B .
#                  B B B B                A A A A
#
# Contiguous gives A 3 and B 7 of the tiles; zigzag, with chunks r and 2N − 1 − r on rank r, 5 each.


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


# MagiAttention wants at least 8 chunks per rank, so that a heap can balance them. Torch deals rows
# of one kernel tile: on 131,072 tokens and 32 ranks 32 per rank, which takes 16 times the tiles and
# brings ptrr's compute max/mean on long-tailed documents from 1.11 to 1.01.
CHUNKS_PER_RANK = 8
# Rows of a kernel tile: torch's balancer deals rows of them, MagiAttention's chunks are multiples.
ROW_MULTIPLE = 128

# Chunks from which on a sequence is cut into whole ones. On 33 long-tailed documents and 32 ranks
# the quarters bring tokens max/mean from 1.11 (magi) and 1.20 (ptrr) to 1.06 and 1.05.
LONG = 16


# Packed chunks: methods that cut the packed batch, not each sequence, into equally long chunks.
#
# A group's sequences lie behind each other; a block belongs to the chunk of its middle token, so
# that chunks end where blocks do. Lengths 6 and 2, four chunks of 2 tokens, blocks of 2:
#
#     tokens  0 1 | 2 3 | 4 5 | 6 7
#     chunk     0     1     2     3       the second sequence is chunk 3


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
    work = np.bincount(chunk, graph.row_work[blocks], num_ranks * CHUNKS_PER_RANK)
    return work.astype(np.int64)


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


def hybrid_with_budget(tokens: int) -> Solver:
    """megatron_hybrid with at most `tokens` tokens of one document on a rank."""
    if tokens < 1:
        raise ValueError(f"megatron_hybrid's budget is {tokens} tokens; at least 1 is needed")
    return _solver(f"megatron_hybrid/tokens{tokens}", tokens)


def hybrid_candidates(lengths: Sequence[int], topology: Topology) -> list[Solver]:
    """Budgets of a fair share of the tokens, and of halves of it while groups are large enough:
    smaller budgets spread long documents over more ranks."""
    most = 1 << (topology.num_ranks.bit_length() - 1)
    budgets = [-(-sum(lengths) // (most * part)) for part in (2, 4, 8)]
    fitting = [budget for budget in budgets if budget * most >= max(lengths)]
    return [megatron_hybrid, *(hybrid_with_budget(budget) for budget in fitting)]


def _solver(name: str, budget: int | None) -> Solver:
    place, sizes = partial(_place, name, budget), partial(_block_sizes, budget)
    return Solver(name, place, sizes, degrees=Degrees("megatron_hybrid", tokens=budget))


def group_sizes(lengths: Sequence[int], num_ranks: int, budget: int | None) -> Int64:
    """Ranks of every document. Without a budget, it is a fair share of the batch's tokens, so that
    one document that is the whole batch gets all ranks (or the power of two below)."""
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
    chunks = np.where(sizes > 1, 2 * sizes, 1)
    blocks: Int64 = -(-np.asarray(lengths, np.int64) // chunks)
    return blocks


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
    owner = first_rank[graph.blocks.sequence] + _positions(graph, sizes)
    rings, ring = _rings(first_rank, sizes)
    groups = len(graph.head_groups)
    traffic = Traffic(
        "ring",
        rings,
        frozen(np.repeat(ring[graph.blocks.sequence][:, None], groups, axis=1)),
        frozen(np.repeat(owner[:, None], groups, axis=1)),
    )
    return Placement.where_queries_live(graph, num_ranks, owner, name, static=True, traffic=traffic)


def hybrid_shares(load: Float64, sizes: Int64, first: Int64, num_ranks: int) -> Float64:
    """What each rank has of the batch's work and tokens if every document is split evenly; `sizes`
    are those of the documents' groups, which begin at rank `first`."""
    shares, one = np.zeros((num_ranks, 2)), sizes == 1
    np.add.at(shares, first[one], load[one])
    for document in np.flatnonzero(~one).tolist():
        begin, size = first[document], sizes[document]
        shares[begin : begin + size] += load[document] / size
    return shares


def ring_seconds(lengths: Sequence[int], sizes: Int64, first: Int64, topology: Topology) -> float:
    """Per byte of a token's keys and values: what these take on the busiest link at least, when all
    of a document but a rank's own share goes from each rank of its group to the next."""
    ranks = topology.ranks_per_node
    port, nic = np.zeros(topology.num_ranks), np.zeros(topology.nodes)
    for document in np.flatnonzero(sizes > 1).tolist():
        begin, size, length = first[document], sizes[document], lengths[document]
        moved = length - 2 * -(-length // (2 * size))
        if ranks % size == 0:
            port[begin : begin + size] += moved
        else:  # over the borders of all nodes that it has as a whole
            nic[-(-begin // ranks) : (begin + size) // ranks] += moved
    between = float(nic.max()) / topology.nic_bandwidth if topology.nodes > 1 else 0.0
    return max(float(port.max()) / topology.intra.bandwidth, between)


def deal_documents(load: Float64, sizes: Int64, num_ranks: int) -> Int64:
    """First rank of every document's group: the most loaded per rank goes first, to the aligned
    group whose fullest rank stays lowest."""
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
    deal(load, order[several:], rank_load, first)
    return first


def _positions(graph: BlockGraph, sizes: Int64) -> Int64:
    """Zigzag position of every block in its document's group."""
    position = np.zeros(len(graph.blocks), np.int64)
    size_of_block = sizes[graph.blocks.sequence]
    lengths = np.asarray(graph.batch.lengths, np.int64)[graph.blocks.sequence]
    for size in np.unique(sizes).tolist():
        mine, blocks = size_of_block == size, graph.blocks
        part = TokenBlocks(blocks.sequence[mine], blocks.start[mine], blocks.end[mine])
        position[mine] = zigzag_ranks(part, lengths[mine], size)
    return position


def _rings(first_rank: Int64, sizes: Int64) -> tuple[tuple[tuple[int, ...], ...], Int64]:
    """The different groups, and each document's number among them."""
    spans, ring = np.unique(np.stack([first_rank, sizes], 1), axis=0, return_inverse=True)
    rings = tuple(tuple(range(first, first + size)) for first, size in spans.tolist())
    return rings, ring.reshape(-1)


megatron_hybrid = _solver("megatron_hybrid", None)
