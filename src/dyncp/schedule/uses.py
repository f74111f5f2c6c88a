"""Remote uses of both sides of the tiles, and the tiles that wait for them."""

from dataclasses import dataclass
from functools import cached_property, lru_cache

import numpy as np

from dyncp.arrays import Bool, Float64, Int64
from dyncp.blocks import Q_INPUT, Q_RESULT, BlockGraph, Direction, Payload
from dyncp.placement import Placement, RemoteUses, find_remote_uses


@dataclass(frozen=True, eq=False)
class Uses:
    """Blocks that ranks use and do not own, int64[uses] each: those of queries (`side` 0), then
    those of keys (1). `num_bytes` is what comes, `result_bytes` what goes back."""

    side: Int64
    rank: Int64
    block: Int64
    head_group: Int64
    owner: Int64
    num_bytes: Int64
    result_bytes: Int64

    def __len__(self) -> int:
        return len(self.rank)


@dataclass(frozen=True, eq=False)
class Work:
    """Tiles: their ranks and seconds, the use that brings each tile's query block and key block,
    int64[2, tiles] (-1: local), and the block whose rows the kernel works by: that of queries
    forward, of keys backward."""

    rank: Int64
    seconds: Float64
    use: Int64
    block: Int64

    @cached_property
    def local(self) -> Bool:
        return np.asarray((self.use < 0).all(axis=0))

    def first_and_last(self, division: Int64, num_uses: int) -> tuple[Int64, Int64]:
        """First and last division of the tiles of every use."""
        first = np.full(num_uses + 1, np.iinfo(np.int64).max)
        last = np.zeros(num_uses + 1, np.int64)
        for use in self.use:
            np.minimum.at(first, use, division)
            np.maximum.at(last, use, division)
        return first[:-1], last[:-1]


def payloads(direction: Direction) -> tuple[list[Payload], list[Payload | None]]:
    """What comes and what goes back, for queries and for keys."""
    back = Payload.DKV if direction is Direction.BACKWARD else None
    return [Q_INPUT[direction], Payload.KV], [Q_RESULT[direction], back]


@lru_cache(maxsize=1)  # forward and backward, and schedules in other steps, ask for the same
def _sides(graph: BlockGraph, placement: Placement, name: str) -> tuple[RemoteUses, RemoteUses]:
    tiles = graph.tiles[name]
    return (
        find_remote_uses(graph, placement, name, tiles.q_block),
        find_remote_uses(graph, placement, name, tiles.k_block),
    )


def find_uses(
    graph: BlockGraph, placement: Placement, name: str, direction: Direction, seconds: Float64
) -> tuple[Uses, Work]:
    sides, tiles = _sides(graph, placement, name), graph.tiles[name]
    side = np.repeat([0, 1], [len(own) for own in sides])
    rank, block, group = (
        np.concatenate([getattr(own, field) for own in sides])
        for field in ("rank", "block", "head_group")
    )
    tokens = graph.blocks.tokens[block].astype(np.int64)
    per_token = np.vstack([graph.payload_bytes, np.zeros_like(graph.payload_bytes[:1])])
    sizes = (
        per_token[np.array([-1 if kind is None else kind for kind in kinds])[side], group] * tokens
        for kinds in payloads(direction)
    )
    owner = placement.block_rank[block].astype(np.int64)
    of_keys = np.where(sides[1].of_tile < 0, -1, sides[1].of_tile + len(sides[0]))
    work = Work(
        placement.tile_rank[name].astype(np.int64),
        seconds,
        np.stack([sides[0].of_tile, of_keys]),
        (tiles.k_block if direction is Direction.BACKWARD else tiles.q_block).astype(np.int64),
    )
    return Uses(side, rank, block, group, owner, *sizes), work
