"""Pace: how many bytes each phase should have, so that computation hides it.

Inputs of division d travel while division d - 1 computes. Division 0 has the local tiles. The bytes
that it can hide are sent for division 1, the bytes that division 1 can hide for division 2, and so
on:

    compute   |--- 0 ---|-- 1 --|---- 2 ----|
    travels   | in(1)   | in(2) | in(3) ...

The shares follow from a few means per rank: the seconds of local tiles, of tiles that need blocks
of their own node, of tiles that need blocks of other nodes, and the seconds that these blocks take
on the busiest links.

The slowest inputs (inter-node ones, if there are any) decide the divisions. All other tiles are
fillers. Some run while slow inputs travel. The rest runs after the slow tiles and hides their
results: first tiles that need blocks of their own node and have results to send themselves, then
local ones:

    division      0        1              2              3 and 4
                  local    slow + fill    slow + fill    near fillers, then local ones
"""

from dataclasses import dataclass

import numpy as np

from dyncp.arrays import Bool, Float64, Int64, sorted_order
from dyncp.blocks import BlockGraph, Direction
from dyncp.cost import DEFAULT_PROFILE, CostModel, find_profile
from dyncp.schedule.routes import Work
from dyncp.topology import Topology

# A phase should take at least as long as this many kernel calls, since each further division costs
# one, plus the cost of the rows in that call.
CALLS_PER_PHASE = 5
# Instructions of one more phase: its launch, its wait, and the division that waits for it.
INSTRUCTIONS_PER_PHASE = 3
# Inputs and results may take this many times longer than estimated before a rank waits.
SAFETY = 1.3


@dataclass(frozen=True, slots=True)
class Pace:
    """The scheduler's view of time: the links of `topology` and the tile seconds of `cost`."""

    topology: Topology
    cost: CostModel

    @staticmethod
    def assumed(graph: BlockGraph, num_ranks: int) -> "Pace":
        """One node with the rates of `DEFAULT_PROFILE`."""
        return Pace(Topology(1, num_ranks), CostModel(find_profile(DEFAULT_PROFILE), graph.shape))

    def least_seconds(self, rows: float, direction: Direction) -> float:
        """Seconds of the shortest useful phase for ranks with `rows` rows: a shorter one costs more
        than it hides."""
        more = (CALLS_PER_PHASE - 1) * self.cost.profile.call_seconds
        host = INSTRUCTIONS_PER_PHASE * self.cost.host_seconds
        return max(more + self.cost.division_seconds(rows, direction), host)


@dataclass(frozen=True, slots=True)
class Load:
    """Mean seconds per rank of tiles that need only local blocks, blocks of their own node, or
    blocks of other nodes; seconds on the busiest links for blocks of the own node, for blocks of
    other nodes, and for results that are sent to other nodes."""

    local: float
    near: float
    far: float
    near_travel: float
    far_travel: float
    result_travel: float


def share_phases(
    load: Load, num_divisions: int, least: float, *, results: bool
) -> tuple[Float64, Float64]:
    """Cumulative shares of the bytes for divisions 1, 2, ..., intra-node and inter-node.

    There are at most `num_divisions` - 1 phases. Each takes at least `least` seconds of the links,
    unless less is left. With `results`, no phase has much more than its equal share: the results of
    early inputs can be sent early.
    """
    near, far = [0.0], [0.0]
    window = load.local
    most = 1.5 / (num_divisions - 1) if results else 1.0
    while (near[-1] < 1 or far[-1] < 1) and len(near) < num_divisions:
        left = num_divisions - len(near)
        near.append(_next_share(near[-1], load.near_travel, window, least, left, most))
        far.append(_next_share(far[-1], load.far_travel, window, least, left, most))
        # Blocks that cross a node border for this division are passed on for the next one.
        crossed = far[-2] - far[-3] if len(far) > 2 else 0.0
        window = load.near * (near[-1] - near[-2]) + load.far * crossed
    return np.array(near[1:]), np.array(far[1:])


def _next_share(
    done: float, travel: float, window: float, least: float, left: int, most: float
) -> float:
    """The cumulative share after one more phase that `window` seconds of computing can hide."""
    rest = 1.0 - done
    if left == 1 or travel * rest <= least:
        return 1.0
    share = max(min(window / travel, most), least / travel, rest / left / 2)
    return min(done + share, 1.0)


