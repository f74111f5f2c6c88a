"""BlockGraph: all token blocks and tiles of a batch, the hypergraph that placement works on."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np

from dyncp.arrays import Int32, Int64
from dyncp.blocks.batch import Batch
from dyncp.blocks.payload import bytes_per_token
from dyncp.blocks.shape import AttentionShape, HeadGroup


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

    @cached_property
    def payload_bytes(self) -> Int64:
        """Bytes per token, int64[payload kinds, head groups]."""
        return bytes_per_token(self.shape, self.head_groups)

    def tile_work(self, name: str) -> Int64:
        """Pairs × q heads of each tile: what computing it costs, up to a constant."""
        heads = [g.num_kv_heads * self.shape.q_heads_per_kv_head for g in self.head_groups]
        tiles = self.tiles[name]
        return tiles.pairs * np.asarray(heads, np.int64)[tiles.head_group]
