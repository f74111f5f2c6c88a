"""Remote uses of both sides of the tiles, and the tiles that wait for them."""

from dataclasses import dataclass
from functools import cached_property, lru_cache

import numpy as np

from dyncp.arrays import Bool, Float64, Int64
from dyncp.blocks import Q_INPUT, Q_RESULT, BlockGraph, Direction, Payload
from dyncp.placement import Placement, find_remote_uses


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
    """Tiles: their ranks and seconds, and the use that brings each tile's query block and key
    block, int64[2, tiles] (-1: local)."""

    rank: Int64
    seconds: Float64
    use: Int64

    @cached_property
    def local(self) -> Bool:
        return np.asarray((self.use < 0).all(axis=0))

    def first_and_last(self, division: Int64, num_uses: int) -> tuple[Int64, Int64]:
        """First and last division of the tiles of every use."""
        count = int(division.max(initial=0)) + 1
        used = np.zeros((num_uses + 1) * count, np.bool_)
        for use in self.use:
            used[use * count + division] = True  # of -1, behind all others
        used = used.reshape(-1, count)[:-1]
        return used.argmax(axis=1), count - 1 - used[:, ::-1].argmax(axis=1)


def payloads(direction: Direction) -> tuple[Int64, Int64]:
    """What comes and what goes back (-1: nothing), for queries and for keys."""
    back = int(Payload.DKV) if direction is Direction.BACKWARD else -1
    return np.array([Q_INPUT[direction], Payload.KV]), np.array([Q_RESULT[direction], back])


@dataclass(frozen=True, eq=False)
class _Remote:
    """What does not depend on the direction: remote blocks of both sides, and tiles' uses."""

    side: Int64
    rank: Int64
    block: Int64
    head_group: Int64
    owner: Int64
    tokens: Int64
    tile_rank: Int64
    of_tiles: Int64


@lru_cache(maxsize=1)  # forward and backward, and schedules in other steps, ask for the same
def _find_remote(graph: BlockGraph, placement: Placement, name: str) -> _Remote:
    sides = [find_remote_uses(graph, placement, name, keys=keys) for keys in (False, True)]
    rank, block, group = (
        np.concatenate([getattr(own, field) for own in sides])
        for field in ("rank", "block", "head_group")
    )
    of_keys = np.where(sides[1].of_tile < 0, -1, sides[1].of_tile + len(sides[0]))
    return _Remote(
        np.repeat([0, 1], [len(own) for own in sides]),
        rank,
        block,
        group,
        placement.block_rank[block].astype(np.int64),
        graph.blocks.tokens[block].astype(np.int64),
        placement.tile_rank[name].astype(np.int64),
        np.stack([sides[0].of_tile, of_keys]),
    )


def find_uses(
    graph: BlockGraph, placement: Placement, name: str, direction: Direction, seconds: Float64
) -> tuple[Uses, Work]:
    found = _find_remote(graph, placement, name)
    per_token = np.vstack([graph.payload_bytes, np.zeros_like(graph.payload_bytes[:1])])
    sizes = (
        per_token[kinds[found.side], found.head_group] * found.tokens
        for kinds in payloads(direction)
    )
    what = (found.side, found.rank, found.block, found.head_group, found.owner)
    return Uses(*what, *sizes), Work(found.tile_rank, seconds, found.of_tiles)
