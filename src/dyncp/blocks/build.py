"""Cuts a batch into token blocks and tiles."""

from collections.abc import Sequence

import numpy as np

from dyncp.arrays import Int64, frozen, starts_of
from dyncp.blocks.batch import Batch
from dyncp.blocks.graph import BlockGraph, Tiles, TokenBlocks
from dyncp.blocks.shape import AttentionShape
from dyncp.masks import Mask, list_tiles

# A prototype on 81 cases moved 0-1 % more bytes with 8 blocks per rank than with much finer ones,
# and 2-6 % more with 4.
BLOCKS_PER_RANK = 8
# Tiles grow with the square of a sequence's blocks: one that needs more ranks than this many blocks
# allow gets fewer per rank, at least 2, which is what zigzag has.
MOST_BLOCKS, FEWEST_PER_RANK = 1024, 2
# Long blocks end on the rows of a GPU kernel tile.
BLOCK_MULTIPLE = 128


def choose_block_sizes(lengths: Sequence[int], num_ranks: int) -> Int64:
    """Block size of each sequence: one that fits a rank's fair share of the tokens stays whole,
    a longer one is cut into about 8 blocks per rank that it needs.

    With 4 ranks and lengths [6000, 1000, 1000] the share is 2000 tokens; the first sequence needs
    3 ranks and is cut into blocks of 256 = ceil(6000 / 24) rounded up to 128 rows.
    """
    length = np.asarray(lengths, np.int64)
    ranks_needed = -(-length * num_ranks // length.sum())
    size = -(-length // _num_blocks(ranks_needed))
    size = np.where(size >= BLOCK_MULTIPLE, -(-size // BLOCK_MULTIPLE) * BLOCK_MULTIPLE, size)
    return np.where(ranks_needed > 1, size, length)


def choose_sizes_by_work(lengths: Sequence[int], num_ranks: int) -> Int64:
    """Like `choose_block_sizes`, but a sequence needs as many ranks as its share of the tokens says
    or, if all were causal, its share of the work: one that has few tokens for a rank and more than
    its share of the work is cut, too."""
    length = np.asarray(lengths, np.int64)
    share = np.maximum(length / length.sum(), length**2 / (length**2).sum()) * num_ranks
    size = -(-length // _num_blocks(np.ceil(share).astype(np.int64)))
    size = np.where(size >= BLOCK_MULTIPLE, -(-size // BLOCK_MULTIPLE) * BLOCK_MULTIPLE, size)
    return np.where(share > 1, size, length)


def _num_blocks(ranks_needed: Int64) -> Int64:
    per_rank = np.clip(MOST_BLOCKS // ranks_needed, FEWEST_PER_RANK, BLOCKS_PER_RANK)
    blocks: Int64 = ranks_needed * per_rank
    return blocks


def build_blocks(lengths: Sequence[int], block_sizes: Sequence[int]) -> TokenBlocks:
    """Blocks of `block_sizes[s]` tokens for every sequence s; its last one may be shorter."""
    length, size = np.asarray(lengths, np.int64), np.asarray(block_sizes, np.int64)
    if len(size) != len(length) or (size < 1).any():
        raise ValueError(
            f"block sizes are {list(block_sizes)} for {len(length)} sequences; "
            "one size of at least 1 token per sequence is needed"
        )
    counts = -(-length // size)
    sequence = np.repeat(np.arange(len(length)), counts)
    index = np.arange(len(sequence)) - starts_of(counts)[sequence]
    start = index * size[sequence]
    end = np.minimum(start + size[sequence], length[sequence])
    return TokenBlocks(frozen(sequence), frozen(start), frozen(end))


def build_graph(
    batch: Batch, shape: AttentionShape, block_sizes: Sequence[int], num_head_groups: int = 1
) -> BlockGraph:
    """The hypergraph of a batch for the given cut."""
    groups = shape.head_groups(num_head_groups)
    blocks = build_blocks(batch.lengths, block_sizes)
    tiles = {
        name: _build_tiles(masks, block_sizes, len(groups)) for name, masks in batch.masks.items()
    }
    return BlockGraph(batch, shape, groups, blocks, tiles)


def _build_tiles(masks: Sequence[Mask], block_sizes: Sequence[int], num_groups: int) -> Tiles:
    q_block, k_block, pairs = list_tiles(masks, [int(size) for size in block_sizes])
    return Tiles(
        q_block=frozen(np.tile(q_block, num_groups)),
        k_block=frozen(np.tile(k_block, num_groups)),
        head_group=frozen(np.repeat(np.arange(num_groups), len(q_block))),
        pairs=frozen(np.tile(pairs, num_groups), np.int64),
    )
