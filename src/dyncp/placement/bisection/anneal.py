"""A short annealing over the moves of refine.py and larger ones.

A move is taken if it loses no more than a threshold that is drawn before the move is: temperature
times an exponential variate. Load beyond a cap is allowed on the way, and costs `weight` bytes per
cap's worth; what is left of it at the end is repaired as after bisection.
"""

import math

import numpy as np

from dyncp.arrays import Float64, Int64
from dyncp.placement.bisection.compiled import compiled, inner
from dyncp.placement.bisection.refine import (
    State,
    block_gain,
    list_group,
    move_block,
    move_tile,
    pin_gain,
)

# Of 16 moves so many are of tiles, groups of tiles, blocks and rows; the rest swaps two blocks.
TILES, GROUPS, BLOCKS, ROWS = 7, 11, 13, 15
# Moves at one temperature.
STEP = 64


@compiled
def anneal(state: State, max_moves: int, hot: float, cold: float, weight: float, seed: int) -> int:
    """Tries `max_moves` random moves while the temperature falls from `hot` to `cold` bytes;
    returns how many were taken."""
    tiles = np.empty(len(state.tile_rank) + 1, np.int64)
    num_tiles, blocks = len(state.tile_rank), len(state.block_rank)
    x, taken = np.int64(seed * 2 + 1), 0
    temperature = hot
    factor = math.exp(math.log(cold / hot) * STEP / max_moves)
    for i in range(max_moves):
        if i % STEP == STEP - 1:
            temperature *= factor
        x = _next(x)
        enough = -temperature * math.log((((x >> 20) & 0xFFFFFF) + 1) / 16777217.0)
        kind = (x >> 45) & 15
        x = _next(x)
        if kind < TILES:
            taken += _try_tile(state, (x >> 20) % num_tiles, x, enough, weight)
        elif kind < GROUPS:
            taken += _try_group(state, (x >> 20) % num_tiles, x, enough, weight, tiles)
        elif kind < BLOCKS:
            taken += _try_block(state, (x >> 20) % blocks, x, enough, weight)
        elif kind < ROWS:
            taken += _try_row(state, (x >> 20) % blocks, x, enough, weight, tiles)
        else:
            taken += _try_swap(state, (x >> 20) % blocks, x, enough, weight)
    return taken


@inner
def _next(x: int) -> int:
    """A linear congruential generator; its high bits are random. Never negative."""
    return (x * 6364136223846793005 + 1442695040888963407) & 0x7FFFFFFFFFFFFFFF


@inner
def _over(load: Float64, cap: float, r: int, s: int, moved: float) -> float:
    """How much more load is beyond the cap, in caps, when `moved` goes from rank r to rank s."""
    before = max(0.0, load[r] - cap) + max(0.0, load[s] - cap)
    after = max(0.0, load[r] - moved - cap) + max(0.0, load[s] + moved - cap)
    return (after - before) / cap


