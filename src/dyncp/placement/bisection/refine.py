"""Repair and local passes over a placement, on counts of how many pins each hyperedge has per rank.

With G head groups and B blocks, hyperedge b G + g is the query side of head group g of block b, and
(B + b) G + g its key side; the pins of an edge are its tiles and, with one pin, the block's owner.
An edge costs its size for every rank that it touches but one, and `extra` times its size for every
machine but one: what crosses a border crosses it once and is passed on inside. So moving a pin
gains where it leaves a rank (or machine) without pins, and loses where it comes to one that had
none.
"""

from typing import NamedTuple

import numpy as np

from dyncp.arrays import Float64, Int32, Int64
from dyncp.compiled import compiled, inner

_EPSILON = 1e-9


class State(NamedTuple):
    """A placement in work: `tile_rank` and what stands below it change."""

    edges: Int64  # [tiles, 2]: query-side edge, key-side edge
    start: Int64  # [edges + 1] into members
    members: Int64  # tiles of each edge
    size: Float64  # [edges] bytes per further rank
    machine: Int64  # [ranks]
    extra: float  # price of a byte between machines, less 1
    groups: int
    work: Float64  # [tiles]
    tokens: Float64  # [blocks]
    span: Int64  # [blocks, 2] first and end block of their sequences
    caps: Float64  # [2]: work and tokens of a rank
    tile_rank: Int64  # [tiles]
    block_rank: Int64  # [blocks]
    pins: Int32  # [edges, ranks] how many pins each edge has on each rank
    on_machine: Int32  # [edges, machines] the same by machine
    load: Float64  # [ranks] work
    held: Float64  # [ranks] tokens


@compiled
def count_pins(state: State) -> float:
    """Fills pins, load and held from the ranks of tiles and blocks; returns the cost."""
    pins, on_machine, machine = state.pins, state.on_machine, state.machine
    edges, tile_rank, block_rank = state.edges, state.tile_rank, state.block_rank
    blocks, groups, size = len(block_rank), state.groups, state.size
    for e in range(len(size)):
        for r in range(len(machine)):
            pins[e, r] = 0
        for m in range(on_machine.shape[1]):
            on_machine[e, m] = 0
    for r in range(len(machine)):
        state.load[r] = state.held[r] = 0.0
    for t in range(len(tile_rank)):
        r = tile_rank[t]
        state.load[r] += state.work[t]
        for i in range(2):
            pins[edges[t, i], r] += 1
            on_machine[edges[t, i], machine[r]] += 1
    for b in range(blocks):
        r = block_rank[b]
        state.held[r] += state.tokens[b]
        for i in range(2 * groups):
            e = _owned_edge(b, i, groups, blocks)
            pins[e, r] += 1
            on_machine[e, machine[r]] += 1
    return total_cost(pins, on_machine, size, state.extra)


@compiled
def total_cost(pins: Int32, on_machine: Int32, size: Float64, extra: float) -> float:
    total = 0.0
    for e in range(len(size)):
        ranks, machines = -1, -1
        for r in range(pins.shape[1]):
            ranks += 1 if pins[e, r] > 0 else 0
        for m in range(on_machine.shape[1]):
            machines += 1 if on_machine[e, m] > 0 else 0
        total += float(size[e] * (ranks + extra * machines))
    return total


# The innermost functions take plain arrays: handing on the whole state costs a reference count per
# array and call, which made these passes 15 times slower.
@inner
def _owned_edge(b: int, i: int, groups: int, blocks: int) -> int:
    """The i-th of the 2 × groups edges of a block."""
    return b * groups + i if i < groups else (blocks + b - 1) * groups + i


@inner
def pin_gain(
    pins: Int32,
    on_machine: Int32,
    machine: Int64,
    size: Float64,
    extra: float,
    e: int,
    n: int,
    r: int,
    s: int,
) -> float:
    """What one edge gains by moving n of its pins from rank r to rank s."""
    factor = 0.0
    if pins[e, r] == n:
        factor += 1.0
    if pins[e, s] == 0:
        factor -= 1.0
    if extra > 0 and machine[r] != machine[s]:
        if on_machine[e, machine[r]] == n:
            factor += extra
        if on_machine[e, machine[s]] == 0:
            factor -= extra
    return float(size[e] * factor)


@inner
def move_pins(
    pins: Int32, on_machine: Int32, machine: Int64, e: int, n: int, r: int, s: int
) -> None:
    pins[e, r] -= n
    pins[e, s] += n
    on_machine[e, machine[r]] -= n
    on_machine[e, machine[s]] += n


