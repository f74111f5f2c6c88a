"""Moves of tiles and blocks, with counts of the pins that each hyperedge has on each rank.

With G head groups and B blocks, hyperedge b G + g is the query side of head group g of block b, and
(B + b) G + g its key side. The pins of an edge are its tiles and its block. An edge costs its size
for every rank that it touches except one, and `extra` times its size for every node except one: a
block crosses the border of a node once and is forwarded inside. So moving a pin gains if it was the
last one of a rank (or node), and loses if it is the first one of another.
"""

from typing import NamedTuple

from dyncp.arrays import Float64, Int32, Int64
from dyncp.compiled import compiled, inner

# Smaller gains are rounding errors; loads may exceed their caps by this share.
EPSILON = 1e-9


class State(NamedTuple):
    """A placement being improved; `tile_rank` and the fields below it are updated in place."""

    edges: Int64  # [tiles, 2]: query-side edge, key-side edge
    start: Int64  # [edges + 1] first index of an edge in members
    members: Int64  # tiles of each edge
    size: Float64  # [edges] bytes for each further rank
    node: Int64  # [ranks]
    extra: float  # price of a byte between nodes, minus 1
    groups: int
    work: Float64  # [tiles]
    tokens: Float64  # [blocks]
    span: Int64  # [blocks, 2] first and end block of the block's sequence
    caps: Float64  # [2] most work and tokens of a rank
    tile_rank: Int64  # [tiles]
    block_rank: Int64  # [blocks]
    pins: Int32  # [edges, ranks] number of pins
    on_node: Int32  # [edges, nodes] number of pins
    load: Float64  # [ranks] work
    held: Float64  # [ranks] tokens


@compiled
def count_pins(state: State) -> float:
    """Fills pins, on_node, load and held from the ranks of tiles and blocks; returns the cost."""
    pins, on_node, node = state.pins, state.on_node, state.node
    edges, tile_rank, block_rank = state.edges, state.tile_rank, state.block_rank
    blocks, groups, size = len(block_rank), state.groups, state.size
    for e in range(len(size)):
        for r in range(len(node)):
            pins[e, r] = 0
        for m in range(on_node.shape[1]):
            on_node[e, m] = 0
    for r in range(len(node)):
        state.load[r] = state.held[r] = 0.0
    for t in range(len(tile_rank)):
        r = tile_rank[t]
        state.load[r] += state.work[t]
        for i in range(2):
            pins[edges[t, i], r] += 1
            on_node[edges[t, i], node[r]] += 1
    for b in range(blocks):
        r = block_rank[b]
        state.held[r] += state.tokens[b]
        for i in range(2 * groups):
            e = _owned_edge(b, i, groups, blocks)
            pins[e, r] += 1
            on_node[e, node[r]] += 1
    return total_cost(pins, on_node, size, state.extra)


@compiled
def total_cost(pins: Int32, on_node: Int32, size: Float64, extra: float) -> float:
    total = 0.0
    for e in range(len(size)):
        ranks, nodes = -1, -1
        for r in range(pins.shape[1]):
            ranks += 1 if pins[e, r] > 0 else 0
        for m in range(on_node.shape[1]):
            nodes += 1 if on_node[e, m] > 0 else 0
        total += float(size[e] * (ranks + extra * nodes))
    return total


# Functions that price moves take plain arrays: passing the whole state costs a reference count per
# array and call, which made these passes 15 times slower.
@inner
def _owned_edge(b: int, i: int, groups: int, blocks: int) -> int:
    """The i-th of the 2 × groups edges of block b."""
    return b * groups + i if i < groups else (blocks + b - 1) * groups + i


@inner
def pin_gain(
    pins: Int32,
    on_node: Int32,
    node: Int64,
    size: Float64,
    extra: float,
    e: int,
    n: int,
    r: int,
    s: int,
) -> float:
    """Bytes saved if n pins of edge e move from rank r to rank s."""
    factor = 0.0
    if pins[e, r] == n:
        factor += 1.0
    if pins[e, s] == 0:
        factor -= 1.0
    if extra > 0 and node[r] != node[s]:
        if on_node[e, node[r]] == n:
            factor += extra
        if on_node[e, node[s]] == 0:
            factor -= extra
    return float(size[e] * factor)


@inner
def move_tile(state: State, t: int, s: int) -> None:
    r = state.tile_rank[t]
    for i in range(2):
        _move_pins(state.pins, state.on_node, state.node, state.edges[t, i], r, s)
    state.load[r] -= state.work[t]
    state.load[s] += state.work[t]
    state.tile_rank[t] = s


@inner
def move_block(state: State, b: int, s: int) -> None:
    r, blocks = state.block_rank[b], len(state.block_rank)
    for i in range(2 * state.groups):
        e = _owned_edge(b, i, state.groups, blocks)
        _move_pins(state.pins, state.on_node, state.node, e, r, s)
    state.held[r] -= state.tokens[b]
    state.held[s] += state.tokens[b]
    state.block_rank[b] = s


@inner
def _move_pins(pins: Int32, on_node: Int32, node: Int64, e: int, r: int, s: int) -> None:
    pins[e, r] -= 1
    pins[e, s] += 1
    on_node[e, node[r]] -= 1
    on_node[e, node[s]] += 1


@inner
def block_gain(
    pins: Int32,
    on_node: Int32,
    node: Int64,
    size: Float64,
    extra: float,
    groups: int,
    blocks: int,
    b: int,
    r: int,
    s: int,
) -> float:
    """Bytes saved if block b moves from owner r to owner s."""
    gain = 0.0
    for i in range(2 * groups):
        e = _owned_edge(b, i, groups, blocks)
        gain += pin_gain(pins, on_node, node, size, extra, e, 1, r, s)
    return gain


@inner
def list_group(start: Int64, members: Int64, tile_rank: Int64, e: int, r: int, tiles: Int64) -> int:
    """Writes the tiles of edge e on rank r to `tiles`; returns how many."""
    n = 0
    for i in range(start[e], start[e + 1]):
        if tile_rank[members[i]] == r:
            tiles[n] = members[i]
            n += 1
    return n


@inner
def list_edges(edges: Int64, work: Float64, tiles: Int64, n: int, e: int, group: Int64) -> float:
    """Writes edge e, then the other edge of each of n tiles, to `group`; returns their work."""
    moved, side = 0.0, 1 if edges[tiles[0], 0] == e else 0
    group[0] = e
    for i in range(n):
        group[i + 1] = edges[tiles[i], side]
        moved += work[tiles[i]]
    return moved


@inner
def best_move(
    pins: Int32,
    on_node: Int32,
    node: Int64,
    size: Float64,
    extra: float,
    load: Float64,
    group: Int64,
    r: int,
    most: float,
    least: float,
) -> tuple[float, int]:
    """Where tiles of one edge on rank r gain the most together: the gain and the rank. Only ranks
    with a load of at most `most` and gains above `least` qualify (-1: none); ties go to the
    emptiest rank. `group` has that edge and the other edge of each tile."""
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
        gain = pin_gain(pins, on_node, node, size, extra, e, n, r, s)
        left = freed  # the most that the remaining tiles can gain
        for i in range(1, n + 1):
            if gain + left < best:
                break
            gain += pin_gain(pins, on_node, node, size, extra, group[i], 1, r, s)
            if pins[group[i], r] == 1:
                left -= (1.0 + extra) * size[group[i]]
        if gain > best or (gain == best and best_s >= 0 and load[s] < load[best_s]):
            best, best_s = gain, s
    return best, best_s