@inner
def _near(state: State, e: int, x: int) -> int:
    """The rank of a random pin of edge e: its owner's, or a tile's."""
    count = state.start[e + 1] - state.start[e]
    pick = (x >> 8) % (count + 1)
    if pick == count:
        return int(state.block_rank[(e // state.groups) % len(state.block_rank)])
    return int(state.tile_rank[state.members[state.start[e] + pick]])


@inner
def _try_tile(state: State, t: int, x: int, enough: float, weight: float) -> int:
    q, k = state.edges[t, 0], state.edges[t, 1]
    r, s = state.tile_rank[t], _near(state, q if x & 64 else k, _next(x))
    if r == s:
        return 0
    pins, on_machine, machine = state.pins, state.on_machine, state.machine
    size, extra = state.size, state.extra
    loss = weight * _over(state.load, state.caps[0], r, s, state.work[t])
    loss -= pin_gain(pins, on_machine, machine, size, extra, q, 1, r, s)
    loss -= pin_gain(pins, on_machine, machine, size, extra, k, 1, r, s)
    if loss > enough:
        return 0
    move_tile(state, t, s)
    return 1


@inner
def _try_group(state: State, t: int, x: int, enough: float, weight: float, tiles: Int64) -> int:
    """All tiles that share an edge and the rank with tile t."""
    side = (x >> 6) & 1
    e, r, edges = state.edges[t, side], state.tile_rank[t], state.edges
    s = _near(state, edges[t, (x >> 7) & 1], _next(x))
    if r == s:
        return 0
    pins, on_machine, machine = state.pins, state.on_machine, state.machine
    size, extra = state.size, state.extra
    n = list_group(state.start, state.members, state.tile_rank, e, r, tiles)
    loss, moved = -pin_gain(pins, on_machine, machine, size, extra, e, n, r, s), 0.0
    for i in range(n):
        f = edges[tiles[i], 1 - side]
        loss -= pin_gain(pins, on_machine, machine, size, extra, f, 1, r, s)
        moved += state.work[tiles[i]]
    loss += weight * _over(state.load, state.caps[0], r, s, moved)
    if loss > enough:
        return 0
    for i in range(n):
        move_tile(state, tiles[i], s)
    return 1


@inner
def _loss_of_block(state: State, b: int, s: int, weight: float) -> float:
    r = state.block_rank[b]
    loss = weight * _over(state.held, state.caps[1], r, s, state.tokens[b])
    return loss - block_gain(
        state.pins, state.on_machine, state.machine, state.size, state.extra, state.groups,
        len(state.block_rank), b, r, s,
    )  # fmt: skip


@inner
def _near_block(state: State, b: int, x: int) -> int:
    """A rank that has tiles of the block's rows or columns."""
    e = b * state.groups + (x >> 40) % state.groups
    if x & 64:
        e += len(state.block_rank) * state.groups
    return _near(state, e, _next(x))


@inner
def _try_block(state: State, b: int, x: int, enough: float, weight: float) -> int:
    s = _near_block(state, b, x)
    if s == state.block_rank[b] or _loss_of_block(state, b, s, weight) > enough:
        return 0
    move_block(state, b, s)
    return 1


@inner
def _try_swap(state: State, b: int, x: int, enough: float, weight: float) -> int:
    """Swaps the owners of a block and of one that belongs to a rank near it."""
    r, s, blocks = state.block_rank[b], _near_block(state, b, x), len(state.block_rank)
    if r == s:
        return 0
    c = (x >> 30) % blocks
    for _ in range(blocks):
        if state.block_rank[c] == s:
            break
        c = c + 1 if c + 1 < blocks else 0
    if state.block_rank[c] != s:
        return 0
    loss = _loss_of_block(state, b, s, weight)
    move_block(state, b, s)
    loss += _loss_of_block(state, c, r, weight)
    if loss > enough:
        move_block(state, b, r)
        return 0
    move_block(state, c, r)
    return 1


@inner
def _try_row(state: State, b: int, x: int, enough: float, weight: float, tiles: Int64) -> int:
    """A block together with the tiles of its rows that are on its rank."""
    r, s, groups = state.block_rank[b], _near_block(state, b, x), state.groups
    if r == s:
        return 0
    pins, on_machine, machine = state.pins, state.on_machine, state.machine
    size, extra, edges = state.size, state.extra, state.edges
    loss, count, moved = _loss_of_block(state, b, s, weight), 0, 0.0
    move_block(state, b, s)
    for e in range(b * groups, b * groups + groups):
        for i in range(state.start[e], state.start[e + 1]):
            t = state.members[i]
            if state.tile_rank[t] != r:
                continue
            for side in range(2):
                loss -= pin_gain(pins, on_machine, machine, size, extra, edges[t, side], 1, r, s)
            moved += state.work[t]
            move_tile(state, t, s)
            tiles[count] = t
            count += 1
    loss -= weight * _over(state.load, state.caps[0], s, r, moved)  # of the way back
    if loss <= enough:
        return 1
    for i in range(count):
        move_tile(state, tiles[i], r)
    move_block(state, b, r)
    return 0
