"""StepEstimate: the approximate duration of a step, updated move by move.

Per mask and direction there are three kinds of resources: the compute of every rank, the port of
every rank, in and out, and the NICs of every node, in and out. A block that a rank uses but does
not own arrives at its port, and its results leave there. A block that ranks of another node use
crosses the border once, and so does the sum of their results. A direction takes as long as its
busiest resource plus a share of the busiest ones of the other kinds, since nothing is hidden
completely.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from dyncp.arrays import Float64, Int32, Int64, starts_of
from dyncp.blocks import BlockGraph, Payload
from dyncp.compiled import compiled, inner
from dyncp.placement.placement import Limits, Placement
from dyncp.topology import Topology

# "Busiest" is a power mean, so that relieving one of several busy resources counts as progress: a
# low power far from the best placement, a high power near it. Resources below these shares of the
# busiest are ignored.
LOW, HIGH = 8, 32
LOW_SHARE, HIGH_SHARE = 0.4, 0.7
# Share of the other kinds of resources that adds to the busiest kind.
EXPOSED = 0.5


class StepEstimate(NamedTuple):
    """An edge is one side (0 queries, 1 keys) of a block for one mask and head group:
    ((mask × 2 + side) × blocks + block) × groups + group. `busy` has row mask × 2 + direction, and
    a last row for work outside attention. Its columns are compute, port in, port out (by rank),
    NICs in, NICs out (by node). Moves update the fields from `tile_rank` on."""

    tile: Int64  # [tiles, 3] query edge, key edge, mask
    cost: Float64  # [tiles, 3] seconds forward and backward, work as limits count it
    start: Int64  # [edges + 1] first index of an edge in members
    members: Int64  # tiles of each edge
    edge: Int64  # [edges, 2] block, row of busy of its forward direction
    # [edges, 2, 4] seconds at a port and at the NICs of a node: sending the edge to a user, forward
    # and backward, and returning its results, forward and backward
    size: Float64
    node: Int64  # [ranks]
    slow: Float64  # [ranks] 1 / speed
    tokens: Float64  # [blocks, 2] tokens, and seconds of their work outside attention
    weight: Float64  # [rows of busy] number of layers
    sizes: Int64  # [4] ranks per node, blocks, head groups, masks
    span: Int64  # [blocks, 2] first and end block of the block's sequence
    most: Float64  # [ranks, 2] most tokens and work, infinite without a limit
    tile_rank: Int64  # [tiles]
    block_rank: Int64  # [blocks]
    pins: Int32  # [edges, ranks] tiles of the edge on the rank
    users: Int32  # [edges, nodes] ranks of the node with tiles of the edge
    busy: Float64  # [masks × 2 + 1, 3 ranks + 2 nodes] seconds
    held: Float64  # [ranks, 2] tokens and work


@inner
def _charge_port(
    size: Float64, node: Int64, busy: Float64, row: int, e: int, u: int, o: int, sign: float
) -> None:
    """Rank u starts (sign 1) or stops (-1) using edge e, which rank o owns."""
    if u == o:
        return
    ranks, inside = len(node), node[u] == node[o]
    for d in range(2):
        out, back = sign * size[e, 0, d], sign * size[e, 0, 2 + d]
        busy[row + d, ranks + u] += out
        busy[row + d, 2 * ranks + u] += back
        if inside:
            busy[row + d, 2 * ranks + o] += out
            busy[row + d, ranks + o] += back


@inner
def _charge_border(
    size: Float64, into: int, nodes: int, busy: Float64,
    row: int, e: int, m: int, n: int, sign: float,
) -> None:  # fmt: skip
    """Node m starts (sign 1) or stops (-1) using edge e, which node n owns."""
    if m == n:
        return
    for d in range(2):
        out, back = sign * size[e, 1, d], sign * size[e, 1, 2 + d]
        busy[row + d, into + m] += out
        busy[row + d, into + nodes + n] += out
        busy[row + d, into + nodes + m] += back
        busy[row + d, into + n] += back


@inner
def pin(
    size: Float64, node: Int64, pins: Int32, users: Int32, busy: Float64,
    row: int, e: int, u: int, o: int, count: int,
) -> None:  # fmt: skip
    """Adds `count` (may be negative) tiles of edge e to rank u; rank o owns its block."""
    had = pins[e, u]
    pins[e, u] = had + count
    if had != 0 and had + count != 0:
        return
    ranks, nodes, m = len(node), users.shape[1], node[u]
    by = 1 if count > 0 else -1
    if nodes < ranks:
        _charge_port(size, node, busy, row, e, u, o, float(by))
    users[e, m] += by
    if users[e, m] == (1 if by > 0 else 0):
        _charge_border(size, 3 * ranks, nodes, busy, row, e, m, node[o], float(by))


@inner
def change_owner(
    size: Float64, node: Int64, pins: Int32, users: Int32, busy: Float64,
    row: int, e: int, r: int, s: int,
) -> None:  # fmt: skip
    """Moves the block of edge e, but not its tiles, from rank r to rank s."""
    ranks, nodes = len(node), users.shape[1]
    for u in range(ranks if nodes < ranks else 0):
        if pins[e, u] > 0:
            _charge_port(size, node, busy, row, e, u, r, -1.0)
            _charge_port(size, node, busy, row, e, u, s, 1.0)
    m, n = node[r], node[s]
    for k in range(nodes if m != n else 0):
        if users[e, k] > 0:
            _charge_border(size, 3 * ranks, nodes, busy, row, e, k, m, -1.0)
            _charge_border(size, 3 * ranks, nodes, busy, row, e, k, n, 1.0)


@inner
def _count_all(step: StepEstimate) -> None:
    """Fills pins, users, busy and held from the ranks of tiles and blocks."""
    step.pins[:] = 0
    step.users[:] = 0
    step.busy[:] = 0.0
    step.held[:] = 0.0
    last = len(step.busy) - 1
    for b in range(len(step.block_rank)):
        r = step.block_rank[b]
        step.held[r, 0] += step.tokens[b, 0]
        step.busy[last, r] += step.tokens[b, 1] * step.slow[r]
    for t in range(len(step.tile_rank)):
        r = step.tile_rank[t]
        step.held[r, 1] += step.cost[t, 2]
        for d in range(2):
            step.busy[2 * step.tile[t, 2] + d, r] += step.cost[t, d] * step.slow[r]
        for i in range(2):
            e = step.tile[t, i]
            o, row = step.block_rank[step.edge[e, 0]], step.edge[e, 1]
            pin(step.size, step.node, step.pins, step.users, step.busy,
                row, e, r, o, 1)  # fmt: skip


@inner
def _busiest(busy: Float64, row: int, first: int, end: int, power: int) -> float:
    """Power mean of busy[row, first:end]. Powers and roots are written out, since calls of pow take
    ten times as long."""
    most = 0.0
    for at in range(first, end):
        most = max(most, busy[row, at])
    if most <= 0:
        return 0.0
    total, notable, unit = 0.0, HIGH_SHARE if power == HIGH else LOW_SHARE, 1.0 / most
    for at in range(first, end):
        share = busy[row, at] * unit
        if share > notable:
            fourth = share * share * share * share
            eighth = fourth * fourth
            total += eighth if power == LOW else eighth * eighth * eighth * eighth
    root = np.sqrt(np.sqrt(np.sqrt(total)))
    return float(most * (root if power == LOW else np.sqrt(np.sqrt(root))))


@inner
def seconds(busy: Float64, weight: Float64, ranks: int, power: int) -> float:
    """The estimate, in units of `unit_seconds`."""
    total = 0.0
    for row in range(len(busy)):
        if weight[row]:
            compute = _busiest(busy, row, 0, ranks, power)
            port = _busiest(busy, row, ranks, 3 * ranks, power)
            border = _busiest(busy, row, 3 * ranks, busy.shape[1], power)
            most = max(compute, port, border)
            total += weight[row] * (most + EXPOSED * (compute + port + border - most))
    return total


@compiled
def estimate(step: StepEstimate, power: int) -> float:
    """Counts everything again and returns the estimate."""
    _count_all(step)
    return seconds(step.busy, step.weight, len(step.slow), power)


@dataclass(frozen=True, eq=False)
class Prices:
    """Costs that placements are compared by. Per mask: seconds of every tile, [tiles, 2] forward
    and backward (0 if not planned), and its number of layers. `token_seconds` is the time of a
    token's work outside attention."""

    tile_seconds: Mapping[str, Float64]
    layers: Mapping[str, float]
    token_seconds: float = 0.0
    forward_only: bool = False


