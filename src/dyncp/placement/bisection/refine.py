"""Repair and local passes over a placement, on counts of how many pins each hyperedge has per rank.

Hyperedges 0..B-1 are the query sides of the B data blocks, B..2B-1 their key sides; the pins of an
edge are its tiles and, with one pin, the block's owner. An edge costs its size for every rank that
it touches besides the owner, times the price of links between machines where that rank is on
another one. So moving a pin gains a rank's cost where it leaves the rank without pins, and loses it
where it comes to a rank that had none.
"""

from typing import NamedTuple

import numba
import numpy as np

from dyncp.arrays import Float64, Int32, Int64

_EPSILON = 1e-9


class State(NamedTuple):
    """A placement in work: `tile_rank` and what stands below it change."""

    edges: Int64  # [tiles, 2]: query-side edge, key-side edge
    start: Int64  # [edges + 1] into members
    members: Int64  # tiles of each edge
    size: Float64  # [edges] bytes per further rank
    machine: Int64  # [ranks]
    price: float  # of a byte between machines; 1 inside
    work: Float64  # [tiles]
    tokens: Float64  # [blocks]
    work_cap: float
    token_cap: float
    tile_rank: Int64  # [tiles]
    block_rank: Int64  # [blocks]
    pins: Int32  # [edges, ranks] how many pins each edge has on each rank
    cost: Float64  # [edges, ranks] of the edge touching the rank, given its owner
    load: Float64  # [ranks] work
    held: Float64  # [ranks] tokens


@numba.njit(cache=True, nogil=True)
def count_pins(state: State) -> None:
    """Fills pins, cost, load and held from the ranks of tiles and blocks."""
    for t in range(len(state.tile_rank)):
        r = state.tile_rank[t]
        state.pins[state.edges[t, 0], r] += 1
        state.pins[state.edges[t, 1], r] += 1
        state.load[r] += state.work[t]
    blocks = len(state.block_rank)
    for b in range(blocks):
        r = state.block_rank[b]
        state.pins[b, r] += 1
        state.pins[b + blocks, r] += 1
        state.held[r] += state.tokens[b]
        _price_links(state, b)


@numba.njit(cache=True, nogil=True)
def _price_links(state: State, b: int) -> None:
    """Costs of a block's edges, seen from its owner."""
    home = state.machine[state.block_rank[b]]
    for e in (b, b + len(state.block_rank)):
        for r in range(len(state.machine)):
            factor = 1.0 if state.machine[r] == home else state.price
            state.cost[e, r] = state.size[e] * factor


# The innermost functions take plain arrays: handing on the whole state costs a reference count per
# array and call, which made these passes 15 times slower.
@numba.njit(cache=True, nogil=True)
def _gain(pins: Int32, cost: Float64, e: int, r: int, s: int) -> float:
    """What one edge gains by moving one of its tiles from rank r to rank s."""
    gain = 0.0
    if pins[e, r] == 1:
        gain += cost[e, r]
    if pins[e, s] == 0:
        gain -= cost[e, s]
    return gain


@numba.njit(cache=True, nogil=True)
def _tile_gain(pins: Int32, cost: Float64, edges: Int64, t: int, r: int, s: int) -> float:
    return _gain(pins, cost, edges[t, 0], r, s) + _gain(pins, cost, edges[t, 1], r, s)


@numba.njit(cache=True, nogil=True)
def _owner_gain(
    pins: Int32, cost: Float64, machine: Int64, price: float, e: int, r: int, s: int
) -> float:
    """What one edge gains when its owner moves from rank r to rank s."""
    gain = 0.0
    for q in range(len(machine)):
        if q != r and pins[e, q] > 0:
            gain += cost[e, q]
        left = pins[e, q] - (1 if q == r else 0)
        if q != s and left > 0:
            inside = cost[e, r]  # the owner's own entry is the price inside a machine
            gain -= inside if machine[q] == machine[s] else inside * price
    return gain


@numba.njit(cache=True, nogil=True)
def _block_gain(state: State, b: int, r: int, s: int) -> float:
    arrays = (state.pins, state.cost, state.machine, state.price)
    return _owner_gain(*arrays, b, r, s) + _owner_gain(*arrays, b + len(state.block_rank), r, s)


@numba.njit(cache=True, nogil=True)
def _freed(pins: Int32, cost: Float64, e: int, others: Int64, r: int) -> float:
    """What is freed when all tiles of edge e leave rank r; `others` are their other edges."""
    freed = cost[e, r] if pins[e, r] == len(others) else 0.0
    for f in others:
        if pins[f, r] == 1:
            freed += cost[f, r]
    return freed


@numba.njit(cache=True, nogil=True)
def _charge(pins: Int32, cost: Float64, e: int, others: Int64, s: int, enough: float) -> float:
    """What the same tiles cost when they come to rank s; stops counting at `enough`."""
    charge = 0.0 if pins[e, s] else cost[e, s]
    for f in others:
        if charge >= enough:
            break
        if pins[f, s] == 0:
            charge += cost[f, s]
    return charge


