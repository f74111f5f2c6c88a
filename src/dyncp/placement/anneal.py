"""Annealing of a refined placement, over moves of tiles, blocks, rows and sequences.

A move is accepted if its loss is at most a random threshold: the temperature times an exponential
variate. Ranks may exceed their caps on the way, at a price of `weight` bytes per cap; the final
repair removes what is left of that. Without annealing, bisection_quality moves 5 % more bytes (12
batches on 32 ranks), without moves of rows and sequences 1.3 % more. Swaps of blocks, rows or
sequences saved 0.2 % and are left out.
"""

import math

import numpy as np

from dyncp.arrays import Float64, Int64
from dyncp.compiled import compiled, inner
from dyncp.placement.refine import Solution, refine
from dyncp.placement.tile_moves import (
    State,
    block_gain,
    list_group,
    move_block,
    move_tile,
    pin_gain,
)

# Number of moves, first and last temperature; the unit is the mean size of a hyperedge.
ANNEALINGS = ((80_000, 0.3, 0.01), (60_000, 0.1, 0.01))
# While annealing, an excess of one cap costs this many times the bytes of a mean rank.
OVERLOAD = 3.0
CHANGING = ("tile_rank", "block_rank", "pins", "on_node", "load", "held")
# Of 16 kinds of moves the first 5 are of single tiles, the next 4 of groups of tiles and the next 3
# of blocks. The last four are of rows, or of sequences if their bit SEQUENCES is set.
TILES, GROUPS, BLOCKS, SEQUENCES = 5, 9, 12, 2
# Sequences with more blocks are not moved as a whole.
WHOLE_BLOCKS = 16
# Number of moves at one temperature.
STEP = 64


def anneal_best(best: Solution, rng: np.random.Generator) -> Solution:
    """The best of a solution and its annealed and refined copies; each copies the best so far."""
    for max_moves, hot, cold in ANNEALINGS:
        if best.cost > 0:
            copies = {name: getattr(best.state, name).copy() for name in CHANGING}
            state = best.state._replace(**copies)
            unit = float(state.size.mean())
            weight = OVERLOAD * (best.cost / len(state.load) + 8 * unit)
            anneal(state, max_moves, hot * unit, cold * unit, weight, int(rng.integers(2**31)))
            best = min(best, refine(state), key=lambda solution: solution.cost)
    return best


@compiled
def anneal(state: State, max_moves: int, hot: float, cold: float, weight: float, seed: int) -> int:
    """Tries `max_moves` random moves while the temperature falls from `hot` to `cold` bytes;
    returns how many were accepted."""
    moved = np.empty(len(state.tile_rank) + len(state.block_rank), np.int64)
    num_tiles, blocks = len(state.tile_rank), len(state.block_rank)
    x, taken, temperature = 2 * seed + 1, 0, hot
    factor = math.exp(math.log(cold / hot) * STEP / max_moves)
    for i in range(max_moves):
        if i % STEP == STEP - 1:
            temperature *= factor
        x = _next(x)
        enough = -temperature * math.log((((x >> 20) & 0xFFFFFF) + 1) / 16777217.0)
        kind = (x >> 45) & 15
        x = _next(x)
        t, b = (x >> 20) % max(num_tiles, 1), (x >> 20) % blocks
        if kind < GROUPS and num_tiles == 0:
            continue
        if kind < TILES:
            taken += _try_tile(state, t, x, enough, weight)
        elif kind < GROUPS:
            taken += _try_group(state, t, x, enough, weight, moved)
        elif kind < BLOCKS:
            taken += _try_block(state, b, x, enough, weight)
        else:
            taken += _try_rows(state, b, x, kind, enough, weight, moved)
    return taken


@inner
def _next(x: int) -> int:
    """Next state of a linear congruential generator, never negative; only high bits are random."""
    return (x * 6364136223846793005 + 1442695040888963407) & 0x7FFFFFFFFFFFFFFF


@inner
def _over(load: Float64, cap: float, r: int, s: int, moved: float) -> float:
    """Change of the excess over the cap, in caps, if `moved` goes from rank r to rank s."""
    before = max(0.0, load[r] - cap) + max(0.0, load[s] - cap)
    after = max(0.0, load[r] - moved - cap) + max(0.0, load[s] + moved - cap)
    return float((after - before) / cap)