def filler_order(cost: CostModel, graph: BlockGraph, name: str, direction: Direction) -> Int64:
    """Tiles in the order in which fillers are chosen. If every call that touches a block's rows
    costs something, tiles of the same block stay together; otherwise small tiles come first."""

    def find() -> Int64:
        tiles = graph.tiles[name]
        if cost.knows_rows(direction):
            block = tiles.k_block if direction is Direction.BACKWARD else tiles.q_block
            return np.argsort(block, kind="stable")
        return np.argsort(cost.graph_tile_seconds(graph, name, direction), kind="stable")

    return graph.remember(("filler order", cost, name, direction), find)


def fill(
    division: Int64,
    slow: Bool,
    work: Work,
    arrivals: Float64,
    results: Float64,
    num_ranks: int,
    turn: Int64,
) -> Int64:
    """Final division of every tile. `division` is the earliest one that its inputs allow. Fillers
    are chosen in the order `turn`. Slow inputs of division 1, 2, ... have arrived after `arrivals`
    seconds. `results` are the seconds of the last results, in no, one or two steps."""
    end, steps = int(division.max(initial=0)), SAFETY * results
    if end == 0:  # nothing travels
        return division.copy()
    room = _filler_seconds(division, slow, work, SAFETY * arrivals, num_ranks)
    filled = division.copy()
    local, middle = _middles(work, work.local & ~slow, np.zeros_like(division), turn)
    closes = middle + work.seconds[local] / 2
    at_start = np.sort(local[closes <= room[work.rank[local], 0] + 1e-12])
    filled[at_start] = 0
    room -= np.bincount(work.rank[at_start], work.seconds[at_start], num_ranks)[:, None]

    is_rest = ~slow
    is_rest[at_start] = False
    rest, middle = _middles(work, is_rest, np.where(work.local, end + 1, division), turn)
    limits = np.maximum(room[:, 1:], 0.0)
    if len(steps) == 0:
        limits = limits[:, :-1]
    elif len(steps) == 2:
        left = np.bincount(work.rank[is_rest], work.seconds[is_rest], num_ranks) - steps[1]
        limits = np.append(limits, np.maximum(left[:, None], limits[:, -1:]), axis=1)
    place, rank = np.ones_like(rest), work.rank[rest]
    for limit in np.ascontiguousarray(limits.T):
        place += middle > limit[rank]
    filled[rest] = np.maximum(division[rest], place)
    return filled


def _filler_seconds(
    division: Int64, slow: Bool, work: Work, arrivals: Float64, num_ranks: int
) -> Float64:
    """Seconds that fillers may take up to the end of every division, float64[ranks, divisions]:
    until the inputs of the next one have arrived."""
    end = int(division.max(initial=0))
    cell = work.rank[slow] * (end + 1) + division[slow]
    spent = np.bincount(cell, work.seconds[slow], num_ranks * (end + 1))
    spent = spent.reshape(num_ranks, end + 1).cumsum(axis=1)
    until = np.append(arrivals, np.repeat(arrivals[-1:], end + 1))[: end + 1]
    until = np.append(until, np.zeros(end + 1 - len(until)))
    room: Float64 = np.maximum.accumulate(np.maximum(until - spent, 0.0), axis=1)
    return room


def _middles(work: Work, chosen: Bool, kind: Int64, turn: Int64) -> tuple[Int64, Float64]:
    """The chosen tiles and the second at which the middle of each is computed, if every rank runs
    its chosen tiles by `kind`, then in the order `turn`."""
    tiles, kinds = turn[chosen[turn]], int(kind.max(initial=0)) + 1
    ranks = int(work.rank.max(initial=0)) + 1
    tiles = tiles[sorted_order((work.rank[tiles] * kinds + kind[tiles], ranks * kinds))]
    rank, seconds = work.rank[tiles], work.seconds[tiles]
    own = np.bincount(rank, seconds, 1)
    return tiles, np.cumsum(seconds) - (np.cumsum(own) - own)[rank] - seconds / 2