@numba.njit(cache=True, nogil=True)
def _move_tile(state: State, t: int, s: int) -> None:
    r = state.tile_rank[t]
    for side in range(2):
        state.pins[state.edges[t, side], r] -= 1
        state.pins[state.edges[t, side], s] += 1
    state.load[r] -= state.work[t]
    state.load[s] += state.work[t]
    state.tile_rank[t] = s


@numba.njit(cache=True, nogil=True)
def _move_block(state: State, b: int, s: int) -> None:
    r = state.block_rank[b]
    for e in (b, b + len(state.block_rank)):
        state.pins[e, r] -= 1
        state.pins[e, s] += 1
    state.held[r] -= state.tokens[b]
    state.held[s] += state.tokens[b]
    state.block_rank[b] = s
    _price_links(state, b)


@numba.njit(cache=True, nogil=True)
def _members_on(state: State, e: int, r: int) -> Int64:
    """Tiles of edge e on rank r."""
    found = np.empty(state.start[e + 1] - state.start[e], np.int64)
    n = 0
    for i in range(state.start[e], state.start[e + 1]):
        if state.tile_rank[state.members[i]] == r:
            found[n] = state.members[i]
            n += 1
    return found[:n]


@numba.njit(cache=True, nogil=True)
def _total_work(state: State, tiles: Int64) -> float:
    total = 0.0
    for t in tiles:
        total += state.work[t]
    return total


@numba.njit(cache=True, nogil=True)
def _other_edges(state: State, e: int, tiles: Int64) -> Int64:
    """The edges that tiles of edge e have on their other side."""
    side = 1 if e < len(state.block_rank) else 0
    others = np.empty(len(tiles), np.int64)
    for i in range(len(tiles)):
        others[i] = state.edges[tiles[i], side]
    return others


@numba.njit(cache=True, nogil=True)
def repair_work(state: State, max_moves: int) -> None:
    """Moves single tiles, or all tiles of one edge on a rank, off overloaded ranks at the least
    loss per unit of load."""
    for _ in range(max_moves):
        r = int(np.argmax(state.load))
        over = state.load[r] - state.work_cap
        if over <= _EPSILON * state.work_cap:
            return
        score, t, to = _cheapest_tile(state, r, over)
        group_score, e, group_to = _cheapest_group(state, r, over)
        if group_score < score:
            for member in _members_on(state, e, r):
                _move_tile(state, member, group_to)
        elif t >= 0:
            _move_tile(state, t, to)
        else:
            return


@numba.njit(cache=True, nogil=True)
def _cheapest_tile(state: State, r: int, over: float) -> tuple[float, int, int]:
    pins, cost, edges = state.pins, state.cost, state.edges
    best, best_t, best_s = np.inf, -1, -1
    for t in range(len(state.tile_rank)):
        if state.tile_rank[t] != r:
            continue
        for s in range(len(state.load)):
            if s == r or state.load[s] + state.work[t] > state.work_cap:
                continue
            score = (1.0 - _tile_gain(pins, cost, edges, t, r, s)) / min(state.work[t], over)
            if score < best:
                best, best_t, best_s = score, t, s
    return best, best_t, best_s


@numba.njit(cache=True, nogil=True)
def _cheapest_group(state: State, r: int, over: float) -> tuple[float, int, int]:
    pins, cost = state.pins, state.cost
    best, best_e, best_s = np.inf, -1, -1
    for e in range(len(state.size)):
        if pins[e, r] < 2:
            continue
        tiles = _members_on(state, e, r)
        if len(tiles) < 2:
            continue
        moved, others = _total_work(state, tiles), _other_edges(state, e, tiles)
        freed = _freed(pins, cost, e, others, r)
        for s in range(len(state.load)):
            if s == r or state.load[s] + moved > state.work_cap:
                continue
            enough = best * min(moved, over) + freed
            score = (1.0 + _charge(pins, cost, e, others, s, enough) - freed) / min(moved, over)
            if score < best:
                best, best_e, best_s = score, e, s
    return best, best_e, best_s


@numba.njit(cache=True, nogil=True)
def repair_tokens(state: State, max_moves: int) -> None:
    """Moves token blocks off ranks that hold too many tokens; where no rank has room for a whole
    block, swaps a larger for a smaller one."""
    for _ in range(max_moves):
        r = int(np.argmax(state.held))
        over = state.held[r] - state.token_cap
        if over <= _EPSILON * state.token_cap:
            return
        b, to, back = _cheapest_block(state, r, over)
        if b < 0:
            return
        _move_block(state, b, to)
        if back >= 0:
            _move_block(state, back, r)


