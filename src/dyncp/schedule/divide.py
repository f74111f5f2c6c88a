"""Puts tiles into divisions and transfers into phases.

Division 0 holds the tiles whose inputs are all local. A rank's remote inputs are ordered by the
distance of their owner (so that ranks do not all ask the same owner first) and cut into groups of
about equal bytes, one per further division; a tile runs in the division in which its last input is
there. A block's partial result goes home as soon as its last tile on that rank is done.
"""

import numpy as np

from dyncp.arrays import Int64
from dyncp.blocks import Q_INPUT, Q_RESULT, BlockGraph, Direction, Payload
from dyncp.blocks.counting_sort import sorted_order
from dyncp.placement import Placement, RemoteUses, find_remote_uses
from dyncp.schedule.phases import Entries, number_phases
from dyncp.schedule.schedule import Schedule


def build_schedule(
    graph: BlockGraph, placement: Placement, name: str, direction: Direction, num_divisions: int
) -> Schedule:
    """Schedule of one mask and direction with at most `num_divisions` divisions (at least 2)."""
    tiles = graph.tiles[name]
    q_uses = find_remote_uses(graph, placement, name, tiles.q_block)
    k_uses = find_remote_uses(graph, placement, name, tiles.k_block)
    uses = {Q_INPUT[direction]: q_uses, Payload.KV: k_uses}
    q_division, k_division = _spread(graph, placement, uses, num_divisions)
    tile_division = np.maximum(_of_tiles(q_uses, q_division), _of_tiles(k_uses, k_division))
    tile_division, used = _compact(tile_division)
    entries = _entries(placement, q_uses, tile_division, Q_INPUT[direction], Q_RESULT[direction])
    k_result = Payload.DKV if direction is Direction.BACKWARD else None
    entries += _entries(placement, k_uses, tile_division, Payload.KV, k_result)
    return number_phases(tile_division, used, entries, relayed_results=False)


def _spread(
    graph: BlockGraph, placement: Placement, uses: dict[Payload, RemoteUses], num_divisions: int
) -> list[Int64]:
    """Earliest division of every remote use: equal bytes per division on each rank."""
    sides = list(uses.values())
    rank = np.concatenate([side.rank for side in sides])
    block = np.concatenate([side.block for side in sides])
    group = np.concatenate([side.head_group for side in sides])
    kind = np.repeat(list(uses), [len(side) for side in sides])
    size = graph.payload_bytes[kind, group] * graph.blocks.tokens[block]
    num_ranks = placement.num_ranks
    distance = (placement.block_rank[block] - rank) % num_ranks
    order = sorted_order(
        (kind, len(Payload)),
        (block, len(graph.blocks)),
        (group, len(graph.head_groups)),
        (distance, num_ranks),
        (rank, num_ranks),
    )
    total = np.bincount(rank, size, num_ranks).astype(np.int64)
    before = np.cumsum(size[order]) - size[order] - (np.cumsum(total) - total)[rank[order]]
    division = np.empty(len(rank), np.int64)
    division[order] = 1 + before * (num_divisions - 1) // total[rank[order]]
    return np.split(division, [len(sides[0])])


def _of_tiles(uses: RemoteUses, division: Int64) -> Int64:
    """Division of each tile's input; 0 where it is local."""
    return np.append(division, 0)[uses.of_tile]


def _compact(tile_division: Int64) -> tuple[Int64, int]:
    """Renumbers so that every division after the local one is used by some tile."""
    used = np.bincount(tile_division, minlength=1) > 0
    used[0] = True
    return (np.cumsum(used) - 1)[tile_division], int(used.sum())


def _entries(
    placement: Placement,
    uses: RemoteUses,
    tile_division: Int64,
    sent: Payload,
    back: Payload | None,
) -> list[Entries]:
    """Inputs from owners to the ranks that use them, and results back to the owners."""
    remote = uses.of_tile >= 0
    first = np.full(len(uses), np.iinfo(np.int64).max)
    last = np.zeros(len(uses), np.int64)
    np.minimum.at(first, uses.of_tile[remote], tile_division[remote])
    np.maximum.at(last, uses.of_tile[remote], tile_division[remote])
    owner, what = placement.block_rank[uses.block], (uses.head_group, uses.block)
    entries = [Entries.inputs(first, owner, uses.rank, sent, *what)]
    if back is not None:
        entries.append(Entries.results(last, uses.rank, owner, back, *what))
    return entries