def unit_seconds(prices: Prices, topology: Topology) -> float:
    """Seconds in one unit of the estimates: the mean attention time of a rank."""
    total = sum(float(seconds.sum()) for seconds in prices.tile_seconds.values())
    return max(total / topology.num_ranks, 1e-12)


def make_estimate(
    graph: BlockGraph, placement: Placement, topology: Topology, limits: Limits, prices: Prices
) -> StepEstimate:
    names, blocks, groups = list(graph.tiles), len(graph.blocks), len(graph.head_groups)
    ranks, edges = topology.num_ranks, num_edges(graph)
    tile = np.concatenate([_edges(graph, mask, name) for mask, name in enumerate(names)])
    seconds = np.concatenate([prices.tile_seconds[name] for name in names])
    work = np.concatenate([graph.tile_work(name) for name in names])
    unit = unit_seconds(prices, topology)
    both = np.concatenate([tile[:, 0], tile[:, 1]])
    tokens = graph.blocks.tokens.astype(np.float64)
    rows = 2 * len(names) + 1
    size = _bytes(graph, forward_only=prices.forward_only)
    bandwidth = np.array([topology.intra.bandwidth, topology.inter.bandwidth])
    return StepEstimate(
        tile=tile,
        cost=np.column_stack([seconds / unit, work]),
        start=starts_of(np.bincount(both, minlength=edges)),
        members=np.argsort(both, kind="stable") % max(len(tile), 1),
        edge=_edge_table(len(names), blocks, groups),
        size=np.tile(size[:, None] / bandwidth[:, None] / unit, (len(names), 1, 1)),
        node=np.arange(ranks) // topology.ranks_per_node,
        slow=1 / topology.rank_speeds,
        tokens=np.column_stack([tokens, prices.token_seconds / unit * tokens]),
        weight=np.append(
            np.repeat([float(prices.layers[name]) for name in names], 2),
            float(prices.token_seconds > 0),
        ),
        sizes=np.array([topology.ranks_per_node, blocks, groups, len(names)]),
        span=_spans(graph),
        most=_most(graph, topology, limits, float(work.sum())),
        tile_rank=np.concatenate([placement.tile_rank[name] for name in names]).astype(np.int64),
        block_rank=placement.block_rank.astype(np.int64),
        pins=np.zeros((edges, ranks), np.int32),
        users=np.zeros((edges, topology.nodes), np.int32),
        busy=np.zeros((rows, 3 * ranks + 2 * topology.nodes)),
        held=np.zeros((ranks, 2)),
    )


