"""Takes load off ranks that have more than their caps, at the least loss."""

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
    put_block,
    put_tile,
)


@compiled
def repair_work(state: State, max_rounds: int) -> None:
    """Moves single tiles, or all tiles of one edge on a rank, off overloaded ranks at the least
    loss per unit of load.

    Candidates of a rank are scored once; the best is scored again before it moves, and put back
    where it has become worse."""
    load, cap = state.load, state.caps[0]
    tiles = np.empty((2, len(state.tile_rank) + 2), np.int64)
    score = np.empty(len(state.tile_rank) + len(state.size))
    what = np.empty(len(score), np.int64)  # a tile, or -1 - edge
    for _ in range(max_rounds):
        r = 0
        for s in range(len(load)):
            r = s if load[s] > load[r] else r
        if load[r] <= cap * (1 + EPSILON):
            return
        count = _list_candidates(state, r, what)
        for i in range(count):
            score[i] = -1e300
        moved = False
        while load[r] > cap * (1 + EPSILON):
            at = 0
            for i in range(count):
                at = i if score[i] < score[at] else at
            if count == 0 or score[at] >= 1e299:
                break
            now, to, n = _score(state, r, what[at], tiles)
            if to < 0:
                score[at] = 1e300
            elif now > score[at]:
                score[at] = now
            else:
                for i in range(n):
                    put_tile(state, tiles[0, i], to)
                score[at], moved = 1e300, True
        if not moved:
            return


@inner
def _list_candidates(state: State, r: int, what: Int64) -> int:
    count, pins = 0, state.pins
    for t in range(len(state.tile_rank)):
        if state.tile_rank[t] == r:
            what[count] = t
            count += 1
    for e in range(len(state.size)):
        if pins[e, r] > 1:
            what[count] = -1 - e
            count += 1
    return count


@inner
def _score(state: State, r: int, what: int, tiles: Int64) -> tuple[float, int, int]:
    """Loss per unit of load that a tile or group takes off rank r, where to, and how many tiles it
    has, written to tiles[0]."""
    pins, on_machine, machine, load = state.pins, state.on_machine, state.machine, state.load
    size, extra, edges, cap = state.size, state.extra, state.edges, state.caps[0]
    if what >= 0:
        e, n, tiles[0, 0] = edges[what, 0], 1, what
        if state.tile_rank[what] != r:
            return 0.0, -1, 0
    else:
        e = -1 - what
        n = list_group(state.start, state.members, state.tile_rank, e, r, tiles[0])
        if n < 2:
            return 0.0, -1, 0
    moved = list_edges(edges, state.work, tiles[0], n, e, tiles[1])
    group = tiles[1, : n + 1]
    gain, to = best_move(
        pins, on_machine, machine, size, extra, load, group, r, cap - moved, -1e300
    )
    useful = min(moved, load[r] - cap)
    return (1.0 - gain) / max(useful, 1e-300), to, n


@compiled
def repair_tokens(state: State, max_moves: int) -> None:
    """Moves token blocks off ranks that hold too many tokens; where no rank has room for a whole
    block, swaps a larger for a smaller one."""
    held, tokens, cap, block_rank = state.held, state.tokens, state.caps[1], state.block_rank
    pins, on_machine, machine = state.pins, state.on_machine, state.machine
    size, extra, groups, blocks = state.size, state.extra, state.groups, len(block_rank)
    for _ in range(max_moves):
        r = 0
        for s in range(len(held)):
            r = s if held[s] > held[r] else r
        over = held[r] - cap
        if over <= EPSILON * cap:
            return
        best, best_b, best_s, back = 1e300, -1, -1, -1
        for b in range(blocks):
            if block_rank[b] != r:
                continue
            for s in range(len(held)):
                if s == r or held[s] + tokens[b] > cap:
                    continue
                gain = block_gain(pins, on_machine, machine, size, extra, groups, blocks, b, r, s)
                score = (1.0 - gain) / min(tokens[b], over)
                if score < best:
                    best, best_b, best_s = score, b, s
        if best_b < 0:
            best_b, back = _swap_down(state, r, over)
            if best_b < 0:
                return
            best_s = block_rank[back]
        put_block(state, best_b, best_s)
        if back >= 0:
            put_block(state, back, r)


@inner
def _swap_down(state: State, r: int, over: float) -> tuple[int, int]:
    """The block of rank r and the smaller one of another rank that are swapped at the least loss
    per token."""
    pins, on_machine, machine = state.pins, state.on_machine, state.machine
    size, extra, groups, block_rank = state.size, state.extra, state.groups, state.block_rank
    tokens, blocks = state.tokens, len(block_rank)
    best, best_b, best_c = 1e300, -1, -1
    for b in range(blocks):
        if block_rank[b] != r:
            continue
        for c in range(blocks):
            s, less = block_rank[c], tokens[b] - tokens[c]
            if s == r or less <= 0 or state.held[s] + less > state.caps[1]:
                continue
            gain = block_gain(pins, on_machine, machine, size, extra, groups, blocks, b, r, s)
            gain += block_gain(pins, on_machine, machine, size, extra, groups, blocks, c, s, r)
            score = (1.0 - gain) / min(less, over)
            if score < best:
                best, best_b, best_c = score, b, c
    return best_b, best_c
