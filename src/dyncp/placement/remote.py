"""What a placement makes travel: blocks that tiles read on ranks that do not own them."""

from dataclasses import dataclass

import numpy as np

from dyncp.arrays import Int32, Int64, distinct_pairs
from dyncp.blocks import Q_INPUT, Q_RESULT, BlockGraph, Direction, Payload
from dyncp.placement.placement import Placement


@dataclass(frozen=True, eq=False)
class RemoteUses:
    """Distinct (rank, block, head group) of one side of the tiles, ordered, int64[uses] each.

    `of_tile` has, for every tile, the index of its use here, or -1 when the block is local.
    """

    rank: Int64
    block: Int64
    head_group: Int64
    of_tile: Int64

    def __len__(self) -> int:
        return len(self.rank)


def find_remote_uses(
    graph: BlockGraph, placement: Placement, name: str, blocks: Int32
) -> RemoteUses:
    """Remote uses of `blocks`, the q_block or k_block of mask `name`'s tiles."""
    num_blocks, num_groups = len(graph.blocks), len(graph.head_groups)
    tile_rank = placement.tile_rank[name]
    remote = np.flatnonzero(placement.block_rank[blocks] != tile_rank)
    data_block = blocks[remote].astype(np.int64) * num_groups + graph.tiles[name].head_group[remote]
    rank, data_block, use = distinct_pairs(
        tile_rank[remote], placement.num_ranks, data_block, num_blocks * num_groups
    )
    of_tile = np.full(len(blocks), -1, np.int64)
    of_tile[remote] = use
    return RemoteUses(rank, data_block // num_groups, data_block % num_groups, of_tile)


def minimal_bytes(graph: BlockGraph, placement: Placement, name: str, direction: Direction) -> int:
    """The hypergraph's Σ size × (parts touched − 1) for one mask and direction."""
    tiles, total = graph.tiles[name], 0
    q_kinds = [Q_INPUT[direction], Q_RESULT[direction]]
    k_kinds = [Payload.KV, Payload.DKV] if direction is Direction.BACKWARD else [Payload.KV]
    for blocks, kinds in ((tiles.q_block, q_kinds), (tiles.k_block, k_kinds)):
        uses = find_remote_uses(graph, placement, name, blocks)
        per_token = graph.payload_bytes[kinds].sum(axis=0)[uses.head_group]
        total += int((per_token * graph.blocks.tokens[uses.block]).sum())
    return total
