"""Local passes over a placement: what gains moves where there is room."""

import numpy as np

from dyncp.arrays import Int64
from dyncp.compiled import compiled, inner
from dyncp.placement.bisection.moves import (
    EPSILON,
    State,
    best_move,
    block_gain,
    list_edges,
    list_group,
    move_tile,
    put_block,
)


@compiled
def improve(state: State, max_passes: int) -> None:
    """Passes over tiles, groups of tiles and blocks, until they gain little or nothing."""
    tiles = np.empty((2, len(state.tile_rank) + 2), np.int64)
    total = 0.0
    for _ in range(max_passes):
        gain = _improve_tiles(state) + _improve_groups(state, tiles) + _improve_blocks(state)
        total += gain
        if gain <= 0.02 * total:
            return


@inner
def _improve_tiles(state: State) -> float:
    """Each tile goes to the rank of greatest positive gain that has room."""
    pins, on_machine, machine, load = state.pins, state.on_machine, state.machine, state.load
    size, extra, edges, tile_rank = state.size, state.extra, state.edges, state.tile_rank
    total, work, cap, group = 0.0, state.work, state.caps[0], np.empty(2, np.int64)
    for t in range(len(tile_rank)):
        r, q, k = tile_rank[t], edges[t, 0], edges[t, 1]
        if pins[q, r] > 1 and pins[k, r] > 1:
            continue  # leaving frees nothing
        group[0], group[1] = q, k
        gain, to = best_move(
            pins, on_machine, machine, size, extra, load, group, r, cap - work[t], EPSILON
        )
        if to >= 0:
            move_tile(pins, on_machine, machine, edges, work, load, tile_rank, t, to)
            total += gain
    return total


@inner
def _improve_groups(state: State, tiles: Int64) -> float:
    """All tiles of an edge on a rank move together where that gains."""
    pins, on_machine, machine, load = state.pins, state.on_machine, state.machine, state.load
    size, extra, edges, tile_rank = state.size, state.extra, state.edges, state.tile_rank
    start, members, work, cap = state.start, state.members, state.work, state.caps[0]
    total = 0.0
    for e in range(len(size)):
        for r in range(len(load)):
            n = list_group(start, members, tile_rank, e, r, tiles[0]) if pins[e, r] > 0 else 0
            if n == 0:
                continue
            most = cap - list_edges(edges, work, tiles[0], n, e, tiles[1])
            group = tiles[1, : n + 1]
            gain, to = best_move(
                pins, on_machine, machine, size, extra, load, group, r, most, EPSILON
            )
            if to >= 0:
                for i in range(n):
                    t = tiles[0, i]
                    move_tile(pins, on_machine, machine, edges, work, load, tile_rank, t, to)
                total += gain
    return total


@inner
def _improve_blocks(state: State) -> float:
    """Each block goes to the owner of greatest gain, in a swap where there is no room."""
    pins, on_machine, machine = state.pins, state.on_machine, state.machine
    size, extra, groups, block_rank = state.size, state.extra, state.groups, state.block_rank
    tokens, held, blocks = state.tokens, state.held, len(block_rank)
    total = 0.0
    for b in range(blocks):
        r = block_rank[b]
        best, best_s, best_back = EPSILON, -1, -1
        for s in range(len(held)):
            if s == r:
                continue
            gain = block_gain(pins, on_machine, machine, size, extra, groups, blocks, b, r, s)
            if gain <= best:
                continue
            if held[s] + tokens[b] <= state.caps[1]:
                best, best_s, best_back = gain, s, -1
                continue
            for c in range(blocks):
                more = tokens[b] - tokens[c]
                if block_rank[c] != s or max(held[s] + more, held[r] - more) > state.caps[1]:
                    continue
                both = gain + block_gain(
                    pins, on_machine, machine, size, extra, groups, blocks, c, s, r
                )
                if both > best:
                    best, best_s, best_back = both, s, c
        if best_s >= 0:
            put_block(state, b, best_s)
            if best_back >= 0:
                put_block(state, best_back, r)
            total += best
    return total
