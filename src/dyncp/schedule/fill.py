"""Fills divisions: tiles that wait for nothing slow hide what travels.

What has to come farthest, over machine borders where there are any, decides the divisions (see
pace.py). All other tiles are fillers. They cover the time until slow inputs arrive; the rest runs
behind the slow tiles, where it hides their results on the way back: first those that need blocks of
the own machine, whose results have a way as well, then local ones.

    division      0        1              2              3 and 4
                  local    slow + fill    slow + fill    near fillers, then local ones
"""

from dataclasses import dataclass

import numpy as np

from dyncp.arrays import Bool, Float64, Int64
from dyncp.schedule.uses import Work

# Inputs and results may take this much longer than estimated before anyone waits.
SAFETY = 1.3


@dataclass(frozen=True, eq=False)
class Needs:
    """Seconds: when slow inputs of each division (from 1 on) are there, and how long the last
    results travel, in as many steps as they have."""

    arrivals: Float64
    results: Float64


def fill(
    division: Int64, slow: Bool, work: Work, needs: Needs, num_ranks: int, *, by_rows: bool
) -> Int64:
    """Final divisions. `division` is the earliest that a tile's inputs allow. Fillers are taken
    `by_rows`, those of a block together, where every call that meets a block's rows costs
    something; otherwise small ones first."""
    end, steps = int(division.max(initial=0)), SAFETY * needs.results
    if end == 0:  # nothing travels
        return division.copy()
    room = _room(division, slow, work, SAFETY * needs.arrivals, num_ranks)
    filled = division.copy()
    local = np.flatnonzero(work.local & ~slow)
    turn = work.block if by_rows else work.seconds
    closes = _middles(work, local, np.zeros_like(local), turn) + work.seconds[local] / 2
    at_start = local[closes <= room[work.rank[local], 0] + 1e-12]
    filled[at_start] = 0
    room -= np.bincount(work.rank[at_start], work.seconds[at_start], num_ranks)[:, None]

    is_rest = ~slow
    is_rest[at_start] = False
    rest = np.flatnonzero(is_rest)
    kind = np.where(work.local[rest], end + 1, division[rest])
    middle = _middles(work, rest, kind, turn)
    limits = np.maximum(room[:, 1:], 0.0)
    if len(steps) == 0:
        limits = limits[:, :-1]
    elif len(steps) == 2:
        left = np.bincount(work.rank[rest], work.seconds[rest], num_ranks) - steps[1]
        limits = np.append(limits, np.maximum(left[:, None], limits[:, -1:]), axis=1)
    place = 1 + (middle[:, None] > limits[work.rank[rest]]).sum(axis=1)
    filled[rest] = np.maximum(division[rest], place)
    return filled


def _room(division: Int64, slow: Bool, work: Work, arrivals: Float64, num_ranks: int) -> Float64:
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


def _middles(work: Work, tiles: Int64, kind: Int64, turn: Int64 | Float64) -> Float64:
    """Where the middle of each tile stands when every rank runs these tiles by kind and turn."""
    order = np.lexsort((turn[tiles], kind, work.rank[tiles]))
    by = tiles[order]
    own = np.bincount(work.rank[by], work.seconds[by], 1)
    closes = np.cumsum(work.seconds[by]) - (np.cumsum(own) - own)[work.rank[by]]
    middle = np.empty(len(tiles))
    middle[order] = closes - work.seconds[by] / 2
    return middle