def num_edges(graph: BlockGraph) -> int:
    return 2 * len(graph.tiles) * len(graph.blocks) * len(graph.head_groups)


def _edges(graph: BlockGraph, mask: int, name: str) -> Int64:
    tiles, blocks, groups = graph.tiles[name], len(graph.blocks), len(graph.head_groups)
    sides = (tiles.q_block, tiles.k_block)
    q, k = (
        ((2 * mask + side) * blocks + block.astype(np.int64)) * groups + tiles.head_group
        for side, block in enumerate(sides)
    )
    return np.column_stack([q, k, np.full(len(q), mask)])


def _edge_table(masks: int, blocks: int, groups: int) -> Int64:
    """Block and row of busy of every edge, [edges, 2]."""
    edge = np.arange(2 * masks * blocks * groups)
    return np.column_stack([edge // groups % blocks, edge // (2 * blocks * groups) * 2])


def _bytes(graph: BlockGraph, *, forward_only: bool) -> Float64:
    """Bytes of the edges of one mask, [edges, 4]: to a user forward and backward, results forward
    and backward."""
    per_token = graph.payload_bytes.astype(np.float64)
    sides = np.zeros((2, per_token.shape[1], 4))
    sides[0] = per_token[[Payload.Q, Payload.Q_DOUT, Payload.OUT, Payload.DQ]].T
    sides[1, :, [0, 1, 3]] = per_token[[Payload.KV, Payload.KV, Payload.DKV]]
    if forward_only:
        sides[:, :, [1, 3]] = 0
    size: Float64 = sides[:, None] * graph.blocks.tokens[None, :, None, None]
    return size.reshape(-1, 4)


def _spans(graph: BlockGraph) -> Int64:
    sequence = graph.blocks.sequence
    first = np.searchsorted(sequence, np.arange(len(graph.batch.lengths) + 1))
    return np.column_stack([first[sequence], first[sequence + 1]]).astype(np.int64)


def _most(graph: BlockGraph, topology: Topology, limits: Limits, work: float) -> Float64:
    """Most tokens and work of every rank, [ranks, 2]."""
    ranks, speed = topology.num_ranks, topology.rank_speeds / topology.rank_speeds.mean()
    tokens, compute = (
        np.inf if tolerance is None else mean * (1 + tolerance)
        for mean, tolerance in (
            (graph.batch.num_tokens / ranks, limits.token_tolerance),
            (work / ranks, limits.compute_tolerance),
        )
    )
    return np.column_stack([np.full(ranks, tokens), compute * speed])
