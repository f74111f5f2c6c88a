"""Pace: how much should travel in each phase, so that computation hides it.

Inputs of division d travel while division d - 1 computes. Division 0 has the local tiles; what it
can hide may travel for division 1, what the tiles of division 1 can hide for division 2, and so on:

    compute   |--- 0 ---|-- 1 --|---- 2 ----|
    travels   | in(1)   | in(2) | in(3) ...

So shares follow from a few means: the seconds of local tiles, of those that wait for blocks of
their own node, of those that wait for another node, and the seconds that all of these blocks
take on the busiest links.

What has to come farthest, over node borders where there are any, decides the divisions. All other
tiles are fillers. They cover the time until slow inputs arrive; the rest runs behind the slow
tiles, where it hides their results on the way back: first those that need blocks of the own node,
which have results to send as well, then local ones:

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

# A phase should be worth this many kernel calls, since each further division costs one; and what
# rows cost that one more call meets.
CALLS_PER_PHASE = 5
# Instructions of one more phase: its launch, its wait, and the division that waits for it.
INSTRUCTIONS_PER_PHASE = 3
# Inputs and results may take this much longer than estimated before anyone waits.
SAFETY = 1.3


@dataclass(frozen=True, slots=True)
class Pace:
    """What the scheduler knows of time: the links of `topology` and the seconds of `cost`."""

    topology: Topology
    cost: CostModel

    @staticmethod
    def assumed(graph: BlockGraph, num_ranks: int) -> "Pace":
        """One node with the figures of `DEFAULT_PROFILE`."""
        return Pace(Topology(1, num_ranks), CostModel(find_profile(DEFAULT_PROFILE), graph.shape))

    def least_seconds(self, rows: float, direction: Direction) -> float:
        """The shortest useful phase for ranks with `rows` rows: shorter ones cost the host more
        time than they hide."""
        more = (CALLS_PER_PHASE - 1) * self.cost.profile.call_seconds
        host = INSTRUCTIONS_PER_PHASE * self.cost.host_seconds
        return max(more + self.cost.division_seconds(rows, direction), host)


@dataclass(frozen=True, slots=True)
class Load:
    """Mean seconds per rank of tiles that need local blocks only, blocks of the own node, and
    blocks of others; the seconds that these two kinds of blocks take on the busiest links, and
    those of results on their way to other nodes."""

    local: float
    near: float
    far: float
    near_travel: float
    far_travel: float
    result_travel: float


def share_phases(
    load: Load, num_divisions: int, least: float, *, results: bool
) -> tuple[Float64, Float64]:
    """Cumulative shares of what travels for divisions 1, 2, ...: inside nodes and between them.

    At most `num_divisions` - 1 phases; each takes at least `least` seconds of the links, as far as
    there is that much left. With `results` no phase has much more than its part, since what comes
    early can go back early.
    """
    near, far = [0.0], [0.0]
    window = load.local
    most = 1.5 / (num_divisions - 1) if results else 1.0
    while (near[-1] < 1 or far[-1] < 1) and len(near) < num_divisions:
        left = num_divisions - len(near)
        near.append(_next_share(near[-1], load.near_travel, window, least, left, most))
        far.append(_next_share(far[-1], load.far_travel, window, least, left, most))
        # What crossed for this division is passed on inside the node for the next one.
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
    """Tiles in the order in which fillers are taken: those of a block together, where every call
    that meets a block's rows costs something; otherwise small ones first."""

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
    """Final divisions. `division` is the earliest that a tile's inputs allow; fillers are taken in
    the order `turn`. Seconds: slow inputs of each division (from 1 on) are there at `arrivals`, and
    the last results travel for `results`, in one step, in two or in none."""
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
    """Seconds that fillers may take up to the end of every division, [ranks, divisions]: until the
    inputs of the next one are there."""
    end = int(division.max(initial=0))
    cell = work.rank[slow] * (end + 1) + division[slow]
    spent = np.bincount(cell, work.seconds[slow], num_ranks * (end + 1))
    spent = spent.reshape(num_ranks, end + 1).cumsum(axis=1)
    until = np.append(arrivals, np.repeat(arrivals[-1:], end + 1))[: end + 1]
    until = np.append(until, np.zeros(end + 1 - len(until)))
    room: Float64 = np.maximum.accumulate(np.maximum(until - spent, 0.0), axis=1)
    return room


def _middles(work: Work, chosen: Bool, kind: Int64, turn: Int64) -> tuple[Int64, Float64]:
    """The chosen tiles, and where the middle of each stands, when every rank runs them by kind and
    turn."""
    tiles, kinds = turn[chosen[turn]], int(kind.max(initial=0)) + 1
    ranks = int(work.rank.max(initial=0)) + 1
    tiles = tiles[sorted_order((work.rank[tiles] * kinds + kind[tiles], ranks * kinds))]
    rank, seconds = work.rank[tiles], work.seconds[tiles]
    own = np.bincount(rank, seconds, 1)
    return tiles, np.cumsum(seconds) - (np.cumsum(own) - own)[rank] - seconds / 2
