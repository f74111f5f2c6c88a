"""Puts tiles into divisions and transfers into phases.

Division 0 holds the tiles whose inputs are all local. A rank's remote inputs are ordered by the
distance of their owner (so that ranks do not all ask the same owner first) and cut into groups of
about equal bytes, one per further division; a tile runs in the division in which its last input is
there. A block's partial result goes home as soon as its last tile on that rank is done.
"""

import numpy as np

from dyncp.arrays import Int64, frozen
from dyncp.blocks import Q_INPUT, Q_RESULT, BlockGraph, Direction, Payload
from dyncp.placement import Placement, RemoteUses, find_remote_uses
from dyncp.schedule.schedule import Schedule, Transfers


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
    return _number_phases(tile_division, used, np.concatenate(entries, axis=1))


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
    distance = (placement.block_rank[block] - rank) % placement.num_ranks
    order = np.lexsort((kind, block, group, distance, rank))
    total = np.bincount(rank, size, placement.num_ranks).astype(np.int64)
    before = np.cumsum(size[order]) - size[order] - (np.cumsum(total) - total)[rank[order]]
    division = np.empty(len(rank), np.int64)
    division[order] = 1 + before * (num_divisions - 1) // total[rank[order]]
    return np.split(division, [len(sides[0])])


def _of_tiles(uses: RemoteUses, division: Int64) -> Int64:
    """Division of each tile's input; 0 where it is local."""
    return np.append(division, 0)[uses.of_tile]


def _compact(tile_division: Int64) -> tuple[Int64, int]:
    """Renumbers so that every division after the local one is used by some tile."""
    used = np.union1d([0], tile_division)
    return np.searchsorted(used, tile_division), len(used)


def _entries(
    placement: Placement,
    uses: RemoteUses,
    tile_division: Int64,
    sent: Payload,
    back: Payload | None,
) -> list[Int64]:
    """Rows (launch code, source, target, kind, head group, block) of inputs and results."""
    remote = uses.of_tile >= 0
    first = np.full(len(uses), np.iinfo(np.int64).max)
    last = np.zeros(len(uses), np.int64)
    np.minimum.at(first, uses.of_tile[remote], tile_division[remote])
    np.maximum.at(last, uses.of_tile[remote], tile_division[remote])
    owner = placement.block_rank[uses.block].astype(np.int64)
    what = (uses.head_group, uses.block)
    rows = [np.stack([_input_code(first), owner, uses.rank, np.full_like(owner, sent), *what])]
    if back is not None:
        rows.append(
            np.stack([_result_code(last), uses.rank, owner, np.full_like(owner, back), *what])
        )
    return rows


# Launch codes order the phases: inputs of division d travel while division d - 1 computes, its
# results while division d + 1 does. in(1)=0, in(2)=1, out(1)=2, in(3)=3, out(2)=4, ...
def _input_code(division: Int64) -> Int64:
    return np.maximum(2 * division - 3, 0)


def _result_code(division: Int64) -> Int64:
    return 2 * division


def _number_phases(tile_division: Int64, num_divisions: int, entries: Int64) -> Schedule:
    code, source, target, kind, group, block = entries
    phase_code, phase = np.unique(code, return_inverse=True)
    order = np.lexsort((block, group, kind, target, source, phase))
    transfers = Transfers(*(frozen(x[order]) for x in (phase, source, target, kind, group, block)))
    is_input = (phase_code % 2 == 1) | (phase_code == 0)
    division = np.where(is_input, (phase_code + 3) // 2, phase_code // 2)
    number = np.arange(len(phase_code))
    earlier_input = np.maximum.accumulate(np.where(is_input, number, -1))
    earlier_input = np.append(-1, earlier_input[:-1])[: len(number)]
    return Schedule(
        num_divisions=num_divisions,
        tile_division=frozen(tile_division),
        transfers=transfers,
        phase_after_division=frozen(np.where(is_input, division - 2, division)),
        phase_after_phase=frozen(np.where(is_input, earlier_input, -1)),
        phase_feeds=frozen(np.where(is_input, division, num_divisions)),
    )