@numba.njit(cache=True, nogil=True)
def _cheapest_block(state: State, r: int, over: float) -> tuple[int, int, int]:
    best, best_b, best_s, best_back = np.inf, -1, -1, -1
    for b in range(len(state.block_rank)):
        if state.block_rank[b] != r:
            continue
        for s in range(len(state.held)):
            if s == r or state.held[s] + state.tokens[b] > state.token_cap:
                continue
            score = (1.0 - _block_gain(state, b, r, s)) / min(state.tokens[b], over)
            if score < best:
                best, best_b, best_s = score, b, s
    if best_b >= 0:
        return best_b, best_s, -1
    for b in range(len(state.block_rank)):
        if state.block_rank[b] != r:
            continue
        for c in range(len(state.block_rank)):
            s, less = state.block_rank[c], state.tokens[b] - state.tokens[c]
            if s == r or less <= 0 or state.held[s] + less > state.token_cap:
                continue
            gain = _block_gain(state, b, r, s) + _block_gain(state, c, s, r)
            score = (1.0 - gain) / min(less, over)
            if score < best:
                best, best_b, best_s, best_back = score, b, s, c
    return best_b, best_s, best_back


@numba.njit(cache=True, nogil=True)
def improve(state: State, max_passes: int) -> None:
    """Passes over tiles, groups of tiles and blocks, until nothing gains any more."""
    for _ in range(max_passes):
        if _improve_tiles(state) + _improve_groups(state) + _improve_blocks(state) <= 0:
            return


@numba.njit(cache=True, nogil=True)
def _improve_tiles(state: State) -> float:
    """Each tile goes to the rank of greatest positive gain that has room."""
    pins, cost, edges = state.pins, state.cost, state.edges
    total = 0.0
    for t in range(len(state.tile_rank)):
        r = state.tile_rank[t]
        if pins[edges[t, 0], r] > 1 and pins[edges[t, 1], r] > 1:
            continue  # leaving frees nothing
        best, best_s = _EPSILON, -1
        for s in range(len(state.load)):
            if s == r or state.load[s] + state.work[t] > state.work_cap:
                continue
            gain = _tile_gain(pins, cost, edges, t, r, s)
            if gain > best:
                best, best_s = gain, s
        if best_s >= 0:
            _move_tile(state, t, best_s)
            total += best
    return total


@numba.njit(cache=True, nogil=True)
def _improve_groups(state: State) -> float:
    """All tiles of an edge on a rank move together where that gains."""
    pins, cost = state.pins, state.cost
    total = 0.0
    for e in range(len(state.size)):
        for r in range(len(state.load)):
            if pins[e, r] == 0:
                continue
            tiles = _members_on(state, e, r)
            if len(tiles) == 0:
                continue
            moved, others = _total_work(state, tiles), _other_edges(state, e, tiles)
            freed = _freed(pins, cost, e, others, r)
            best, best_s = freed - _EPSILON, -1
            for s in range(len(state.load)):
                if best <= 0 or s == r or state.load[s] + moved > state.work_cap:
                    continue
                charge = _charge(pins, cost, e, others, s, best)
                if charge < best:
                    best, best_s = charge, s
            if best_s >= 0:
                for t in tiles:
                    _move_tile(state, t, best_s)
                total += freed - best
    return total


@numba.njit(cache=True, nogil=True)
def _improve_blocks(state: State) -> float:
    """Each block goes to the owner of greatest gain, in a swap where there is no room."""
    total = 0.0
    for b in range(len(state.block_rank)):
        r = state.block_rank[b]
        best, best_s, best_back = _EPSILON, -1, -1
        for s in range(len(state.held)):
            if s == r or state.pins[b, s] + state.pins[b + len(state.block_rank), s] == 0:
                continue  # a rank without tiles of the block gains nothing by owning it
            gain = _block_gain(state, b, r, s)
            if gain <= best:
                continue
            if state.held[s] + state.tokens[b] <= state.token_cap:
                best, best_s, best_back = gain, s, -1
                continue
            both, back = _best_swap(state, b, r, s, gain)
            if both > best:
                best, best_s, best_back = both, s, back
        if best_s >= 0:
            _move_block(state, b, best_s)
            if best_back >= 0:
                _move_block(state, best_back, r)
            total += best
    return total


@numba.njit(cache=True, nogil=True)
def _best_swap(state: State, b: int, r: int, s: int, gain: float) -> tuple[float, int]:
    """The block of rank s to swap b for: joint gain and block (-1: none fits)."""
    best, best_c = -np.inf, -1
    for c in range(len(state.block_rank)):
        more = state.tokens[b] - state.tokens[c]
        if state.block_rank[c] != s or state.held[s] + more > state.token_cap:
            continue
        if state.held[r] - more > state.token_cap:
            continue
        both = gain + _block_gain(state, c, s, r)
        if both > best:
            best, best_c = both, c
    return best, best_c