@inner
def _near_edge(state: State, e: int, x: int) -> int:
    """The rank of a random pin of edge e: a tile, or the block itself."""
    first, count = state.start[e], state.start[e + 1] - state.start[e]
    pick = (_next(x) >> 8) % (count + 1)
    if pick == count:
        return int(state.block_rank[(e // state.groups) % len(state.block_rank)])
    return int(state.tile_rank[state.members[first + pick]])


@inner
def _loss_of_tile(state: State, t: int, s: int, weight: float) -> float:
    r = state.tile_rank[t]
    loss = weight * _over(state.load, state.caps[0], r, s, state.work[t])
    for i in range(2):
        loss -= pin_gain(
            state.pins, state.on_node, state.node, state.size, state.extra,
            state.edges[t, i], 1, r, s,
        )  # fmt: skip
    return loss


@inner
def _try_tile(state: State, t: int, x: int, enough: float, weight: float) -> int:
    s = _near_edge(state, state.edges[t, (x >> 6) & 1], x)
    if s == state.tile_rank[t] or _loss_of_tile(state, t, s, weight) > enough:
        return 0
    move_tile(state, t, s)
    return 1


@inner
def _try_group(state: State, t: int, x: int, enough: float, weight: float, tiles: Int64) -> int:
    """Tries to move tile t with all tiles of its rank that share one of its edges."""
    side = (x >> 6) & 1
    e, r, edges = state.edges[t, side], state.tile_rank[t], state.edges
    s = _near_edge(state, edges[t, (x >> 7) & 1], x)
    if r == s:
        return 0
    pins, on_node, node = state.pins, state.on_node, state.node
    size, extra = state.size, state.extra
    n = list_group(state.start, state.members, state.tile_rank, e, r, tiles)
    loss, moved = -pin_gain(pins, on_node, node, size, extra, e, n, r, s), 0.0
    for i in range(n):
        f = edges[tiles[i], 1 - side]
        loss -= pin_gain(pins, on_node, node, size, extra, f, 1, r, s)
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
        state.pins, state.on_node, state.node, state.size, state.extra, state.groups,
        len(state.block_rank), b, r, s,
    )  # fmt: skip


@inner
def _near_block(state: State, b: int, x: int) -> int:
    """A rank that has tiles of the block's rows or columns."""
    e = b * state.groups + (x >> 40) % state.groups
    if x & 64:
        e += len(state.block_rank) * state.groups
    return _near_edge(state, e, x)


@inner
def _try_block(state: State, b: int, x: int, enough: float, weight: float) -> int:
    s = _near_block(state, b, x)
    if s == state.block_rank[b] or _loss_of_block(state, b, s, weight) > enough:
        return 0
    move_block(state, b, s)
    return 1


@inner
def _try_rows(
    state: State, b: int, x: int, kind: int, enough: float, weight: float, moved: Int64
) -> int:
    """Tries to move a block and the tiles of its rows that are on its rank to another rank; if
    `kind` says so, with all such blocks of its sequence."""
    r, s = state.block_rank[b], _near_block(state, b, x)
    if kind & SEQUENCES:
        s = (x >> 12) % len(state.load)
    if r == s or (kind & 3 and state.span[b, 1] - state.span[b, 0] > WHOLE_BLOCKS):
        return 0
    loss, count = _shift(state, b, kind, r, s, weight, moved)
    if loss <= enough:
        return 1
    for i in range(count):
        if moved[i] < 0:
            move_block(state, -1 - moved[i], r)
        else:
            move_tile(state, moved[i], r)
    return 0


@inner
def _shift(
    state: State, b: int, kind: int, r: int, s: int, weight: float, moved: Int64
) -> tuple[float, int]:
    """Moves the rows of a block, or of its sequence, from rank r to rank s. Writes the tiles, and
    -1 - block for blocks, to `moved`; returns the loss and how many it wrote."""
    first, end, loss, count = b, b + 1, 0.0, 0
    if kind & SEQUENCES:
        first, end = state.span[b, 0], state.span[b, 1]
    for c in range(first, end):
        if state.block_rank[c] == r:
            loss += _loss_of_block(state, c, s, weight)
            move_block(state, c, s)
            moved[count] = -1 - c
            count += 1
    for i in range(state.start[first * state.groups], state.start[end * state.groups]):
        t = state.members[i]
        if state.tile_rank[t] == r:
            loss += _loss_of_tile(state, t, s, weight)
            move_tile(state, t, s)
            moved[count] = t
            count += 1
    return loss, count
