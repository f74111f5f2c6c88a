"""BlockGraph: the token blocks and tiles of a batch, the hypergraph that placement works on."""

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple, TypeVar

import numpy as np

from dyncp.arrays import Int32, Int64, frozen, starts_of
from dyncp.blocks.batch import Batch
from dyncp.blocks.shape import AttentionShape, HeadGroup, bytes_per_token
from dyncp.masks import LinearRanges, list_tiles

Found = TypeVar("Found")


class TokenBlock(NamedTuple):
    """Tokens [start, end) of one sequence."""

    sequence: int
    start: int
    end: int


@dataclass(frozen=True, eq=False)
class TokenBlocks:
    """Every token block of a batch, ordered by sequence and start: int32[blocks] each."""

    sequence: Int32
    start: Int32
    end: Int32

    def __len__(self) -> int:
        return len(self.sequence)

    def __getitem__(self, block: int) -> TokenBlock:
        return TokenBlock(int(self.sequence[block]), int(self.start[block]), int(self.end[block]))

    @property
    def tokens(self) -> Int32:
        return self.end - self.start


@dataclass(frozen=True, eq=False)
class Tiles:
    """Query block × key block × head group with at least one allowed pair, ordered by head group,
    query block and key block. `pairs` counts allowed (query, key) pairs per head."""

    q_block: Int32
    k_block: Int32
    head_group: Int32
    pairs: Int64

    def __len__(self) -> int:
        return len(self.q_block)


@dataclass(frozen=True, eq=False)
class BlockGraph:
    """Vertices are blocks and tiles; one hyperedge per data block joins it with the tiles that
    read or produce it. `tiles` has one entry per mask name; the blocks are shared by all masks."""

    batch: Batch
    shape: AttentionShape
    head_groups: tuple[HeadGroup, ...]
    blocks: TokenBlocks
    tiles: Mapping[str, Tiles]
    _derived: dict[Hashable, Any] = field(default_factory=dict, repr=False)

    @cached_property
    def payload_bytes(self) -> Int64:
        """Bytes per token, int64[payload kinds, head groups]."""
        return bytes_per_token(self.shape, self.head_groups)

    @cached_property
    def row_work(self) -> Int64:
        """Work of each block's query rows over all masks, int64[blocks]."""
        work = np.zeros(len(self.blocks))
        for name, tiles in self.tiles.items():
            work += np.bincount(tiles.q_block, self.tile_work(name), len(work))
        return work.astype(np.int64)

    def remember(self, key: Hashable, make: Callable[[], Found]) -> Found:
        """What `make` returns, made once per graph and key: several stages ask for it, in both
        directions. It is kept as long as the graph."""
        if key not in self._derived:
            self._derived[key] = make()
        found: Found = self._derived[key]
        return found

    def tile_work(self, name: str) -> Int64:
        """Pairs × q heads of each tile: what computing it costs, up to a constant."""
        heads = [g.num_kv_heads * self.shape.q_heads_per_kv_head for g in self.head_groups]
        tiles = self.tiles[name]
        return tiles.pairs * np.asarray(heads, np.int64)[tiles.head_group]


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


def build_blocks(lengths: Sequence[int], block_sizes: Sequence[int] | Int64) -> TokenBlocks:
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
    batch: Batch,
    shape: AttentionShape,
    block_sizes: Sequence[int] | Int64,
    num_head_groups: int = 1,
) -> BlockGraph:
    """The hypergraph of a batch for the given cut."""
    groups = shape.head_groups(num_head_groups)
    blocks = build_blocks(batch.lengths, block_sizes)
    tiles = {
        name: _build_tiles(runs, block_sizes, len(groups)) for name, runs in batch.runs.items()
    }
    return BlockGraph(batch, shape, groups, blocks, tiles)


def _build_tiles(runs: LinearRanges, block_sizes: Sequence[int] | Int64, num_groups: int) -> Tiles:
    q_block, k_block, pairs = list_tiles(runs, block_sizes)
    return Tiles(
        q_block=frozen(np.tile(q_block, num_groups)),
        k_block=frozen(np.tile(k_block, num_groups)),
        head_group=frozen(np.repeat(np.arange(num_groups), len(q_block))),
        pairs=frozen(np.tile(pairs, num_groups), np.int64),
    )