@inner
def move_tile(
    pins: Int32,
    on_machine: Int32,
    machine: Int64,
    edges: Int64,
    work: Float64,
    load: Float64,
    tile_rank: Int64,
    t: int,
    s: int,
) -> None:
    r = tile_rank[t]
    for i in range(2):
        move_pins(pins, on_machine, machine, edges[t, i], 1, r, s)
    load[r] -= work[t]
    load[s] += work[t]
    tile_rank[t] = s


@inner
def move_block(
    pins: Int32,
    on_machine: Int32,
    machine: Int64,
    groups: int,
    tokens: Float64,
    held: Float64,
    block_rank: Int64,
    b: int,
    s: int,
) -> None:
    r = block_rank[b]
    for i in range(2 * groups):
        e = _owned_edge(b, i, groups, len(block_rank))
        move_pins(pins, on_machine, machine, e, 1, r, s)
    held[r] -= tokens[b]
    held[s] += tokens[b]
    block_rank[b] = s


@inner
def put_tile(state: State, t: int, s: int) -> None:
    """`move_tile` where speed does not matter."""
    move_tile(
        state.pins, state.on_machine, state.machine, state.edges, state.work, state.load,
        state.tile_rank, t, s,
    )  # fmt: skip


@inner
def put_block(state: State, b: int, s: int) -> None:
    """`move_block` where speed does not matter."""
    move_block(
        state.pins, state.on_machine, state.machine, state.groups, state.tokens, state.held,
        state.block_rank, b, s,
    )  # fmt: skip


@inner
def block_gain(
    pins: Int32,
    on_machine: Int32,
    machine: Int64,
    size: Float64,
    extra: float,
    groups: int,
    blocks: int,
    b: int,
    r: int,
    s: int,
) -> float:
    """What is gained when a block moves from owner r to owner s."""
    gain = 0.0
    for i in range(2 * groups):
        e = _owned_edge(b, i, groups, blocks)
        gain += pin_gain(pins, on_machine, machine, size, extra, e, 1, r, s)
    return gain


@inner
def list_group(start: Int64, members: Int64, tile_rank: Int64, e: int, r: int, tiles: Int64) -> int:
    """Writes the tiles of edge e on rank r; returns how many."""
    n = 0
    for i in range(start[e], start[e + 1]):
        if tile_rank[members[i]] == r:
            tiles[n] = members[i]
            n += 1
    return n


@inner
def list_edges(edges: Int64, work: Float64, tiles: Int64, n: int, e: int, group: Int64) -> float:
    """Writes edge e and the other edges of n of its tiles; returns the work of these tiles."""
    moved, side = 0.0, 1 if edges[tiles[0], 0] == e else 0
    group[0] = e
    for i in range(n):
        group[i + 1] = edges[tiles[i], side]
        moved += work[tiles[i]]
    return moved


@inner
def best_move(
    pins: Int32,
    on_machine: Int32,
    machine: Int64,
    size: Float64,
    extra: float,
    load: Float64,
    group: Int64,
    r: int,
    most: float,
    least: float,
) -> tuple[float, int]:
    """The rank with a load of at most `most` where tiles of one edge on rank r together gain most,
    if more than `least` (else -1); the emptiest where several gain alike. `group` has that edge and
    the other edge of each tile."""
    e, n, freed = group[0], len(group) - 1, 0.0
    for i in range(1, n + 1):
        if pins[group[i], r] == 1:
            freed += (1.0 + extra) * size[group[i]]
    best, best_s = least, -1
    if freed + (1.0 + extra) * size[e] <= least:
        return best, best_s
    for s in range(len(load)):
        if s == r or load[s] > most:
            continue
        gain = pin_gain(pins, on_machine, machine, size, extra, e, n, r, s)
        left = freed  # the most that others can still gain
        for i in range(1, n + 1):
            if gain + left < best:
                break
            gain += pin_gain(pins, on_machine, machine, size, extra, group[i], 1, r, s)
            if pins[group[i], r] == 1:
                left -= (1.0 + extra) * size[group[i]]
        if gain > best or (gain == best and best_s >= 0 and load[s] < load[best_s]):
            best, best_s = gain, s
    return best, best_s


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
        if load[r] <= cap * (1 + _EPSILON):
            return
        count = _list_candidates(state, r, what)
        for i in range(count):
            score[i] = -1e300
        moved = False
        while load[r] > cap * (1 + _EPSILON):
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
        if over <= _EPSILON * cap:
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
            pins, on_machine, machine, size, extra, load, group, r, cap - work[t], _EPSILON
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
                pins, on_machine, machine, size, extra, load, group, r, most, _EPSILON
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
        best, best_s, best_back = _EPSILON, -1, -1
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
